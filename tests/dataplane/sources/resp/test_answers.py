"""The fast path for KV.META gives the results of the general parser, for any split of the bytes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpu_dataplane.sources.found import Cold, Found, Stored
from dpu_dataplane.sources.resp.answers import HEADER_GUESS, AnswerReader, MetaAnswer, find_by_ranges
from shadowserve import resp
from shadowserve.errors import ProtocolError

HEADS = st.binary(max_size=60) | st.sampled_from([b"", b"\r\n", b"*2\r\n:1\r\n$0\r\n\r\n", b"$-1\r\n"])
TIMES = st.integers(1, 10**17)
ENTRIES = st.lists(
    st.none() | st.tuples(st.integers(0, 10**17), HEADS) | st.tuples(st.integers(1, 10**17), TIMES), max_size=6
)
OTHERS = st.sampled_from(
    [b"+OK\r\n", b"-ERR no\r\n", b":7\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*0\r\n", b"*1\r\n:1\r\n"]
)


def encode(entries: list[tuple[int, bytes | int] | None]) -> bytes:
    parts = [b"*%d\r\n" % len(entries)]
    for entry in entries:
        if entry is None:
            parts.append(b"$-1\r\n")
        elif isinstance(entry[1], int):
            parts.append(b"*2\r\n:%d\r\n:%d\r\n" % (entry[0], entry[1]))
        else:
            parts.append(b"*2\r\n:%d\r\n$%d\r\n%b\r\n" % (entry[0], len(entry[1]), entry[1]))
    return b"".join(parts)


def read_all(reader: AnswerReader | resp.ReplyReader, wire: bytes, cuts: list[int]) -> list[object]:
    values: list[object] = []
    places = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    for begin, end in zip(places, places[1:], strict=False):
        reader.feed(wire[begin:end])
        while (value := reader.next_value()) is not resp.NEED_DATA:
            values.append(value)
    return values


def plain(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [list(entry[:2]) if isinstance(entry, Stored | Cold) else entry for entry in value]


@given(st.lists(ENTRIES | OTHERS, max_size=5), st.lists(st.integers(0, 1000), max_size=8))
def test_any_split_gives_the_values_of_the_general_reader(answers: list[object], cuts: list[int]) -> None:
    wire = b"".join(answer if isinstance(answer, bytes) else encode(answer) for answer in answers)
    expected = read_all(resp.ReplyReader(), wire, [])
    assert [plain(value) for value in read_all(AnswerReader(), wire, cuts)] == expected
    assert [plain(value) for value in read_all(AnswerReader(), wire, list(range(len(wire))))] == expected


def test_answers_of_meta_take_the_short_cut() -> None:
    entries = [(5, b"head"), None, (0, b""), (7, 250)]
    for cuts in ([], [20], [25, 40]):
        [answer] = read_all(AnswerReader(), encode(entries), cuts)
        assert isinstance(answer, MetaAnswer)
        assert answer == [Stored(5, b"head"), None, Stored(0, b""), Cold(7, 250)]


@pytest.mark.parametrize(
    "wire",
    [
        b"*1\r\n*2\r\n:5\r\n$3\r\nabcdef\r\n",
        b"*1\r\n*2\r\n:5\r\n$9999999\r\n",
        b"*2\r\n$-1\r\n" + b"+what is this, if not far longer than anything of it may be\r\n",
        b"*9999\r\n$-1\r\n",
        b"*1\r\n*2\r\n:-5\r\n$3\r\nabc\r\n" + b"x" * 40,
        b"*2\r\n*2\r\n:5\r\n$-1\r\n" + b"x" * 40,
        b"nonsense\r\n",
    ],
)
def test_protocol_errors_are_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_all(AnswerReader(), wire, [])


async def test_a_server_without_kv_meta_that_lies_about_lengths_gets_two_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each longer header is read with its own length, once."""
    claimed = {b"x" * 200: 3000, b"y" * 200: 9000, b"z" * 50: 50}
    monkeypatch.setattr("dpu_dataplane.sources.found.header_length", lambda header: claimed[header])
    headers = dict(zip([b"a", b"b", b"c"], claimed, strict=True))
    requests: list[list[bytes]] = []

    async def ask(commands: Sequence[Sequence[bytes]], names: Sequence[bytes]) -> list[Any]:
        requests.append([command[-1] for command in commands if command[0] == b"GETRANGE"])
        return [10_000 if command[0] == b"STRLEN" else headers[command[1]] for command in commands]

    found: list[Found] = [None] * 3
    await find_by_ranges(list(headers), range(3), found, ask, lambda _: "a node")
    assert requests == [[b"%d" % (HEADER_GUESS - 1)] * 3, [b"2999", b"8999"]]
