"""Memory for values: a value stays there from the socket that receives it to the sockets that send it.

``bytearray(n)`` writes n zeros first, and one of many MiB is a fresh mapping each time, so each page is faulted in
twice as often as needed. An anonymous private mapping is zero without being touched, returns to the kernel when its
last user ends, and takes huge pages, which alone are worth a fifth of loopback throughput. It costs two system calls
and the rounding to pages. So values of ``MAPPED_BYTES_MIN`` or more get a mapping of their own.

In a mapping the value begins half a page in. To send, the kernel copies it behind the reply's header into fresh pages.
From the start of a page, every load has low 12 address bits just below those of earlier stores, and the CPU waits as if
they were the same address (4K aliasing): 0.33 CPU s/GB instead of 0.16, on Zen 4, for 2 MiB behind a header of 10
bytes. Ranges at multiples of a page keep the distance.

A full store frees one value for each new one, and the kernel zeroes each page that it hands out. So a few unused
mappings are kept for the next values. Their sizes are rounded, so that one fits slightly different values.
"""

import mmap
from typing import Any, Final

import numpy as np

MAPPED_BYTES_MIN: Final = 1 << 20
"""Below 1 MiB, the system calls and the rounding cost more than a mapping saves."""

KEPT_BYTES_MAX: Final = 16 << 20
"""Most bytes of unused mappings in a process: one or two are enough."""

_LEAD_BYTES: Final = 2048
_HUGE_PAGE_BYTES: Final = 2 << 20
_ADVICE_HUGE_PAGE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
_ROUNDED_SHARE: Final = 128
"""A mapping is larger than its value by at most this part of it, or a page."""

_kept: list[mmap.mmap] = []
"""Unused mappings, oldest first. The last view of a mapping may end in any thread with any lock held. So there is no
lock, and each change is one call, which CPython does atomically."""


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A mapping with at least one view."""

    mapping: mmap.mmap | None = None

    def __del__(self) -> None:
        if self.mapping is not None:
            _keep(self.mapping)


def allocate(size: int) -> memoryview:
    """Return a writable buffer of ``size`` bytes with any content; it lives as long as any view of it."""
    if size < MAPPED_BYTES_MIN:
        return memoryview(bytearray(size))
    unit = max(size // _ROUNDED_SHARE // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    pages_bytes = _rounded_up(_LEAD_BYTES + size, unit)
    mapping = _reused(pages_bytes) or _mapped(pages_bytes)
    lent = np.ndarray.__new__(_Lent, (pages_bytes,), np.uint8, mapping)
    lent.mapping = mapping
    return memoryview(lent)[_LEAD_BYTES : _LEAD_BYTES + size]


def _mapped(pages_bytes: int) -> mmap.mmap:
    huge = _ADVICE_HUGE_PAGE is not None and pages_bytes >= _HUGE_PAGE_BYTES
    try:
        # Linux aligns a mapping to huge pages only if its size is a multiple of them. So map more, and unmap the rest.
        whole = _rounded_up(pages_bytes, _HUGE_PAGE_BYTES) if huge else pages_bytes
        try:
            mapping = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            if not _kept:
                raise
            _kept.clear()  # too little memory to keep unused mappings
            mapping = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            mapping.resize(pages_bytes)
    except OSError as error:
        raise MemoryError(f"cannot map {pages_bytes} bytes: {error}") from error
    if huge:
        assert _ADVICE_HUGE_PAGE is not None
        try:
            mapping.madvise(_ADVICE_HUGE_PAGE)
        except OSError:  # the kernel has no huge pages
            pass
    return mapping


def _reused(pages_bytes: int) -> mmap.mmap | None:
    """Return the smallest kept mapping that is large enough, cut to size; None if there is none."""
    for mapping in sorted((each for each in _kept.copy() if len(each) >= pages_bytes), key=len):
        try:
            _kept.remove(mapping)
            if len(mapping) > pages_bytes:
                mapping.resize(pages_bytes)
            return mapping
        except (ValueError, OSError, BufferError):  # another thread has taken it, or still releases it
            continue
    return None


def _keep(mapping: mmap.mmap) -> None:
    _kept.append(mapping)
    while sum(map(len, _kept.copy())) > KEPT_BYTES_MAX:
        try:
            del _kept[0]
        except IndexError:  # another thread has removed it
            return


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
