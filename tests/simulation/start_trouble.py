"""Faults during the start of a server: a power cut at any operation, and failing operations."""

import random
from types import TracebackType

from simulated_device import Fault, SimulatedDevice
from world import World

from shadowserve.block import OperationKind
from shadowserve.pool.volume.format import SUPERBLOCK_OFFSETS, Superblock

_OPERATIONS: tuple[int, ...] = (1, 3, 10, 30)
_BLOCK_BYTES = 4096


class PowerCutError(Exception):
    """The power is off: the server executes nothing more."""


class StartTrouble:
    """Activates one fault while its context is open.

    It damages only one of two copies. Damage of both belongs to plans with failing devices.
    """

    def __init__(self, world: World, devices: list[SimulatedDevice]) -> None:
        self._chance: random.Random = world.random
        self._devices = devices
        self._left = 0
        self._faults: list[tuple[SimulatedDevice, Fault]] = []

    @property
    def is_met(self) -> bool:
        return any(fault.met for _, fault in self._faults)

    def __enter__(self) -> None:
        what = self._chance.choice(("power", "power", "log", "superblock", "repairing", "flush"))
        device = self._chance.choice(self._devices)
        if what == "power":
            self._left = self._chance.randint(1, self._chance.choice(_OPERATIONS))
            for each in self._devices:
                each.before = self._count
        elif what == "flush":
            self._fail(device, OperationKind.FLUSH, after=0)
        elif what == "repairing":
            self._fail(device, OperationKind.WRITE, after=self._chance.randrange(3))
        elif what == "superblock":
            first = self._chance.choice(SUPERBLOCK_OFFSETS) // _BLOCK_BYTES
            self._fail(device, OperationKind.READ, times=None, first_block=first, last_block=first + 1)
        else:
            superblock = Superblock.unpack(device.peek(SUPERBLOCK_OFFSETS[0], _BLOCK_BYTES))
            if superblock is not None:
                first = self._chance.choice(superblock.layout.log_firsts)
                last = first + superblock.layout.log_blocks
                self._fail(device, OperationKind.READ, times=None, first_block=first, last_block=last)

    def _fail(self, device: SimulatedDevice, kind: OperationKind, **how: int | None) -> None:
        self._faults.append((device, device.fail(kind, **how)))

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            raise PowerCutError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for device in self._devices:
            device.before = None
        for device, fault in self._faults:
            device.faults.remove(fault)
