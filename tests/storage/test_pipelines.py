"""Pipelined commands get the same replies as single ones."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import wait_for
from slow_store import Served
from storage_support import TIMEOUT_S, Child, make_record

from shadowserve.pool.types import Address
from shadowserve.pool.volume.tickets import BusyError, Ticket
from shadowserve.resp import NEED_DATA, ErrorReply, LargeBulk, ReplyReader, encode_command

Commands = Sequence[Sequence[bytes]]

END = b"$15\r\nthat was it all\r\n"
LARGE = bytes(range(256)) * 200  # sent by reference
EDGE = 1 << 10  # reply headers up to this size are precomputed
OFF, SKIP, ON = ([b"CLIENT", b"REPLY", word] for word in (b"OFF", b"SKIP", b"ON"))


def words(text: str) -> list[list[bytes]]:
    """Return commands, separated by semicolons; ``*`` and a number before one repeats it."""
    found: list[list[bytes]] = []
    for command in text.split(";"):
        first, *rest = command.split()
        times = int(first[1:]) if first.startswith("*") else 1
        found += [[word.encode() for word in (rest if first.startswith("*") else [first, *rest])]] * times
    return found


@contextlib.contextmanager
def connected(port: int, *greetings: Sequence[bytes]) -> Iterator[socket.socket]:
    """Connect, empty the store, and send greetings, such as AUTH, whose reply is +OK."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
        for greeting in ([b"FLUSHALL"], *greetings):
            sock.sendall(encode_command(*greeting))
            assert one_reply(sock)[:1] in b"+%*"
        yield sock


def one_reply(sock: socket.socket) -> bytes:
    """Return the bytes of one reply, with no bytes after it."""
    reader, found = ReplyReader(), b""
    while (event := reader.next_value()) is NEED_DATA or isinstance(event, LargeBulk):
        data = sock.recv(1 << 16)
        if not data:
            raise EOFError(found)
        found += data
        reader.feed(data)
    return found


def to_the_end(sock: socket.socket) -> bytes:
    """Return the bytes up to the last reply, or to the connection's end."""
    found = bytearray()
    while not found.endswith(END):
        data = sock.recv(1 << 16)
        if not data:
            break
        found += data
    return bytes(found)


def ended(commands: Commands) -> list[Sequence[bytes]]:
    return [*commands, ON, [b"ECHO", END[5:-2]]]


def together(sock: socket.socket, commands: Commands, cuts: Sequence[float] = ()) -> bytes:
    """Send commands in one piece, or cut at fractions of their length. Return the replies."""
    data = b"".join(encode_command(*command) for command in ended(commands))
    bounds = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]

    def send() -> None:
        with contextlib.suppress(OSError):  # after QUIT
            for begin, end in zip(bounds, bounds[1:], strict=False):
                sock.sendall(data[begin:end])

    sender = threading.Thread(target=send)  # a server stops reading if its client does not read
    sender.start()
    try:
        return to_the_end(sock)
    finally:
        sender.join()


def apart(sock: socket.socket, commands: Commands) -> bytes:
    """Send each command after the previous reply. Return the replies."""
    found = b""
    silent = skipped = False
    for command in ended(commands):
        sock.sendall(encode_command(*command))
        if command == ON:
            silent = skipped = False
        elif silent or command in (OFF, SKIP):
            silent, skipped = silent or command == OFF, command == SKIP
            continue
        elif skipped:
            skipped = False
            continue
        found += one_reply(sock)
    return found


