"""Memory that a device can write from and read into: whole pages, at an address that does not change."""

import ctypes
import mmap

import numpy as np
import numpy.typing as npt


class Pages:
    """Zeroed pages of this process; they live as long as this, or a view of them, does.

    Attributes:
        size: in bytes.
        address: where they begin.
        view: of all bytes.
        array: the same bytes as numbers.
    """

    def __init__(self, size: int) -> None:
        """Take at least ``size`` bytes.

        Raises:
            MemoryError: there are not as many.
        """
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot map {self.size} bytes: {error}") from error
        self.view = memoryview(mapping)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
