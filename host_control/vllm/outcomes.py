"""Why a prompt's KV was loaded, or not: for each request one debug line in the engine's log, and one span."""

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from host_control.lookup import LookupAnswer, PrefixLookup
from host_control.transfer import Reason, State
from host_control.vllm.groups import Groups
from host_control.vllm.loads import NO_LAYERS
from host_control.vllm.requests import Load, RequestState
from shadowserve import spans
from shadowserve.tier import Tier


@dataclass(slots=True)
class _Asked:
    """A request that waits for its KV."""

    span: spans.Span
    began_s: float
    prompt_tokens: int
    answer: LookupAnswer | None = None

    def why_not_more(self, tokens: int, chunk_tokens: int) -> tuple[str, str]:
        """Return why no more than these leading tokens come from a cache, and the detail."""
        if self.answer is None or tokens < self.answer.tokens:
            return Reason.NOT_WORTH_IT, ""
        if self.answer.reason == Reason.COMPLETE and tokens < (self.prompt_tokens - 1) // chunk_tokens * chunk_tokens:
            return Reason.ABSENT, ""
        return self.answer.reason, self.answer.detail


class Outcomes:
    """Follows requests from their arrival to the first step that computes on them, and again after a preemption.

    Attributes:
        lookup: The engine's lookups; None before its workers are known.
    """

    def __init__(self, logger: logging.Logger, groups: Groups | None) -> None:
        self._logger = logger
        self._chunk_tokens = 1 if groups is None else groups.chunk_tokens
        self._asked: dict[str, _Asked] = {}
        self.lookup: PrefixLookup | None = None

    def begin(self, request: Any) -> None:
        """Follow a request, which has arrived or waits again; nothing changes if it is followed already."""
        if request.request_id in self._asked or not (spans.recording() or self._logger.isEnabledFor(logging.DEBUG)):
            return
        parent = str((request.trace_headers or {}).get(spans.HEADER, ""))
        span = spans.begin("request", parent, root=True, request=request.request_id)
        self._asked[request.request_id] = _Asked(span, time.monotonic(), request.num_prompt_tokens)

    def arrived(self, state: RequestState, problem: str) -> None:
        """Tell that a new request is served without the cache, if it is."""
        if not state.served:
            self.tell(state.request.request_id, Reason.OFF if problem else Reason.UNNAMED, problem)

    def context(self, request_id: str) -> str:
        """Return the context of a request's span; empty for none."""
        asked = self._asked.get(request_id)
        return "" if asked is None else asked.span.context

    def allocated(self, load: Load, tokens: int) -> None:
        """Follow a request that has its blocks: it loads some tokens, or none, and that is its outcome."""
        if (asked := self._asked.get(load.request_id)) is None or self.lookup is None:
            return
        asked.answer = self.lookup.poll(load.request_id)
        if load.operation is not None and tokens:
            load.operation.context = asked.span.context
            return
        reason, detail = str(load.reason), ""
        if reason in (Reason.NONE, Reason.NOT_WORTH_IT):
            reason, detail = asked.why_not_more(load.local_tokens, self._chunk_tokens)
        self.tell(load.request_id, reason, detail, local_tokens=load.local_tokens)

    def ended(self, load: Load) -> None:
        """Tell how a load ended."""
        if (asked := self._asked.get(load.request_id)) is None:
            return
        tokens, local = load.placed_tokens(self._chunk_tokens), load.local_tokens
        if load.state is State.PLACED:
            reason, detail = asked.why_not_more(local + tokens, self._chunk_tokens)
        else:
            reason, detail = str(load.reason) or load.why_short, ""
        self.tell(load.request_id, reason, detail, tokens=tokens, local_tokens=local, load=load)

    def finished(self, request_id: str, load: Load | None) -> None:
        """Tell that a request has ended while it waited; one with a load in flight waits for the load's end."""
        if load is None or load.in_step:
            self.tell(request_id, Reason.CANCELLED)

    def tell(
        self,
        request_id: str,
        reason: str,
        detail: str = "",
        *,
        tokens: int = 0,
        local_tokens: int = 0,
        load: Load | None = None,
    ) -> None:
        """Write the line and end the span of a request; nothing happens if it has ended."""
        if (asked := self._asked.pop(request_id, None)) is None:
            return
        waited_s = time.monotonic() - asked.began_s
        found = Counter(asked.answer.tiers if asked.answer is not None else b"")
        tiers = ", ".join(f"{count} {Tier(tier).label}" for tier, count in sorted(found.items()) if tier != Tier.NONE)
        way, layer_wait_s = ("", 0.0) if load is None else _way(load)
        asked.span.end(
            reason=reason,
            detail=detail,
            prompt_tokens=asked.prompt_tokens,
            loaded_tokens=tokens,
            local_tokens=local_tokens,
            tiers=tiers,
            waited_s=waited_s,
            way=way,
            layer_wait_s=layer_wait_s,
        )
        self._logger.debug(
            "ShadowServe: request %s: %d of %d prompt tokens loaded, %d in vLLM's own cache; reason: %s%s; chunks: %s; "
            "waited %.3f s%s",
            *(request_id, tokens, asked.prompt_tokens, local_tokens, reason, detail and f" ({detail})"),
            *(tiers or "none", waited_s, way and f"; {way}"),
        )


def _way(load: Load) -> tuple[str, float]:
    """Tell how a load's layers came, and how long its step waited for them; empty in engines without layer order."""
    if not load.layerwise:
        return f"not layer by layer: {load.not_layerwise}" if load.not_layerwise not in ("", NO_LAYERS) else "", 0.0
    seconds = sum(wait.seconds for wait in load.layer_waits)
    ahead = sum(wait.ahead for wait in load.layer_waits) / max(len(load.layer_waits), 1)
    return f"layer by layer: {seconds:.3f} s of waiting for layers, {ahead:.1f} layers ahead", seconds
