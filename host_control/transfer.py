"""The states of a transfer: everything that moves for one request in one direction.

One table says which event leads from which state to which, without I/O. docs/design/transfer-states.md draws it.

- The scheduler side takes a load from PROBING to ALLOCATED, hands it to the workers (QUEUED) and learns how it ended.
- The workers take it from QUEUED through MOVING to its end.
- A save (what a preempted request held) begins in QUEUED and ends like a load.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class State(enum.StrEnum):
    """State of a transfer. The last three states are final."""

    PROBING = "probing"
    """A lookup asks which chunks are stored."""
    PENDING = "pending"
    """Another engine is storing chunks, or object storage brings them; the lookup waits for them."""
    MISS = "miss"
    """Nothing is loaded; the reason says why."""
    OFFERED = "offered"
    """vLLM knows how many tokens can be loaded, and has no blocks for them yet."""
    ALLOCATED = "allocated"
    """vLLM has allocated blocks."""
    QUEUED = "queued"
    """The workers have the transfer, and have not started it."""
    MOVING = "moving"
    """Chunks are being moved."""
    PLACED = "placed"
    """All chunks are in place."""
    SHORT = "short"
    """Some leading chunks are in place, or none; the reason says why not all."""
    CANCELLED = "cancelled"
    """The request ended first. Nothing writes to its blocks any more."""


class Event(enum.StrEnum):
    """Event of a transfer."""

    PROBE = "probe"
    """vLLM asks (again) how many tokens can be loaded."""
    WAIT = "wait"
    """The lookup waits for chunks that are pending."""
    MISSED = "missed"
    OFFER = "offer"
    ALLOCATE = "allocate"
    QUEUE = "queue"
    START = "start"
    COMPLETE = "complete"
    FALL_SHORT = "fall short"
    CANCEL = "cancel"


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.PROBING: {
        Event.PROBE: State.PROBING,
        Event.WAIT: State.PENDING,
        Event.MISSED: State.MISS,
        Event.OFFER: State.OFFERED,
    },
    State.PENDING: {
        Event.PROBE: State.PROBING,
    },
    State.MISS: {
        Event.PROBE: State.PROBING,
    },
    State.OFFERED: {
        Event.PROBE: State.PROBING,
        Event.ALLOCATE: State.ALLOCATED,
    },
    State.ALLOCATED: {
        Event.QUEUE: State.QUEUED,
    },
    State.QUEUED: {
        Event.START: State.MOVING,
        Event.COMPLETE: State.PLACED,
        Event.FALL_SHORT: State.SHORT,
        Event.CANCEL: State.CANCELLED,
    },
    State.MOVING: {
        Event.QUEUE: State.QUEUED,  # the next chunks are still pending: other transfers go first
        Event.COMPLETE: State.PLACED,
        Event.FALL_SHORT: State.SHORT,
        Event.CANCEL: State.CANCELLED,
    },
    State.PLACED: {},
    State.SHORT: {},
    State.CANCELLED: {},
}


class Reason(enum.StrEnum):
    """Why a transfer is a miss, or ended as it did. Logs, metrics and the wire have the same names."""

    NONE = ""
    COMPLETE = "complete"
    # The data plane's: an Outcome of the wire in lower case.
    UNSPECIFIED = "unspecified"
    BATCH_FULL = "batch_full"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    MISMATCH = "mismatch"
    NOT_A_RECORD = "not_a_record"
    UNSUPPORTED_CODEC = "unsupported_codec"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    STORAGE_REFUSED = "storage_refused"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    UNKNOWN_MEMORY = "unknown_memory"
    NOT_STORABLE = "not_storable"
    INTERNAL = "internal"
    DEVICE = "device"
    # The client's: there is no answer, or one that cannot be.
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    INVALID_ANSWER = "invalid_answer"
    BREAKER_OPEN = "breaker_open"
    # A lookup's.
    SHORT = "short"
    """The prompt, or the rest of it, has no whole chunk."""
    DISABLED = "disabled"
    UNKNOWN = "unknown"
    """The request was never looked up."""
    UNNAMED = "unnamed"
    """An input of the request has no identity, so its KV has no key."""
    PUBLISHED_LATE = "published_late"
    """Chunks are still pending after the time that this request waits for them."""
    PUBLISHED_GONE = "published_gone"
    """Chunks that were pending will not be stored."""
    COLD_LATE = "cold_late"
    """Chunks are still in object storage alone after the time that this request waits for them."""
    COLD_GONE = "cold_gone"
    """Chunks that were in object storage cannot be read from it."""
    # The engine's.
    OFF = "off"
    REFUSED_BEFORE = "refused_before"
    """A load of this request fell short; vLLM would ask again without end."""
    OTHER_WEIGHTS = "other_weights"
    """The request holds KV of other weights."""
    NOT_EXACT = "not_exact"
    """The stored chunks are not exactly the KV that the preempted request had."""
    NOT_WORTH_IT = "not_worth_it"
    """Too few tokens, or computing is faster."""
    FELL_SHORT = "fell_short"
    """A load brought less than it was to. Its own reason says why."""
    NO_MEMORY = "no_memory"
    SCATTER_FAILED = "scatter_failed"
    CLOSED = "closed"
    NOT_AWAITED = "not_awaited"
    """The engine did not wait for each layer."""
    WEIGHTS_CHANGED = "weights_changed"
    WEIGHTS_UNKNOWN = "weights_unknown"


@dataclass(eq=False)
class Transfer:
    """One transfer; its state is QUEUED at the start where no lookup precedes it.

    ``reason``: why it is a miss, or how it ended.
    """

    state: State = State.PROBING
    reason: Reason = Reason.NONE

    def on(self, event: Event, reason: Reason = Reason.NONE) -> State:
        """Follow an event; return the state that it leads to.

        Raises:
            ValueError: The event cannot happen in this state.
        """
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise ValueError(f"a transfer that is {self.state} cannot follow the event '{event}'") from None
        self.reason = reason
        return self.state


def diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.PROBING.name}", f"    [*] --> {State.QUEUED.name}: save"]
    for state, follow in TRANSITIONS.items():
        lines += [f"    {state.name} --> {target.name}: {event}" for event, target in follow.items()]
    lines += [f"    {state.name} --> [*]" for state in (State.MISS, State.PLACED, State.SHORT, State.CANCELLED)]
    return "\n".join(lines)
