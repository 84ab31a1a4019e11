"""Memory for values: where it begins, what it holds, and that it comes back in huge pages and goes."""

import re
from pathlib import Path

import numpy as np
import pytest

from shadowserve.pool.buffers import MAPPED_BYTES_MIN, allocate

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB - 2048, 2 * MIB, 5 * MIB + 7])
def test_a_buffer_has_the_size_asked_for_and_can_be_written(size: int) -> None:
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
