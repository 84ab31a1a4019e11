"""Placement: which device gets an object, and whether it stays in memory as well.

Memory and devices have shares by their bandwidths. An object of memory's share stays in memory and is written to a
device too, chosen by the devices' shares among themselves: so a restart keeps it, and the devices' reads stay in
proportion when memory drops it. With ``memory_homes`` it is in memory alone, as in the paper.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk
from shadowserve.pool.entries import Entry
from shadowserve.pool.interleaver import BandwidthMeter, BandwidthShares, Interleaver
from shadowserve.pool.space import Space
from shadowserve.pool.volume.format import BLOCK_BYTES, blocks_of


class Location(NamedTuple):
    """Device and extent of an object, or memory alone; ``placed``: memory keeps it by its own share."""

    disk: Disk | None
    extent: int
    placed: bool


class Placement:
    """Places objects. With the pool's lock held.

    Attributes:
        devices: Distributes the objects of memory's share over the devices.
    """

    def __init__(self, core: Core, space: Space, meters: Sequence[BandwidthMeter], *, memory_homes: bool) -> None:
        self._core = core
        self._space = space
        self._memory_homes = memory_homes
        self.bandwidth_shares = BandwidthShares(meters)  # shares of memory (first) and of the devices
        self.pool = Interleaver(self.bandwidth_shares.shares)  # distributes all objects over memory and devices
        self.devices = Interleaver(self.bandwidth_shares.shares[1:] or [1.0])

    def update(self) -> None:
        if self.bandwidth_shares.update():
            self.pool.set_shares(self.bandwidth_shares.shares)
            self.devices.set_shares(self.bandwidth_shares.shares[1:] or [1.0])

    def choose(self, length: int, tenant: int, parent: bytes, key: bytes, old: Entry | None) -> Location | None:
        """Return the place of an object, with its extent reserved; None if no device has room now.

        ``parent``: key of the previous chunk, or empty. ``old``: the replaced entry, which may be evicted for it.
        """
        core = self._core
        size = blocks_of(length) * BLOCK_BYTES
        now_ms = core.clock_ms()
        may = [disk.takes_objects(size, now_ms) for disk in core.disks]
        if not any(may):  # an error is better than an OK for a value that the next start would lose
            may = [disk.takes_objects(size, now_ms, avoided=True) for disk in core.disks]
        if not any(may):
            return Location(None, 0, True)
        available = [True, *may]
        before, name = (tenant, parent) if parent else None, (tenant, key)
        order = self.pool.order(size, before, available)
        placed = order[0] == 0
        if placed:
            if self._memory_homes:
                self.pool.place(0, size, before, name, available)
                return Location(None, 0, True)
            candidates = self.devices.order(size, before, may)
        else:
            candidates = [number - 1 for number in order if number]
        if old is not None and old.device in candidates:
            # One device's log has the order of the object's puts; with two logs, both would have to be intact.
            candidates.remove(old.device)
            candidates.insert(0, old.device)
        for number in candidates:
            disk = core.disks[number]
            extent = self._space.extent(disk, length, old)
            if extent is not None:
                if placed:
                    self.pool.place(0, size, before, name, available)
                    self.devices.place(number, size, before, name, may)
                else:
                    self.pool.place(number + 1, size, before, name, available)
                return Location(disk, extent, placed)
        return None
