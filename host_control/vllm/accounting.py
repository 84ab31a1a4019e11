"""Counts where the KV of prompts came from: loaded, of the engine's own prefix cache, or computed, and why.

Each prompt is counted once, when it gets blocks or when its first load has ended. Loads also save prefill time, which
is predicted from the engine's own steps.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from host_control.interference.table import ComputeTable
from host_control.transfer import Reason, State
from host_control.vllm.metrics import Counts
from host_control.vllm.requests import Load, RequestState

_PRICED_AT_ONCE: Final = 4
"""Loads whose price is looked up when a load ends, on the engine's thread."""
_UNPRICED_MAX: Final = 256
"""Loads that wait for their price. It is known once the engine has computed some prompts."""


@dataclass
class _Prompt:
    """A prompt that is not counted yet: its leading stored tokens and the reason of its lookup's answer."""

    stored_tokens: int = 0
    reason: str = Reason.NONE


class PromptAccount:
    """Counts for one engine. Used on the engine's thread only.

    Args:
        step_tokens: Most tokens that the engine computes in a step.
    """

    def __init__(self, counts: Counts, table: ComputeTable, chunk_tokens: int, step_tokens: int) -> None:
        self._counts = counts
        self._table = table
        self._chunk_tokens = chunk_tokens
        self._step_tokens = step_tokens
        self._prompts: dict[str, _Prompt] = {}
        self._unpriced: deque[tuple[int, int, int]] = deque(maxlen=_UNPRICED_MAX)

    def arrived(self, state: RequestState, *, named: bool) -> None:
        """Note a request, before its lookup. Without a lookup, it is counted at once."""
        if state.served:
            self._prompts[state.request.request_id] = _Prompt()
        else:
            tokens = state.request.num_prompt_tokens
            self._add({Reason.OFF if named else Reason.UNNAMED: tokens})

    def answered(self, request_id: str, stored_tokens: int, reason: str) -> None:
        """Note a lookup's answer."""
        if request_id in self._prompts:
            self._prompts[request_id] = _Prompt(stored_tokens, reason)

    def allocated(self, state: RequestState, external_tokens: int) -> None:
        """Note that a request has blocks; one that loads tokens is counted when its load has ended."""
        if not external_tokens:
            self._count(state, state.load, 0)

    def ended(self, state: RequestState | None, load: Load) -> None:
        """Note the end of a load; without a state, its request ended first."""
        if state is None:
            return
        tokens = load.placed_tokens(self._chunk_tokens)
        self._count(state, load, tokens)
        if tokens:
            self._unpriced.append((load.local_tokens, tokens, state.request.num_tokens))
            self._price()

    def forget(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def _count(self, state: RequestState, load: Load, loaded: int) -> None:
        if (prompt := self._prompts.pop(state.request.request_id, None)) is None:
            return
        tokens = state.request.num_prompt_tokens
        local = min(load.local_tokens, tokens)
        loaded = min(loaded, tokens - local)
        whole, have = tokens // self._chunk_tokens * self._chunk_tokens, local + loaded
        stored = max(min(prompt.stored_tokens, tokens), have)
        unused = load.reason or Reason.NOT_WORTH_IT
        if load.state is State.SHORT:
            unused = Reason.FELL_SHORT
        elif stored - have < self._chunk_tokens:
            unused = Reason.SHORT  # an engine computes at least the last token
        elif loaded:
            unused = Reason.NOT_WORTH_IT
        absent = prompt.reason or load.reason or Reason.UNKNOWN
        if absent == Reason.COMPLETE:
            absent = Reason.ABSENT
        self._add({"local": local, "loaded": loaded})
        for reason, count in ((unused, stored - have), (absent, max(whole - stored, 0))):
            self._counts.add("prompt_tokens", count, reason=reason)
        self._counts.add("prompt_tokens", tokens - max(whole, stored), reason=Reason.SHORT)

    def _add(self, tokens: dict[str, int]) -> None:
        self._counts.add("prompts")
        for reason, count in tokens.items():
            self._counts.add("prompt_tokens", count, reason=reason)

    def _price(self) -> None:
        """Count the saved time of some loads whose price is known: that of all tokens without that of the rest."""
        for _ in range(min(len(self._unpriced), _PRICED_AT_ONCE)):
            local, loaded, tokens = self._unpriced.popleft()
            without = self._table.prefill(local, tokens, self._step_tokens)
            rest = None if without is None else self._table.prefill(local + loaded, tokens, self._step_tokens)
            if without is None or rest is None:
                self._unpriced.append((local, loaded, tokens))
            else:
                self._counts.add("saved_prefill_seconds", max(without - rest, 0.0))