KEYS = st.sampled_from([b"a", b"b", b"c"])
SIZES = st.sampled_from([0, 3, EDGE - 10, EDGE - 9, EDGE - 8, EDGE, 20_000, len(LARGE)])
VALUES = SIZES.map(lambda size: LARGE[:size])
USUAL = st.one_of(
    st.tuples(st.sampled_from([b"GET", b"get", b"Get"]), KEYS),
    st.tuples(st.sampled_from([b"SET", b"set"]), KEYS, VALUES),
)
UNUSUAL = st.one_of(
    st.tuples(st.sampled_from([b"DEL", b"EXISTS", b"STRLEN", b"MGET", b"TYPE", b"TTL", b"PERSIST", b"UNLINK"]), KEYS),
    st.tuples(st.sampled_from([b"DEL", b"EXISTS", b"MGET"]), KEYS, KEYS),
    st.tuples(st.just(b"SET"), KEYS, st.just(b"v"), st.sampled_from([b"NX", b"XX", b"GET", b"KEEPTTL", b"FOO"])),
    st.tuples(st.just(b"SET"), KEYS, st.just(b"v"), st.sampled_from([b"EX", b"EXAT"]), st.sampled_from([b"0", b"1x"])),
    st.tuples(st.just(b"SET"), KEYS, st.just(b"gone"), st.just(b"EXAT"), st.just(b"1")),
    st.tuples(st.just(b"EXPIRE"), KEYS, st.sampled_from([b"-1", b"100000", b"x"])),
    st.tuples(st.just(b"GETRANGE"), KEYS, st.just(b"1"), st.sampled_from([b"5", b"-1", b"x"])),
    st.sampled_from([(b"GET",), (b"GET", b"a", b"b"), (b"SET",), (b"SET", b"a"), (b"GETRANGE", b"a"), (b"get",)]),
    st.sampled_from([(b"NOSUCH",), (b"NOSUCH", b"a"), (b"PING",), (b"PING", b"x"), (b"SELECT", b"0"), (b"DBSIZE",)]),
    st.sampled_from([OFF, SKIP, ON]).map(tuple),
)
RUNS = st.tuples(st.one_of(USUAL, USUAL, UNUSUAL), st.sampled_from([1, 1, 2, 5, 30]))


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[Child]:
    """A server whose turns end within runs of equal commands."""
    with Child("--pipeline-commands-max", "3", "--output-buffer-bytes-max", "4096") as child:
        yield child


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs=st.lists(RUNS, min_size=1, max_size=12), cuts=st.lists(st.floats(0, 1), max_size=3), protocol=st.booleans())
def test_a_pipeline_gets_the_replies_of_single_commands_and_of_redis(
    shared_server: Child, narrow_server: Child, redis_port: int, runs: Any, cuts: list[float], protocol: bool
) -> None:
    commands = [list(command) for command, times in runs for _ in range(times if len(command[-1]) <= EDGE else 2)]
    greetings = [[b"HELLO", b"3"]] if protocol else []
    with connected(redis_port, *greetings) as sock:
        expected = together(sock, commands)
    for port in (shared_server.port, narrow_server.port):
        with connected(port, *greetings) as sock:
            assert together(sock, commands, cuts) == expected
    with connected(shared_server.port, *greetings) as sock:
        assert apart(sock, commands) == expected


