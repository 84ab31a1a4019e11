"""The RESP codec: one table in both directions, every split, hostile bytes, and bulks received in place."""

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowserve import resp
from shadowserve.errors import ProtocolError
from shadowserve.resp import (
    NEED_DATA,
    BigNumber,
    CommandReader,
    ErrorReply,
    LargeBulk,
    Limits,
    Map,
    Push,
    ReplyReader,
    SetReply,
    SimpleString,
    Value,
    Verbatim,
    encode,
    encode_command,
    encode_error,
    split_inline,
)

CORPUS = Path(__file__).parent / "corpus" / "resp"

# (value, its bytes in RESP3, its bytes in RESP2 or None where they are the same)
VALUES: list[tuple[Value, bytes, bytes | None]] = [
    (SimpleString(b"OK"), b"+OK\r\n", None),
    (SimpleString(b""), b"+\r\n", None),
    (ErrorReply(b"ERR no"), b"-ERR no\r\n", None),
    (0, b":0\r\n", None),
    (-1, b":-1\r\n", None),
    ((1 << 63) - 1, b":9223372036854775807\r\n", None),
    (-(1 << 63), b":-9223372036854775808\r\n", None),
    (b"", b"$0\r\n\r\n", None),
    (b"hello", b"$5\r\nhello\r\n", None),
    (b"\r\n\0\xff", b"$4\r\n\r\n\0\xff\r\n", None),
    (b"x" * 40_000, b"$40000\r\n" + b"x" * 40_000 + b"\r\n", None),
    ([], b"*0\r\n", None),
    ([1, b"a", [SimpleString(b"x"), []]], b"*3\r\n:1\r\n$1\r\na\r\n*2\r\n+x\r\n*0\r\n", None),
    (None, b"_\r\n", b"$-1\r\n"),
    ([None, None], b"*2\r\n_\r\n_\r\n", b"*2\r\n$-1\r\n$-1\r\n"),
    (True, b"#t\r\n", b":1\r\n"),
    (False, b"#f\r\n", b":0\r\n"),
    (1.5, b",1.5\r\n", b"$3\r\n1.5\r\n"),
    (1e300, b",1.0000000000000001e+300\r\n", b"$23\r\n1.0000000000000001e+300\r\n"),
    (math.inf, b",inf\r\n", b"$3\r\ninf\r\n"),
    (-math.inf, b",-inf\r\n", b"$4\r\n-inf\r\n"),
    (BigNumber(1 << 80), b"(1208925819614629174706176\r\n", b"$25\r\n1208925819614629174706176\r\n"),
    (Verbatim(b"text", "mkd"), b"=8\r\nmkd:text\r\n", b"$4\r\ntext\r\n"),
    (Map([b"a", 1, [1], None]), b"%2\r\n$1\r\na\r\n:1\r\n*1\r\n:1\r\n_\r\n",
     b"*4\r\n$1\r\na\r\n:1\r\n*1\r\n:1\r\n$-1\r\n"),
    (Map([]), b"%0\r\n", b"*0\r\n"),
    (SetReply([1, 2]), b"~2\r\n:1\r\n:2\r\n", b"*2\r\n:1\r\n:2\r\n"),
    (Push([b"invalidate", [b"k"]]), b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n",
     b"*2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"),
]  # fmt: skip

# (bytes, value): bytes that peers may send and this encoder does not
READ_ONLY: list[tuple[bytes, Value]] = [
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b":+7\r\n", 7),
    (b"!6\r\nERR \r\n\r\n", ErrorReply(b"ERR \r\n")),
    (b"|1\r\n+ttl\r\n:3600\r\n+OK\r\n", SimpleString(b"OK")),
    (b"*2\r\n|1\r\n+a\r\n*1\r\n:1\r\n:1\r\n:2\r\n", [1, 2]),
    (b",-nan\r\n", math.nan),
    (b",10\r\n", 10.0),
]

