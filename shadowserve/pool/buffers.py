"""Memory for values: where the bytes of a value stay from the socket that brought them to the sockets that fetch them.

Some facts. A ``bytearray(n)`` writes n zeros before the first byte is received, and one of many MiB comes from a fresh
mapping each time, so that every page is faulted in twice as often as needed. Freed, it may stay with the allocator.
An anonymous private mapping is zero without being touched, goes back to the kernel when its last user lets go, and
takes huge pages, which alone are worth a fifth of loopback throughput. It costs two system calls and a page's rounding.

Where in a page a value begins matters as well. To send, the kernel copies it behind the reply's header into fresh
pages of its own: with the value at the start of a page, every load is from an address whose low 12 bits are just below
those of the stores before it. The CPU takes such loads for loads of those stores and waits (known as 4K aliasing).
Measured on Zen 4, sending 2 MiB with a header of 10 bytes: 0.33 CPU s/GB from the start of a page, 0.16 from 20, 522,
2,058 or 3,500 bytes further on, and 0.32 again where header and offset differ by ten.

Decision: values of ``MAPPED_BYTES_MIN`` or more get a mapping of their own, smaller ones a bytearray. In a mapping the
value begins half a page in: no header is that long, and ranges at multiples of a page keep that distance.
"""

import mmap
from typing import Final

__all__ = ["MAPPED_BYTES_MIN", "allocate"]

MAPPED_BYTES_MIN: Final = 1 << 20
"""Below 1 MiB the system calls and the rounding to pages outweigh what a mapping saves."""

_LEAD_BYTES: Final = 2048
_HUGE_PAGE_BYTES: Final = 2 << 20
_ADVICE_HUGE_PAGE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)


def allocate(size: int) -> memoryview:
    """Return a writable buffer of ``size`` bytes; it lives as long as any view of it.

    Raises:
        MemoryError: there is not that much memory.
    """
    if size < MAPPED_BYTES_MIN:
        return memoryview(bytearray(size))
    pages_bytes = _rounded_up(_LEAD_BYTES + size, mmap.PAGESIZE)
    huge = _ADVICE_HUGE_PAGE is not None and size >= _HUGE_PAGE_BYTES
    try:
        # Linux puts a mapping at a boundary of huge pages only if it is a multiple of them long. So take and give back.
        mapping = mmap.mmap(
            -1,
            _rounded_up(pages_bytes, _HUGE_PAGE_BYTES) if huge else pages_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        if huge:
            mapping.resize(pages_bytes)
    except OSError as error:
        raise MemoryError(f"cannot map {size} bytes: {error}") from error
    if huge:
        assert _ADVICE_HUGE_PAGE is not None
        try:
            mapping.madvise(_ADVICE_HUGE_PAGE)
        except OSError:  # a kernel built without them: ordinary pages do
            pass
    return memoryview(mapping)[_LEAD_BYTES : _LEAD_BYTES + size]


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
