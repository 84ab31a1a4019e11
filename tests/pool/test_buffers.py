"""Buffers for values: address, content, huge pages, and reuse."""

import gc
import mmap
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from shadowserve.pool.buffers import KEPT_BYTES_MAX, MAPPED_BYTES_MIN, allocate

MIB = 1 << 20


def faults_in_writing(size: int) -> int:
    """Return the number of page faults for a value that is written and released."""
    view = allocate(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.frombuffer(view, np.uint8)[:] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("size", [0, 1, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB - 2048, 2 * MIB, 5 * MIB + 7])
def test_a_buffer_has_the_requested_size_and_is_writable(size: int) -> None:
    view = allocate(size)
    assert view.nbytes == len(view) == size and not view.readonly
    np.frombuffer(view, np.uint8)[:] = 0xA5
    assert size == 0 or view[0] == view[-1] == 0xA5


@pytest.mark.parametrize("size", [MAPPED_BYTES_MIN, 2 * MIB, 3 * MIB, 32 * MIB])
def test_large_values_begin_half_a_page_in(size: int) -> None:
    address = np.frombuffer(allocate(size), np.uint8).ctypes.data
    assert address % 4096 == 2048, "sending from the start of a page takes twice the CPU time"


def test_a_value_of_one_huge_page_gets_it() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives no huge pages")
    views = [allocate(2 * MIB) for _ in range(16)]
    for view in views:
        np.frombuffer(view, np.uint8)[:] = 1
    smaps = Path("/proc/self/smaps").read_text()
    huge = sum(int(size) for size in re.findall(r"AnonHugePages: +(\d+) kB", smaps))
    assert huge * 1024 >= 8 * 2 * MIB  # memory may be too fragmented for some


def test_a_new_value_reuses_the_pages_of_a_freed_one() -> None:
    size = 11 * MIB + 5000
    for first in (size, 14 * MIB):  # a slightly larger size, and one to shrink
        faults_in_writing(first)
        for other in (size, size - 3000, size + 3000):
            assert faults_in_writing(other) <= 4, "the kernel provided new pages"


def test_pages_are_not_reused_while_a_view_exists() -> None:
    view = allocate(3 * MIB)
    part = view[MIB : MIB + 10]
    part[:] = b"some bytes"
    del view
    others = [allocate(3 * MIB) for _ in range(3)]
    for each in others:
        np.frombuffer(each, np.uint8)[:] = 0xA5
    assert bytes(part) == b"some bytes"


def test_unused_mappings_are_limited() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    gc.collect()
    before = mapped()
    views = [allocate(8 * MIB) for _ in range(4 * KEPT_BYTES_MAX // (8 * MIB))]
    del views
    assert mapped() - before <= KEPT_BYTES_MAX
    del before
    large = allocate(2 * KEPT_BYTES_MAX)
    before = mapped()
    del large
    assert before - mapped() >= 2 * KEPT_BYTES_MAX, "a buffer above the limit is released at once"
