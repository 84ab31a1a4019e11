"""Sets of pieces: they survive the wire format, and invalid ones are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowserve.pieces import leading, leading_chunks, leading_layers, pack, unpack


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


@given(st.integers(1, 6), st.integers(1, 20), st.data())
def test_leading_chunks_and_leading_layers_follow_from_one_set(layers: int, chunks: int, data: st.DataObject) -> None:
    def drawn() -> np.ndarray:
        members = data.draw(st.lists(st.booleans(), min_size=layers * chunks, max_size=layers * chunks))
        return np.array(members, np.bool_).reshape(layers, chunks)

    wanted = drawn()
    there = wanted & drawn()
    received = unpack(pack(there), layers, chunks)
    assert (received == there).all()

    def lacks(layer: int, chunk: int) -> bool:
        return bool(wanted[layer, chunk] and not there[layer, chunk])

    whole_chunks = [not any(lacks(layer, chunk) for layer in range(layers)) for chunk in range(chunks)]
    whole_layers = [not any(lacks(layer, chunk) for chunk in range(chunks)) for layer in range(layers)]
    assert leading_chunks(received, wanted) == [*whole_chunks, False].index(False)
    assert leading_layers(received, wanted) == [*whole_layers, False].index(False)


def test_the_members_of_a_set_of_pieces_are_layer_by_layer() -> None:
    pieces = np.zeros((3, 4), np.bool_)
    pieces[1, 2] = True
    assert pack(pieces) == bytes([1 << 6, 0])
    assert np.argwhere(unpack(pack(pieces), 3, 4)).tolist() == [[1, 2]]
