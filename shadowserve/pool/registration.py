"""Registers the pool's memory with its devices while the pool already serves.

Reads into registered memory cost less, since the kernel need not pin pages for each. Registering needs all pages to
exist, which takes a tenth of a second for each GiB, or ten times as long where memory is scarce or virtual.
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

_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; on older kernels, registering makes the pages
_STEP_BYTES: Final = 32 << 20
"""Bytes of pages that are made at a time: it bounds the time to stop."""
_REGION_BYTES_MIN: Final = 128 << 20
_REGIONS_MAX: Final = 192
"""A device accepts 256 regions. It serves no requests while one is registered, so regions are small."""


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
        """Make the pages, so that registering blocks a device for a shorter time."""
        library = ctypes.CDLL(None)
        while begin < end and not self._stopped.is_set():
            size = min(_STEP_BYTES, end - begin)
            address = ctypes.c_void_p(arena.address + begin)
            if library.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                return
            begin += size

    def _register(self, device: BlockDevice, memory: memoryview) -> int:
        try:
            if device.register(memory):
                return len(memory)
            reason = "the limit of locked memory, or how the device is accessed"
        except (DeviceError, OSError) as error:
            reason = str(error)
        # Other regions would fail in the same way.
        self._devices.remove(device)
        _log.info("memory_not_registered device=%s reason=%r", device.name, reason)
        return 0
