"""Making the pool's memory known to its devices, while the pool serves already.

A device reads into memory that the kernel knows for less: nothing is looked up and pinned for each read. But to be
known, all pages have to be there, which takes from a tenth of a second for each GiB to ten times as long where memory
is scarce or virtual. A restarted server should not wait for that: until a part is registered, reads into it cost a
little more CPU time.
"""

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Final

from shadowserve.errors import DeviceError
from shadowserve.pool.arena import BLOCK_BYTES, Arena
from shadowserve.pool.volume.device import BlockDevice

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; elsewhere the registering itself brings the pages
_STEP_BYTES: Final = 32 << 20
"""Of pages made at a time: how long stopping may take."""
_REGION_BYTES_MIN: Final = 128 << 20
_REGIONS_MAX: Final = 192
"""A device takes 256 regions; registering one keeps it from taking requests for that long, so they are small."""


class Registration:
    """Registers every arena with every device, in a thread of its own."""

    def __init__(self, arenas: Sequence[Arena], devices: Sequence[BlockDevice]) -> None:
        self._arenas = arenas
        self._devices = list(devices)
        total = sum(arena.size for arena in arenas)
        region = max(_REGION_BYTES_MIN, -(-total // _REGIONS_MAX))
        self._region_bytes = -(-region // BLOCK_BYTES) * BLOCK_BYTES
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it where it is, before devices are closed or memory is given back."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        registered = 0
        for arena in self._arenas:
            for begin in range(0, arena.size, self._region_bytes):
                end = min(begin + self._region_bytes, arena.size)
                self._populate(arena, begin, end)
                for device in list(self._devices):
                    if self._stopped.is_set():
                        return
                    registered += self._register(device, arena.memory[begin:end])
        _log.info("memory_registered bytes=%d devices=%d", registered, len(self._devices))

    def _populate(self, arena: Arena, begin: int, end: int) -> None:
        """Have the kernel make the pages, so that registering holds a device up for less."""
        library = ctypes.CDLL(None)
        while begin < end and not self._stopped.is_set():
            size = min(_STEP_BYTES, end - begin)
            address = ctypes.c_void_p(arena.address + begin)
            if library.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                return
            begin += size

    def _register(self, device: BlockDevice, memory: memoryview) -> int:
        """Return how many bytes were registered."""
        try:
            if device.register(memory):
                return len(memory)
            reason = "the limit of locked memory, or how the device is accessed"
        except (DeviceError, OSError) as error:
            reason = str(error)
        # The rest would meet the same.
        self._devices.remove(device)
        _log.info("memory_not_registered device=%s reason=%r", device.name, reason)
        return 0