COMMANDS: list[tuple[list[bytes], bytes]] = [
    ([b"PING"], b"*1\r\n$4\r\nPING\r\n"),
    ([b"GET", b""], b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n"),
    ([b"SET", b"k\r\n", b"\0" * 300], b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$300\r\n" + b"\0" * 300 + b"\r\n"),
    ([b"SET", b"k", b"\r\n" * 100], b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$200\r\n" + b"\r\n" * 100 + b"\r\n"),
    ([b"SET", b"k", b"v" * 70_000], b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$70000\r\n" + b"v" * 70_000 + b"\r\n"),
    ([b"DEL"] + [b"key"] * 200, b"*201\r\n$3\r\nDEL\r\n" + b"$3\r\nkey\r\n" * 200),
]

INLINE: list[tuple[bytes, list[bytes]]] = [
    (b"PING\r\n", [b"PING"]),
    (b"  echo\tk   v \n", [b"echo", b"k", b"v"]),
    (rb'echo k "a b\x41\n\"\q"' + b"\r\n", [b"echo", b"k", b'a bA\n"q']),
    (rb"auth 'it\'s' 'a\n'" + b"\r\n", [b"auth", b"it's", rb"a\n"]),
    (b'echo ""\r\n', [b"echo", b""]),
]


def same(left: object, right: object) -> bool:
    """Equality of values and of their RESP types; NaN equals itself."""
    if isinstance(left, memoryview):
        left = bytes(left)
    if type(left) is not type(right):
        return False
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Verbatim) and isinstance(right, Verbatim) and left.format != right.format:
        return False
    return left == right or (left != left and right != right)


def read_all(reader: ReplyReader | CommandReader, data: bytes, step: int) -> list[object]:
    """Feed ``data`` in pieces of ``step`` bytes, through get_buffer() if possible. Return the values."""
    found: list[object] = []
    position = 0
    while position < len(data):
        view = reader.get_buffer()
        if view is not None:
            piece = data[position : position + min(step, len(view))]
            view[: len(piece)] = piece
            reader.advance(len(piece))
        else:
            piece = data[position : position + step]
            reader.feed(piece)
        position += len(piece)
        while True:
            event = reader.next_value() if isinstance(reader, ReplyReader) else reader.next_command()
            if event is NEED_DATA:
                break
            if not isinstance(event, LargeBulk):
                found.append(event)
    return found


@pytest.mark.parametrize(("value", "resp3", "resp2"), VALUES, ids=lambda item: repr(item)[:40])
def test_values_encode_as_the_table_says(value: Value, resp3: bytes, resp2: bytes | None) -> None:
    assert encode(value, 3) == resp3
    assert encode(value, 2) == (resp3 if resp2 is None else resp2)


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("data", "value"), [(resp3, value) for value, resp3, _ in VALUES] + READ_ONLY, ids=lambda item: repr(item)[:40]
)
def test_replies_read_back_whole_and_in_pieces(data: bytes, value: Value, step: int) -> None:
    found = read_all(ReplyReader(), data, step)
    assert len(found) == 1 and same(found[0], value)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_replies_that_follow_each_other_stay_apart(step: int) -> None:
    table = [(resp3, value) for value, resp3, _ in VALUES] + READ_ONLY
    reader = ReplyReader()
    found = read_all(reader, b"".join(data for data, _ in table) + b"+half", step)
    assert len(found) == len(table) and all(same(got, value) for got, (_, value) in zip(found, table, strict=True))
    assert reader.in_progress


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_commands_read_whole_and_in_pieces(step: int) -> None:
    stream = b"".join(data for _, data in COMMANDS) + b"\r\n*0\r\n*-1\r\n" + b"".join(data for data, _ in INLINE)
    found = read_all(CommandReader(), stream + b"*1\r\n$4\r\nPI", step)
    expected = [words for words, _ in COMMANDS] + [words for _, words in INLINE]
    assert len(found) == len(expected)
    for got, words in zip(found, expected, strict=True):
        assert isinstance(got, list) and [bytes(argument) for argument in got] == words


@pytest.mark.parametrize(("words", "data"), COMMANDS, ids=lambda item: repr(item)[:30])
def test_commands_encode_as_they_are_read(words: list[bytes], data: bytes) -> None:
    assert encode_command(*words) == data


def test_encode_command_takes_text_and_numbers_and_any_buffer() -> None:
    begin, end = b"*5\r\n$3\r\nSET\r\n$3\r\nk\xc3\xa4\r\n$16\r\n", b"\r\n$2\r\nEX\r\n$2\r\n60\r\n"
    value = memoryview(bytes(range(16))).cast("I")
    assert encode_command("SET", "kä", value, "EX", 60) == begin + bytes(range(16)) + end


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"*x\r\n", "invalid multibulk length"),
        (b"*1_0\r\n", "invalid multibulk length"),
        (b"*01\r\n", "invalid multibulk length"),
        (b"*+1\r\n", "invalid multibulk length"),
        (b"*1000000000\r\n", "invalid multibulk length"),
        (b"*" + b"1" * 70_000, "too big mbulk count string"),
        (b"*1\r\n:5\r\n", "expected '$', got ':'"),
        (b"*1\r\nGET\r\n", "expected '$', got 'G'"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$x\r\n", "invalid bulk length"),
        (b"*1\r\n$99999999999999999999999\r\n", "invalid bulk length"),
        (b"*1\r\n$536870913\r\n", "invalid bulk length"),
        (b"*1\r\n$" + b"1" * 70_000, "too big bulk count string"),
        (b"*1\r\n$4\r\nPINGxx", "expected CRLF after a bulk"),
        (b"a" * 70_000, "too big inline request"),
        (b'echo "a\r\n', "unbalanced quotes in request"),
        (b'echo "a"b\r\n', "unbalanced quotes in request"),
    ],
    ids=lambda item: repr(item)[:40],
)
@pytest.mark.parametrize("step", [997, 1 << 20])
def test_malformed_commands_fail_with_redis_texts_and_stay_failed(data: bytes, message: str, step: int) -> None:
    reader = CommandReader()
    with pytest.raises(ProtocolError, match=r"^Protocol error: ") as error:
        read_all(reader, data, step)
    assert str(error.value) == f"Protocol error: {message}"
    reader.feed(b"*1\r\n$4\r\nPING\r\n")
    with pytest.raises(ProtocolError):
        reader.next_command()