KEY, RECORD = make_record(b"p" * 32)
MIXTURES = {
    "records": [
        *words("*3 SET a 1 ; *3 GET a"), [b"SET", KEY, RECORD], [b"SET", b"a", RECORD], [b"SET", b"a", b"2"],
        [b"SET", KEY, RECORD[:-1]], *words("*2 GET a"), [b"GET", KEY], [b"KV.META", KEY], *words("SET a 3 ; GET a"),
    ],
    "keys that are too long": [[b"SET", b"k" * 65_480, b"v"], [b"GET", b"k" * 65_480], *words("SET a 1 ; GET a")] * 2,
    "transactions, which there are none of": words("SET a 1 ; MULTI ; SET a 2 ; GET a ; EXEC ; DISCARD ; GET a"),
    "pins": words("*2 SET a 1 ; KV.PIN 100 a ; *2 SET a 2 ; *2 GET a ; KV.PIN 0 a ; SET a 3 ; GET a"),
    "a quit": words("*5 SET a 1 ; *2 GET a ; QUIT ; SET a 2 ; GET a"),
    "a reset": words("*2 SET a 1 ; RESET ; *2 GET a"),
    "an unknown protocol": words("*2 GET none ; HELLO 4 ; *2 GET none"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_a_pipeline_gets_the_replies_of_single_commands(name: str, shared_server: Child, narrow_server: Child) -> None:
    commands = MIXTURES[name]
    with connected(narrow_server.port) as sock:
        expected = together(sock, commands)
    with connected(shared_server.port) as sock:
        assert together(sock, commands) == expected
    with connected(shared_server.port) as sock, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        found = b""
        for command in ended(commands):
            sock.sendall(encode_command(*command))
            found += one_reply(sock)
    assert found == expected[: len(found)] and (found == expected or name == "a quit")
    with shared_server.client() as client:
        assert name != "a quit" or client.call("GET", "a") == b"1"


RULES = [b"on", b"nopass", b"~a*", b"%R~b*", b"+get", b"+set", b"+exists", b"+echo", b"+client|reply"]


def test_denials_in_a_pipeline_are_those_of_redis_and_counted_once(
    start: Callable[..., Child], redis_port: int
) -> None:
    commands = words(
        "*3 SET a1 x ; *3 GET a1 ; *2 DEL a1 ; *2 GET b1 ; SET a2 y ; *2 SET b1 z ; GET a2 ; *2 SET c x ; *2 GET c ;"
        "EXISTS a1 ; EXISTS c ; *3 SET a1 x"
    )
    commands += [[b"GET", b"a1"], [b"GET", b"c"]] * 3
    child = start()
    found = []
    try:
        for port in (redis_port, child.port, child.port):
            with connected(port, [b"ACL", b"SETUSER", b"few", *RULES], [b"AUTH", b"few", b"x"]) as sock:
                found.append((apart if len(found) == 2 else together)(sock, commands))
    finally:
        with connected(redis_port, [b"ACL", b"SETUSER", b"few", b"reset"]):
            pass
    assert found[0].count(b"NOPERM") == 2 + 2 + 2 + 2 + 1 + 3
    assert found[1] == found[0] and found[2] == found[0]
    with child.client() as client:
        info = client.info()
        assert int(info["acl_access_denied_cmd"]) == 2 * 2 and int(info["acl_access_denied_key"]) == 2 * 10
        assert client.info("commandstats")["cmdstat_get"].split(",")[0] == f"calls={2 * (3 + 2 + 1 + 3)}"
        assert "rejected_calls=10" in client.info("commandstats")["cmdstat_get"]


def test_authentication_within_a_pipeline_applies_to_later_commands(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user default off\nuser ann on >a ~* +@all\n")
    child = start("--users-file", str(users))
    commands = words(
        "*3 GET a ; *2 SET a 1 ; AUTH ann b ; *2 GET a ; AUTH ann a ; *3 SET a 1 ; *3 GET a ; RESET ; GET a"
    )
    found = []
    for send in (together, apart):
        with socket.create_connection(("127.0.0.1", child.port), TIMEOUT_S) as sock:
            data = [*commands, [b"AUTH", b"ann", b"a"]]
            found.append(send(sock, data))
    assert found[0] == found[1]
    assert found[0].count(b"-NOAUTH") == 3 + 2 + 2 + 1 and found[0].count(b"$1\r\n1\r\n") == 3


@pytest.mark.parametrize("quota", ["keys_max: 3", "bytes_max: 2400"])
def test_a_quota_ends_within_a_pipeline(start: Callable[..., Child], quota: str) -> None:
    child = start("--tenants", f"{{'': {{{quota}}}}}", "--pin-share-of-tenant", "1")
    commands = words(
        "SET a 1 ; KV.PIN 100 a ; SET b 1 ; KV.PIN 100 b ; SET c 1 ; *2 SET c 2 ; KV.PIN 100 c ; *2 SET d 1 ; GET d ;"
        "SET a 2 ; GET a ; *3 SET e 1 ; KV.PIN 0 b ; *3 SET f 1 ; GET b ; GET f ; DBSIZE"
    )
    found = []
    for send in (together, apart):
        with connected(child.port) as sock:
            found.append(send(sock, commands))
    assert found[0] == found[1] and found[0].count(b"-OOM") == 2


def test_a_budget_that_is_full_evicts_in_a_pipeline_as_it_does_one_by_one(start: Callable[..., Child]) -> None:
    child = start("--memory-budget-bytes", "1 MiB")
    commands = [[b"SET", b"k%d" % number, b"v" * (number % 50 * 200)] for number in range(300)]
    commands += [[b"GET", b"k%d" % number] for number in range(300)] + [[b"DBSIZE"]]
    found = []
    for send in (together, apart):
        with connected(child.port) as sock:
            found.append(send(sock, commands))
    assert found[0] == found[1] and 50 < found[0].count(b"$-1\r\n") < 250


def test_a_pipeline_is_counted_as_its_commands_are(start: Callable[..., Child]) -> None:
    child = start()
    commands = words(
        "*200 SET a 1 ; *100 GET a ; *30 GET none ; *3 GET ; *2 NOSUCH ; *7 SET b 2 ; *9 MGET a none ; SET a 1 FOO ;"
        "*5 get a ; EXISTS a"
    )
    found = []
    for send in (together, apart):
        with child.client() as watcher:
            assert watcher.call("CONFIG", "RESETSTAT") == b"OK"
            with connected(child.port) as sock:
                send(sock, commands)
                listed = watcher.call("CLIENT", "LIST")
                assert isinstance(listed, bytes) and b"cmd=echo" in listed
            info = watcher.info()
            names = ("total_commands_processed", "keyspace_hits", "keyspace_misses", "total_error_replies")
            calls = {name: line.split(",usec")[0] for name, line in watcher.info("commandstats").items()}
            sent = sum(len(encode_command(*command)) for command in ended(commands))
            assert int(info["total_net_input_bytes"]) >= sent
            found.append(({name: info[name] for name in names}, calls["cmdstat_get"], calls["cmdstat_set"]))
    assert found[0] == found[1]
    assert found[0][0]["keyspace_hits"] == str(100 + 5 + 9 + 1) and found[0][0]["keyspace_misses"] == str(30 + 9)
    assert found[0][1:] == ("calls=135", "calls=208")


def test_complete_commands_run_when_a_client_disconnects(shared_server: Child) -> None:
    with connected(shared_server.port) as sock:
        whole = b"".join(encode_command("SET", f"k{number}", "v") for number in range(100))
        sock.sendall(whole + encode_command("SET", "half", "v")[:-3])
    with shared_server.client() as client:
        wait_for(lambda: client.call("DBSIZE") == 100)
        assert client.call("EXISTS", "half") == 0


@pytest.fixture
def served() -> Iterator[Served]:
    """A server whose store the test controls."""
    with Served(io_threads=1) as served:
        yield served


def test_a_store_without_room_stops_a_pipeline_in_place(served: Served) -> None:
    put, counters = served.store.put, served.server.node.counters
    room: list[Ticket] = []
    is_full = True

    def put_sometimes(address: Address, value: bytes | memoryview, **named: Any) -> Ticket | None:
        if address[1].endswith(b"7") and is_full:
            room.append(Ticket())
            raise BusyError("too many writes", room[-1])
        return put(address, value, **named)

    served.store.put = put_sometimes  # type: ignore[method-assign]
    commands = [[b"SET", b"k%d" % number, b"v"] for number in range(10)] + [[b"GET", b"k9"], [b"DBSIZE"]]
    with served.client() as client, served.client() as other:
        for command in commands:
            client.send(*command)
        assert [client.receive() for _ in range(7)] == [b"OK"] * 7
        wait_for(lambda: counters.busy == 1)
        assert other.call("DBSIZE") == 7 and other.call("GET", "k9") is None
        is_full = False
        room[-1].settle()
        assert [client.receive() for _ in range(5)] == [b"OK", b"OK", b"OK", b"v", 10]
        assert counters.busy == 1 and counters.by_command["set"].calls == 10


def test_replies_that_wait_for_a_device_keep_their_places_in_a_pipeline(served: Served) -> None:
    store = served.store
    with served.client() as client:
        client.call("SET", "a", "1")
        client.call("SET", "b", LARGE)
        store.lazy = True
        for number in range(6):
            client.send("SET", f"k{number}", "v")
        client.send("GET", "k5")
        wait_for(lambda: len(store.tickets) == 6)
        store.lazy, store.away = False, True
        for key in ("a", "b", "none", "a"):
            client.send("GET", key)
        served.wait_for_reads(3)
        for number in (2, 1, 0):
            store.finish_read(number)
        for number in range(6):
            store.settle(OSError("the device is gone") if number == 2 else None)
        replies = [client.receive() for _ in range(11)]
    assert isinstance(replies[2], ErrorReply) and "the device is gone" in str(replies[2])
    assert replies[:2] + replies[3:] == [b"OK"] * 5 + [b"v", b"1", LARGE, None, b"1"]
