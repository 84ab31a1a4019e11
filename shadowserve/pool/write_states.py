"""A put on its way to a device: a machine of few states, and the table of those under way.

==========  ===========================================  ===============================  =============================
state       what is so                                   it goes on                       to
==========  ===========================================  ===============================  =============================
TAKEN       it can be read from memory                   when its checksums are made      SEALED, or TAKEN_BACK
SEALED      its device has yet to be asked               when its volume has room for it  WRITING, TAKEN_BACK or FAILED
WRITING     its volume has it, and tells the log         when the log is durable          DURABLE, OUTDATED or FAILED
OUTDATED    its entry is gone or another; the volume     no more
            has it, and its log tells of both in order
TAKEN_BACK  its entry is gone or another, and its        no more
            volume has never heard of it
DURABLE     its bytes and its record are on the device   no more
FAILED      they are not, and its entry goes             no more
==========  ===========================================  ===============================  =============================

What ends gives its memory back; :data:`ENDS` says what else becomes of it. Whoever stored it hears of it from
``writes`` when no power cut can bring back what was there before.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from shadowserve.pool.arena import Buffer
from shadowserve.pool.disk import Disk, Extent
from shadowserve.pool.entries import Entry
from shadowserve.pool.volume.changes import Ticket


class State(Enum):
    """Of a put; the module's table tells of each."""

    TAKEN = "taken"
    SEALED = "sealed"
    WRITING = "writing"
    OUTDATED = "outdated"
    TAKEN_BACK = "taken back"
    DURABLE = "durable"
    FAILED = "failed"


_NEXT: Final = {
    State.TAKEN: (State.SEALED, State.TAKEN_BACK),
    State.SEALED: (State.WRITING, State.TAKEN_BACK, State.FAILED),
    State.WRITING: (State.DURABLE, State.OUTDATED, State.FAILED),
}


class End(NamedTuple):
    """What becomes of a put that has ended.

    Attributes:
        has_entry: the index has it still: what it replaced on other devices goes, or it goes itself.
        fails: whoever stored it hears the error.
        removal: whoever stored it waits until its removal is durable, too.
    """

    has_entry: bool
    fails: bool
    removal: bool


ENDS: Final = {
    State.DURABLE: End(has_entry=True, fails=False, removal=False),
    State.FAILED: End(has_entry=True, fails=True, removal=False),
    State.OUTDATED: End(has_entry=False, fails=False, removal=False),
    State.TAKEN_BACK: End(has_entry=False, fails=False, removal=True),
}


class Left(NamedTuple):
    """What an object has left behind on a device, by moving to another one: gone once it is durable there."""

    disk: Disk
    place: Extent


class Cancelled(NamedTuple):
    """A write whose entry goes, or is replaced.

    Attributes:
        submitted: its volume has it.
        replaced: if not, what it would have replaced there.
        left: what it would have replaced on other devices.
    """

    submitted: bool
    replaced: Extent | None
    left: list[Left]


@dataclass(slots=True, eq=False)
class Write:
    """One object on its way to a device.

    Attributes:
        replaced: what lies on the same device under the same key: free when this is durable.
        left: what lies on others.
        ticket: its own.
        tickets: to settle with it: also those of puts that it replaced before they were durable.
        error: why it failed.
    """

    entry: Entry
    disk: Disk
    buffer: Buffer
    name: bytes | None
    placed: bool
    replaced: Extent | None
    left: list[Left]
    ticket: Ticket
    tickets: list[Ticket]
    state: State = State.TAKEN
    error: Exception | None = None

    def go(self, state: State) -> None:
        """Go on to a state that may follow."""
        assert state in _NEXT.get(self.state, ()), f"a put cannot be {state.value} after {self.state.value}"
        self.state = state


class Writes:
    """Those under way whose entries are what they were, by slot. With the pool's lock held."""

    def __init__(self) -> None:
        self._of: dict[int, Write] = {}
        self._inherited: dict[int, list[Ticket]] = {}

    def of(self, slot: int) -> Write | None:
        """Return the write of a slot's entry."""
        return self._of.get(slot)

    def begin(self, write: Write) -> None:
        """Take note of one; it inherits the tickets of what it replaces."""
        slot = write.entry.slot
        write.tickets = [*self.inherit(slot), write.ticket]
        self._of[slot] = write

    def end(self, slot: int) -> None:
        """Forget the write of a slot's entry."""
        del self._of[slot]

    def inherit(self, slot: int) -> list[Ticket]:
        """Return the tickets of values that the entry of a slot has replaced before they were durable: once."""
        return self._inherited.pop(slot, [])

    def cancel(self, slot: int, replaced: bool) -> Cancelled | None:
        """Take note that an entry goes, or is ``replaced``; return what becomes of its write, None if it has none.

        Who stored what is replaced hears when the new value is durable: were it earlier, a crash could take both.
        """
        write = self._of.pop(slot, None)
        if write is None:
            return None
        submitted = write.state is State.WRITING
        write.go(State.OUTDATED if submitted else State.TAKEN_BACK)
        if replaced:
            self._inherited.setdefault(slot, []).extend(write.tickets)
            write.tickets = []
        left, write.left = write.left, []
        return Cancelled(submitted, None if submitted else write.replaced, left)
