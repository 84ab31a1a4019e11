"""Sets of pieces: what the wire says is what was meant, and nonsense is told from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowserve.pieces import leading, pack, unpack


@given(st.lists(st.booleans(), max_size=100))
def test_a_set_is_the_same_behind_the_wire(flags: list[bool]) -> None:
    received = unpack(pack(np.array(flags, np.bool_)), len(flags))
    assert received.tolist() == flags
    assert leading(received) == next((index for index, there in enumerate(flags) if not there), len(flags))


def test_the_order_of_bits_is_frozen() -> None:
    assert pack(np.array([True, False, True, True, False, False, False, False, True])) == b"\x0d\x01"


def test_what_a_message_leaves_out_is_empty() -> None:
    assert unpack(b"", 3).tolist() == [False] * 3


@pytest.mark.parametrize(("data", "count"), [(b"\0", 0), (b"\0\0", 8), (b"\0", 9), (b"\x02", 1), (b"\x80", 7)])
def test_a_set_of_a_list_of_another_length_is_refused(data: bytes, count: int) -> None:
    with pytest.raises(ValueError, match=f"a set of {count} has"):
        unpack(data, count)
