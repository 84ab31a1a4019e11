"""The memory cache: which of the pool's objects are in memory, and which copies are dropped when memory is needed.

The arenas hold three kinds of objects. *Kept* ones are on no device, or not yet: they leave memory only when they are
written or removed. The others are copies of objects on devices, in two queues: a new copy is on probation, and its
second hit moves it to the main queue, where the least recently used copy is dropped first. So reading many objects once
takes only a share of the memory, and objects that are read again stay. Objects of memory's own share (placement) begin
in the main queue.

A copy that is being read or sent is skipped: dropping it would free nothing.
"""

from collections import OrderedDict
from typing import Final

from shadowserve.pool.arena import Arenas, Buffer

_PROBATION_SHARE: Final = 0.25
"""Share of the copies' memory that probation may have before the main queue is spared: a quarter, as 2Q's authors
found."""
_GHOSTS_MAX: Final = 65_536
_SKIPPED_MAX: Final = 64
"""Most copies in use that are skipped in search of one to drop; those in use are the most recently used."""
_PROMOTING_HITS: Final = 2


class MemoryCache:
    """Buffers by the slot of their entry in the index."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._kept: dict[int, Buffer] = {}
        self._main: OrderedDict[int, Buffer] = OrderedDict()
        self._probation: OrderedDict[int, Buffer] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._probation_bytes = 0
        self._main_bytes = 0
        self.kept_bytes = 0
        self.promotions = 0  # copies that moved to the main queue
        self.dropped = 0  # copies that were dropped for room

    def __len__(self) -> int:
        return len(self._kept) + len(self._main) + len(self._probation)

    @property
    def copy_bytes(self) -> int:
        return self._main_bytes + self._probation_bytes

    def peek(self, slot: int) -> Buffer | None:
        return self._main.get(slot) or self._kept.get(slot) or self._probation.get(slot)

    def get(self, slot: int) -> Buffer | None:
        buffer = self._main.get(slot)
        if buffer is not None:
            self._main.move_to_end(slot)
            return buffer
        buffer = self._kept.get(slot)
        if buffer is not None:
            buffer.hits += 1
            return buffer
        buffer = self._probation.get(slot)
        if buffer is None:
            return None
        buffer.hits += 1
        if buffer.hits >= _PROMOTING_HITS:
            del self._probation[slot]
            self._probation_bytes -= buffer.size
            self._to_main(slot, buffer)
        return buffer

    def is_kept(self, slot: int) -> bool:
        """Return whether an entry is in memory and not durable on a device."""
        return slot in self._kept

    def keep(self, slot: int, buffer: Buffer) -> None:
        """Add the buffer of an entry that no device has; its one user becomes this cache."""
        self._kept[slot] = buffer
        self.kept_bytes += buffer.size

    def add(self, slot: int, buffer: Buffer, *, placed: bool = False) -> None:
        """Add a copy of an object on a device; its one user becomes this cache. ``placed``: it belongs to memory's
        own share."""
        if placed or buffer.hits >= _PROMOTING_HITS or slot in self._ghosts:
            self._ghosts.pop(slot, None)
            self._to_main(slot, buffer)
        else:
            self._probation[slot] = buffer
            self._probation_bytes += buffer.size

    def written(self, slot: int, *, placed: bool) -> None:
        """Turn a kept buffer into a copy: its object is durable."""
        buffer = self._kept.pop(slot)
        self.kept_bytes -= buffer.size
        self.add(slot, buffer, placed=placed)

    def drop(self, slot: int) -> None:
        if (buffer := self._kept.pop(slot, None)) is not None:
            self.kept_bytes -= buffer.size
        elif (buffer := self._main.pop(slot, None)) is not None:
            self._main_bytes -= buffer.size
        elif (buffer := self._probation.pop(slot, None)) is not None:
            self._probation_bytes -= buffer.size
        self._ghosts.pop(slot, None)
        if buffer is not None:
            self._arenas.detach(buffer)

    def make_room(self) -> bool:
        """Drop one copy that has no other user; return False if there is none."""
        first_probation = not self._main or self._probation_bytes > _PROBATION_SHARE * self.copy_bytes
        queues = (self._probation, self._main) if first_probation else (self._main, self._probation)
        for queue in queues:
            slot = _unused(queue)
            if slot is None:
                continue
            buffer = queue.pop(slot)
            if queue is self._probation:
                self._probation_bytes -= buffer.size
                if buffer.hits:  # a copy without a hit leaves no ghost entry
                    self._remember(slot)
            else:
                self._main_bytes -= buffer.size
            self.dropped += 1
            self._arenas.release(buffer)
            return True
        return False

    def _to_main(self, slot: int, buffer: Buffer) -> None:
        self._main[slot] = buffer
        self._main_bytes += buffer.size
        self.promotions += 1

    def _remember(self, slot: int) -> None:
        self._ghosts[slot] = None
        if len(self._ghosts) > _GHOSTS_MAX:
            self._ghosts.popitem(last=False)


def _unused(queue: OrderedDict[int, Buffer]) -> int | None:
    """Return the first slot of a queue whose buffer has no other user, among the first few."""
    for skipped, (slot, buffer) in enumerate(queue.items()):
        if buffer.users == 1:
            return slot
        if skipped == _SKIPPED_MAX:
            break
    return None