@pytest.mark.parametrize(
    "data",
    [
        b"?\r\n", b"\r\n", b":\r\n", b":1.0\r\n", b":9223372036854775808\r\n", b"#x\r\n", b"_x\r\n", b",1_0\r\n",
        b",0x1\r\n", b"(1e5\r\n", b"(" + b"9" * 5000 + b"\r\n", b"$-2\r\n", b"$?\r\n", b"*?\r\n", b"$1\r\nab\r\n",
        b"=3\r\nabc\r\n", b"+a\nb\r\n", b"*2147483648\r\n", b"*1\r\n" * 17, b"%600000\r\n", b"+" + b"a" * 70_000,
        b"%-1\r\n", b"~-1\r\n",
    ],
    ids=lambda data: repr(data)[:24],
)  # fmt: skip
def test_malformed_replies_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^Protocol error: "):
        read_all(ReplyReader(), data, 1 << 20)


def test_a_command_whose_bulks_together_are_too_large_is_refused() -> None:
    reader = CommandReader(Limits(total_bytes_max=100))
    with pytest.raises(ProtocolError, match="invalid bulk length"):
        read_all(reader, encode_command("SET", b"a" * 50, b"b" * 60), 1 << 20)
    reader = CommandReader(Limits(total_bytes_max=100))
    assert len(read_all(reader, encode_command("SET", b"a" * 50) * 10, 1 << 20)) == 10


