"""The states of a put on its way to a device, and the table of puts in progress.

==========  ============================================  ===============================  =============================
state       meaning                                       event                            next
==========  ============================================  ===============================  =============================
TAKEN       it can be read from memory                    when its checksums are made      SEALED, or TAKEN_BACK
SEALED      it waits for its volume                       when its volume has room for it  WRITING, TAKEN_BACK or FAILED
WRITING     its volume writes it and logs its record      when the log is durable          DURABLE, OUTDATED or FAILED
OUTDATED    its entry was removed or replaced after its   no more
            volume got it; the log has both in order
TAKEN_BACK  its entry was removed or replaced before its  no more
            volume got it
DURABLE     its bytes and its record are on the device    no more
FAILED      its write has failed, and its entry is        no more
            removed
==========  ============================================  ===============================  =============================

:data:`ENDS` lists what happens at the end of a put, besides the release of its memory.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from shadowserve.pool.arena import Buffer
from shadowserve.pool.disk import Disk, Extent
from shadowserve.pool.entries import Entry
from shadowserve.pool.volume.tickets import Ticket


class State(Enum):
    """State of a put; the module's table explains each."""

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
    """Actions at the end of a put."""

    has_entry: bool  # it is in the index still: old copies are freed, or after a failure the entry is removed
    fails: bool  # the ticket settles with the error
    removal: bool  # the ticket waits until the removal of the entry is durable too


ENDS: Final = {
    State.DURABLE: End(has_entry=True, fails=False, removal=False),
    State.FAILED: End(has_entry=True, fails=True, removal=False),
    State.OUTDATED: End(has_entry=False, fails=False, removal=False),
    State.TAKEN_BACK: End(has_entry=False, fails=False, removal=True),
}


class OldCopy(NamedTuple):
    """An object's previous copy on another device: freed when the new one is durable."""

    disk: Disk
    extent: Extent


class Cancelled(NamedTuple):
    """A write whose entry was removed or replaced."""

    submitted: bool  # its volume has it
    replaced: Extent | None  # otherwise: the extent on the same device that it would have replaced
    old_copies: list[OldCopy]  # copies on other devices that it would have replaced


@dataclass(slots=True, eq=False)
class Write:
    """One object on its way to a device."""

    entry: Entry
    disk: Disk
    buffer: Buffer
    name: bytes | None  # text of the key; None for a chunk's
    placed: bool  # memory keeps the object by its own share
    replaced: Extent | None  # extent of the same key on the same device; freed when this write is durable
    old_copies: list[OldCopy]  # copies of the same key on other devices
    ticket: Ticket  # its own ticket
    tickets: list[Ticket]  # tickets to settle with it, also those of values that it replaced before they were durable
    state: State = State.TAKEN
    error: Exception | None = None

    def move_to(self, state: State) -> None:
        """Change the state to one that may follow."""
        assert state in _NEXT.get(self.state, ()), f"a put cannot be {state.value} after {self.state.value}"
        self.state = state


class Writes:
    """Puts in progress whose entries are unchanged, by slot. With the pool's lock held."""

    def __init__(self) -> None:
        self._of: dict[int, Write] = {}
        self._inherited: dict[int, list[Ticket]] = {}

    def of(self, slot: int) -> Write | None:
        return self._of.get(slot)

    def begin(self, write: Write) -> None:
        """Add a write; it inherits the tickets of the values that it replaces."""
        slot = write.entry.slot
        write.tickets = [*self.inherit(slot), write.ticket]
        self._of[slot] = write

    def end(self, slot: int) -> None:
        del self._of[slot]

    def inherit(self, slot: int) -> list[Ticket]:
        """Take the tickets of values that the slot's entry has replaced before they were durable."""
        return self._inherited.pop(slot, [])

    def cancel(self, slot: int, replaced: bool) -> Cancelled | None:
        """Cancel the write of an entry that is removed or ``replaced``; None if there is no write.

        The tickets of a replaced value settle when the new value is durable: settled earlier, a crash could lose both.
        """
        write = self._of.pop(slot, None)
        if write is None:
            return None
        submitted = write.state is State.WRITING
        write.move_to(State.OUTDATED if submitted else State.TAKEN_BACK)
        if replaced:
            self._inherited.setdefault(slot, []).extend(write.tickets)
            write.tickets = []
        old_copies, write.old_copies = write.old_copies, []
        return Cancelled(submitted, None if submitted else write.replaced, old_copies)
