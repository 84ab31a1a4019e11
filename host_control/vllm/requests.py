"""The scheduler side's state of one request: its load, its stores, and the save of a preemption."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from host_control.disaggregation import Available, Disaggregation
from host_control.fetch_policy import Decision
from host_control.interference.table import LayerWait
from host_control.lookup import SAVED, LookupAnswer
from host_control.transfer import Event, Reason, State, Transfer
from host_control.vllm.hints import Hints
from host_control.vllm.metadata import LoadOperation
from shadowserve.keys import Extra

NEVER: Final = 1 << 62
"""More tokens than any request has."""

_ASKED_AGAIN: Final = frozenset({State.PROBING, State.PENDING, State.MISS, State.OFFERED})
"""States in which vLLM may ask again for the tokens that can be loaded."""


@dataclass(eq=False)
class Load(Transfer):
    """A load of one request, from vLLM's question for matched tokens to the workers' report.

    Attributes:
        local_tokens: Tokens of the engine's own prefix when the load was offered.
        chunk_keys: Keys of the chunks that can be loaded, from the prompt's first chunk on.
        tail_end: Tokens up to the end of the tail, where a tail is offered; else 0.
        shard_layout: Shard layout of the records; 0 is the engine's own.
        layerwise: The step that computes on the load waits for each layer as it needs it.
        not_layerwise: Why not (a reason of :class:`~host_control.vllm.loads.LoadWays`), or empty.
        layer_waits: How the step waited for each layer.
        in_step: A step computes on the load at once, so the request never waits outside the running batch.
        decision: The policy's decision that the load carries out.
        seconds: Longest time that a rank reported for the load; 0 before the first report.
        why_short: Why it fell short, as some rank tells.
        tokens: Tokens that it is to bring.
        chunks: Chunks to load of the first group, from ``first_chunk`` on.
        placed_chunks: Leading chunks of these that every rank placed, as far as reported.
        abort_due: The request has ended and the workers have not been notified.
    """

    request_id: str = ""
    local_tokens: int = 0
    chunk_keys: list[bytes] | None = None
    tail_end: int = 0
    epoch: str = ""
    shard_layout: int = 0
    layerwise: bool = False
    not_layerwise: str = ""
    layer_waits: list[LayerWait] = field(default_factory=list)
    in_step: bool = False
    decision: Decision | None = None
    began_s: float = 0.0
    seconds: float = 0.0
    why_short: str = ""
    tokens: int = 0
    first_chunk: int = 0
    chunks: int = 0
    placed_chunks: int = 0
    table: list[int] = field(default_factory=list)
    operation: LoadOperation | None = None
    abort_due: bool = False

    @property
    def available(self) -> Available | None:
        """Chunks that the workers may fetch by now, as last sent; None: all from the start."""
        return None if self.operation is None else self.operation.available

    def placed_tokens(self, chunk_tokens: int) -> int:
        """Return how many tokens it has brought, once it has ended."""
        if self.state is State.PLACED:
            return self.tokens
        end_tokens = (self.first_chunk + self.placed_chunks) * chunk_tokens
        return 0 if self.state is State.CANCELLED else min(self.tokens, max(end_tokens - self.local_tokens, 0))


@dataclass(eq=False)
class Held:
    """KV that a running request has in the engine's memory.

    Attributes:
        tokens: Leading tokens whose KV exists after the request's last step, drafts included.
    """

    request_id: str
    blocks: list[list[int]]
    tokens: int


@dataclass(eq=False)
class Save(Transfer):
    """A save of what a request held when it was preempted.

    Attributes:
        chunk_keys: Keys of the chunks, then of the tail if there is one.
        held: Keys, per group, of those that the request held a block of; a load takes the same ones.
        preemptions: The request's preemptions, this one included.
        until: Time (monotonic) up to which the request waits for the save.
        ranks: Ranks that have not stored or dropped their part yet.
        apart: The save has records of its own.
    """

    tokens: int = 0
    chunk_tokens: int = 1
    chunk_keys: list[bytes] = field(default_factory=list)
    held: list[list[bytes]] = field(default_factory=list)
    preemptions: int = 0
    until: float = 0.0
    ranks: int = 0
    apart: bool = False

    @property
    def pending(self) -> bool:
        """Some rank is still storing it, and there is time to wait."""
        return self.state is State.QUEUED and time.monotonic() < self.until

    @property
    def tail_tokens(self) -> int:
        """Tokens behind the last whole chunk."""
        return self.tokens % self.chunk_tokens

    @property
    def expected_answer(self) -> LookupAnswer:
        """The answer of a lookup after the save, if every rank stores all of it."""
        layout = SAVED if self.apart else 0
        return LookupAnswer(
            self.tokens - self.tail_tokens, Reason.COMPLETE, shard_layout=layout, tail=self.tail_tokens > 0
        )

    def settle(self, ranks: int) -> None:
        """Record that some more ranks have stored or dropped their part."""
        self.ranks -= ranks
        if self.ranks <= 0 and self.state is State.QUEUED:
            self.on(Event.COMPLETE)


@dataclass(eq=False)
class RequestState:
    """One request, from its arrival to its end.

    Attributes:
        served: The request has chunk keys; others are computed without the cache.
        extra: Inputs of its KV other than tokens (:meth:`RequestInputs.extra`).
        disaggregation: What its prompt needs of another engine.
        hints: What its sender says about its KV's future.
        held: Its KV in the engine's memory, while it runs.
        salt: Secret of the names of its saved records.
        preemptions: Preemptions at the time of the last lookup.
        counted: Metrics have its lookup.
        refused: A load fell short. No other is offered: vLLM would ask again without end.
        mixes_weights: It holds KV of other weights, or continues such KV: nothing of it is stored.
        stored_chunks: Leading chunks that are stored, or are being stored.
        tail_end: Tokens up to the end of the prompt's tail, which has a record of its own; 0 without a tail.
        tail_stored: The tail is stored, or is being stored.
        store_at: Computed tokens that complete its next chunk.
        foreseen: The policy was asked to decide before the lookup answered.
        arrived_s: Time of its arrival, of the monotonic clock; 0.0 if the policy does not need it.
    """

    request: Any
    served: bool = False
    extra: Extra | Callable[[], Extra] = field(default_factory=Extra)
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    hints: Hints = Hints()
    load: Load = field(default_factory=Load)
    save: Save | None = None
    held: Held | None = None
    salt: bytes = b""
    preemptions: int = 0
    counted: bool = False
    refused: bool = False
    mixes_weights: bool = False
    stored_chunks: int = 0
    tail_end: int = 0
    tail_stored: bool = False
    store_at: int = NEVER
    foreseen: bool = False
    arrived_s: float = 0.0

    def probe(self, local_tokens: int) -> Load:
        """Start a load, or start it over where vLLM has no blocks for it yet."""
        if self.load.state in _ASKED_AGAIN:
            self.load.on(Event.PROBE)
        else:
            self.load = Load()
        self.load.request_id = self.request.request_id
        self.load.local_tokens, self.load.decision = local_tokens, None
        return self.load

    @property
    def current_save(self) -> Save | None:
        """The save of the request's last preemption, if there is one."""
        save = self.save
        return save if save is not None and save.preemptions == self.request.num_preemptions else None

    @property
    def prompt_is_shared(self) -> bool:
        """Another engine computes the prompt or continues it, and no token was generated yet."""
        request, disaggregation = self.request, self.disaggregation
        shared = disaggregation.publishes or disaggregation.waits
        return bool(shared) and request.num_tokens == request.num_prompt_tokens

    @property
    def was_computed_here(self) -> bool:
        """It ran and was preempted, and its KV is not only a prompt's that engines share."""
        return self.request.num_preemptions > 0 and not self.prompt_is_shared