@pytest.mark.parametrize(
    "data",
    [
        encode_command("SET", "a", b"x" * 500) * 20,
        encode_command("SET", "a", b"x" * 30_000),
        b"ECHO " + b"x" * 500 + b"\r\n",
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$100000\r\n" + b"x" * 50_000,
    ],
    ids=["pipeline", "one", "inline", "large"],
)
def test_a_reader_keeps_nothing_of_what_has_been_read(data: bytes) -> None:
    """Symptom: an idle client that had once sent a lot held 64 KiB of the server's memory."""
    reader = CommandReader()
    kept = sys.getrefcount(data)
    reader.feed(data)
    while (event := reader.next_command()) is not NEED_DATA:
        if isinstance(event, LargeBulk):
            reader.provide(memoryview(bytearray(event.size)))
    del event
    assert sys.getrefcount(data) == kept


def test_limits_before_authentication_say_so() -> None:
    limits = Limits(items_max=2, bulk_bytes_max=10, unauthenticated=True)
    with pytest.raises(ProtocolError, match="unauthenticated multibulk length"):
        read_all(CommandReader(limits), encode_command("A", "B", "C"), 1 << 20)
    with pytest.raises(ProtocolError, match="unauthenticated bulk length"):
        read_all(CommandReader(limits), encode_command("A", b"B" * 11), 1 << 20)


def test_a_large_bulk_is_received_into_the_callers_buffer() -> None:
    reader = ReplyReader()
    reader.feed(b"$100000\r\nabc")
    assert reader.next_value() == LargeBulk(100_000)
    buffer = bytearray(100_000)
    reader.provide(memoryview(buffer))
    assert buffer[:3] == b"abc"
    view = reader.get_buffer()
    assert view is not None and len(view) == 99_997
    view[:] = b"d" * 99_997
    reader.advance(99_997)
    assert reader.get_buffer() is None and reader.next_value() is NEED_DATA
    reader.feed(b"\r\n:1\r\n")
    value = reader.next_value()
    assert isinstance(value, memoryview) and value.obj is buffer
    assert reader.next_value() == 1


def test_misuse_of_the_buffer_interface_is_an_error() -> None:
    reader = ReplyReader()
    with pytest.raises(RuntimeError, match="must follow a LargeBulk"):
        reader.provide(memoryview(bytearray(1)))
    reader.feed(b"$100000\r\n")
    assert reader.next_value() == LargeBulk(100_000)
    with pytest.raises(ValueError, match="writable buffer of 100000 bytes"):
        reader.provide(memoryview(bytearray(1)))
    with pytest.raises(ValueError, match="writable"):
        reader.provide(memoryview(bytes(100_000)))
    assert reader.get_buffer() is not None
    with pytest.raises(ValueError, match="beyond the buffer"):
        reader.advance(100_001)


def test_a_large_bulk_without_its_crlf_is_refused() -> None:
    with pytest.raises(ProtocolError, match="expected CRLF"):
        read_all(ReplyReader(), b"$100000\r\n" + b"a" * 100_000 + b"xx", 4096)


def test_lines_cannot_be_forged_by_errors_or_status_texts() -> None:
    assert encode_error("ERR a\r\nb") == b"-ERR a  b\r\n"
    with pytest.raises(ValueError, match="cannot hold CR or LF"):
        encode(SimpleString(b"a\r\n+b"))
    with pytest.raises(ValueError, match="as many values as keys"):
        encode(Map([1]))


def test_an_error_tells_its_code() -> None:
    assert ErrorReply(b"NOAUTH Authentication required.").code == "NOAUTH"


def test_exported_names_exist() -> None:
    assert sorted(resp.__all__) == sorted(set(resp.__all__))
    assert all(hasattr(resp, name) for name in resp.__all__)


# ---- Properties

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.integers(1 << 63, 1 << 100).map(BigNumber)
    | st.floats(allow_nan=True)
    | st.binary(max_size=80)
    | st.binary(max_size=20).map(Verbatim)
    | st.binary(max_size=20).map(lambda text: SimpleString(text.replace(b"\r", b"").replace(b"\n", b"")))
    | st.binary(max_size=20).map(lambda text: ErrorReply(text.replace(b"\r", b"").replace(b"\n", b"")))
)
TREES = st.recursive(
    SCALARS,
    lambda items: (
        st.lists(items, max_size=4)
        | st.lists(items, max_size=4).map(SetReply)
        | st.lists(items, max_size=4).map(Push)
        | st.lists(st.tuples(items, items), max_size=3).map(
            lambda pairs: Map([part for pair in pairs for part in pair])
        )
    ),
    max_leaves=12,
)


@given(values=st.lists(TREES, min_size=1, max_size=4), step=st.integers(1, 50))
def test_any_values_survive_a_round_trip_in_any_split(values: list[Value], step: int) -> None:
    data = b"".join(encode(value, 3) for value in values)
    found = read_all(ReplyReader(Limits(large_bulk_bytes=16)), data, step)
    assert len(found) == len(values) and all(map(same, found, values))


@given(commands=st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=5), max_size=5), step=st.integers(1, 99))
def test_any_commands_survive_a_round_trip_in_any_split(commands: list[list[bytes]], step: int) -> None:
    data = b"".join(encode_command(*words) for words in commands)
    found = read_all(CommandReader(Limits(large_bulk_bytes=16)), data, step)
    assert [[bytes(word) for word in words] for words in found] == commands


def outcome(reader: ReplyReader | CommandReader, data: bytes, step: int) -> tuple[list[str], str | None]:
    """Return all values of ``data``, and the error that ends it."""
    found: list[str] = []
    position = 0
    try:
        while position < len(data):
            got = read_all(reader, data[position : position + step], step)
            found += map(normal, got)
            position += step
    except ProtocolError as error:
        return found, str(error)
    return found, None


def normal(value: object) -> str:
    """Return a text of a value or a command that is independent of in-place reception."""
    if isinstance(value, memoryview):
        value = bytes(value)
    if isinstance(value, list):
        return f"{type(value).__name__}[{','.join(map(normal, value))}]"
    return f"{type(value).__name__}:{value!r}"


def check_hostile(data: bytes) -> None:
    """For any bytes: no other exception than ProtocolError, and the same outcome in every split."""
    for make in (ReplyReader, CommandReader):
        limits = Limits(large_bulk_bytes=32, bulk_bytes_max=4096, items_max=64, line_bytes_max=256)
        whole, error = outcome(make(limits), data, max(len(data), 1))
        for step in (1, 5):
            pieces, piece_error = outcome(make(limits), data, step)
            # An error may be raised before earlier values are returned; other splits may return more of them.
            assert pieces[: len(whole)] == whole
            assert piece_error == error


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*")), ids=lambda path: path.name)
def test_the_corpus_is_read_or_refused_alike_in_every_split(path: Path) -> None:
    check_hostile(path.read_bytes())


FRAGMENTS = [
    *(b"*", b"$", b"%", b"~", b">", b"|", b"=", b"!", b"+", b"-", b":", b",", b"(", b"#", b"_", b"\r\n", b"\r", b"\n"),
    *(b"0", b"1", b"2", b"3", b"9", b"-1", b"abc", b"PING", b'"', b"'", b"\\x41", b" ", b"\0", b"t", b"txt:"),
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=60).map(b"".join))
def test_hostile_bytes_are_read_or_refused_alike_in_every_split(data: bytes) -> None:
    check_hostile(data)


@given(st.binary(max_size=100))
def test_split_inline_never_fails(line: bytes) -> None:
    words = split_inline(line)
    assert words is None or all(isinstance(word, bytes) for word in words)
