"""Thousands of generated commands to our server and to a real redis-server: the same replies, byte by byte.

Conversations come from a grammar of every command that both have, with arguments that nobody would think of: options in
any order and case, twice, or without their values; numbers at the edges and not quite numbers; too few and too many
arguments; in pipelines and in transactions, in RESP2 and RESP3. They are the same in every run. What must not be
compared is listed, with the reason, in :data:`NOT_COMPARED` and in the rules of :func:`told`.
"""

import random
import socket
from collections.abc import Callable, Iterator

import pytest
from storage_support import TIMEOUT_S, Child, Client

from shadowserve.resp import NEED_DATA, ErrorReply, Map, ReplyReader, SetReply, Value, encode_command

Command = list[bytes]

CONVERSATIONS = 40
COMMANDS = 150  # of one conversation

NOT_COMPARED = {
    "acl": "has a comparison of its own",
    "acl|*": "has a comparison of its own",
    "auth": "ours holds back its answers after failures",
    "client|id": "differs from connection to connection",
    "client|info": "differs from connection to connection",
    "client|list": "differs from connection to connection",
    "client|reply": "what is not answered is in the written comparison",
    "*|help": "our own words",
    "command": "the rows are compared one by one",
    "command|count": "we have fewer",
    "command|docs": "our own words",
    "command|info": "the rows are compared one by one",
    "command|list": "we have fewer",
    "config|rewrite": "ours refuses it",
    "config|set": "each server has its own parameters",
    "info": "tells of the server",
    "quit": "ends the connection",
    "select": "we have one database",
}
"""Of the commands that both have, those that no conversation has, and why."""

KEYS = [b"a", b"b", b"c", b"key:1", b"key:2", b"", b"\x00\r\n\xff", b"K" * 300]
VALUES = [b"", b"0", b"-0", b"1", b"Hello, world", b"\x00\r\n\xff", b"v" * 20_000, b"w" * 70_000, b"-1", b" 1"]
NUMBERS = [
    *(b"0", b"-0", b"+1", b"01", b"1.0", b"1e3", b"", b" 1", b"1 ", b"0x10", b"-", b"--1", b"1_0", b"x", b"\xb2"),
    *(b"-1", b"-5", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"-9223372036854775809"),
    *(b"99999999999999999999", b"-99999999999999999999", b"2147483648", b"4294967296", b"18446744073709551615"),
]
OFFSETS = [*NUMBERS, b"1", b"2", b"3", b"4", b"12", b"13", b"100", b"-2", b"-12", b"-13", b"69999", b"70000"]
# Nothing that would expire while the test runs: what is short is over at once, what is not lasts for days.
DURATIONS = [
    *(number for number in NUMBERS if number != b"+1"),
    *(b"1000000000", b"2000000000", b"9000000000", b"9223372036854775", b"9223372036854776", b"-9223372036854776"),
]
TIMES = [*NUMBERS, b"1", b"1000", b"99999999999", b"99999999999000", b"88888888888000"]
CURSORS = [*NUMBERS, b"0", b"0", b"0", b"17", b"-17", b"00", b"+0", b"0" * 30, b"1" * 19, b"9" * 21]
PATTERNS = [b"*", b"key:*", b"?", b"[a-b]", b"[^a]", b"", b"**", b"key:[1", b"\\a", b"a\\", b"[z-a]", b"K*", b"*\xff"]
NAMES = [b"me", b"", b"a b", b"x\n", b"\xff", b"n" * 100]
NONSENSE = [b"", b"FOO", b"NX", b"EX", b"\x00", b"GETX", b"KEEPTT", b"x" * 200, b"a\r\nb", b"100"]


class Generator:
    """Makes commands. The same numbers make the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, make: Callable[[], bytes], at_least: int = 1, at_most: int = 5) -> Command:
        return [make() for _ in range(self.random.randint(at_least, at_most))]

    def key(self) -> bytes:
        return self.random.choice(KEYS)

    def value(self) -> bytes:
        return self.random.choice(VALUES)

    def one_of(self, choices: list[bytes]) -> bytes:
        return self.random.choice(choices)

    def cased(self, word: bytes) -> bytes:
        shape = self.random.random()
        if shape < 0.5:
            return word.upper()
        if shape < 0.8:
            return word.lower()
        return bytes(
            self.random.choice((letter, letter ^ 0x20)) if chr(letter).isalpha() else letter for letter in word
        )

    def options(self, *options: tuple[str, list[bytes] | None], most: int = 4) -> Command:
        """Some options in any order, maybe twice, seldom without their values."""
        found: Command = []
        count = self.random.choice([0, 0, 1, 1, 1, 2, 2, 3, most])
        for _ in range(count):
            name, values = self.random.choice(options)
            found.append(self.cased(name.encode()))
            if values is not None and self.random.random() < 0.95:
                found.append(self.one_of(values))
        return found

    def set_options(self) -> Command:
        expiry = ("EX", DURATIONS), ("PX", DURATIONS), ("EXAT", TIMES), ("PXAT", TIMES)
        return self.options(*expiry, ("NX", None), ("XX", None), ("GET", None), ("KEEPTTL", None), ("PERSIST", None))

    def getex_options(self) -> Command:
        expiry = ("EX", DURATIONS), ("PX", DURATIONS), ("EXAT", TIMES), ("PXAT", TIMES)
        return self.options(*expiry, ("PERSIST", None), ("KEEPTTL", None), ("NX", None), ("GET", None), most=3)

    def conditions(self) -> Command:
        return self.options(("NX", None), ("XX", None), ("GT", None), ("LT", None), ("FOO", None), most=3)

    def scan_options(self) -> Command:
        types = [b"string", b"STRING", b"list", b"", b"foo"]
        return self.options(("MATCH", PATTERNS), ("COUNT", [b"100000", *OFFSETS]), ("TYPE", types), most=3)

    def kill_filters(self) -> Command:
        if self.random.random() < 0.2:
            return [self.one_of([b"1.2.3.4:5", b"", b"id", b"\xff"])]
        return self.options(
            *(("ID", [b"0", b"-1", b"x", b"9223372036854775807", b"9223372036854775808", b""]),),
            *(("ADDR", [b"1.2.3.4:5", b""]), ("LADDR", [b"1.2.3.4:5"]), ("TYPE", [b"master", b"pubsub", b"foo", b""])),
            *(("USER", [b"nobody", b""]), ("SKIPME", [b"yes", b"Yes", b"maybe", b""]), ("FOO", [b"x"])),
        )

    def pairs(self) -> Command:
        return [word for _ in range(self.random.randint(1, 4)) for word in (self.key(), self.value())]

    def described(self) -> Command:
        """A command and arguments to tell the keys of."""
        return self.random.choice([self.plain(name, with_arity=True) for name in ("set", "mset", "get", "del", "ping")])

    def grammar(self) -> dict[str, Callable[[], Command]]:
        key, one_of = self.key, self.one_of
        expiring = {
            name: (lambda numbers=numbers: [key(), one_of(numbers), *self.conditions()])  # type: ignore[misc]
            for name, numbers in (
                ("expire", DURATIONS),
                ("pexpire", DURATIONS),
                ("expireat", TIMES),
                ("pexpireat", TIMES),
            )
        }
        of_one_key = ("get", "strlen", "type", "ttl", "pttl", "persist", "expiretime", "pexpiretime", "getdel")
        of_keys = ("del", "unlink", "exists", "touch", "mget", "watch")
        plain = ("dbsize", "multi", "exec", "discard", "unwatch", "reset")
        return {
            **expiring,
            **{name: (lambda: [key()]) for name in of_one_key},
            **{name: (lambda: self.some(key)) for name in of_keys},
            **{name: (lambda: []) for name in plain},
            "ping": lambda: self.some(self.value, 0, 2),
            "echo": lambda: [self.value()],
            "set": lambda: [key(), self.value(), *self.set_options()],
            "setnx": lambda: [key(), self.value()],
            "setex": lambda: [key(), one_of(DURATIONS), self.value()],
            "psetex": lambda: [key(), one_of(DURATIONS), self.value()],
            "getset": lambda: [key(), self.value()],
            "getex": lambda: [key(), *self.getex_options()],
            "getrange": lambda: [key(), one_of(OFFSETS), one_of(OFFSETS)],
            "substr": lambda: [key(), one_of(OFFSETS), one_of(OFFSETS)],
            "mset": self.pairs,
            "msetnx": self.pairs,
            "scan": lambda: [one_of(CURSORS), *self.scan_options()],
            "keys": lambda: [one_of(PATTERNS)],
            "flushdb": lambda: self.options(("ASYNC", None), ("SYNC", None), ("FOO", None), most=2),
            "flushall": lambda: self.options(("ASYNC", None), ("SYNC", None), ("FOO", None), most=2),
            "hello": lambda: [one_of([b"2", b"3", *NUMBERS]), *self.options(("SETNAME", NAMES), ("FOO", None), most=2)],
            "client|getname": lambda: [],
            "client|setname": lambda: [one_of(NAMES)],
            "client|no-evict": lambda: [one_of([b"on", b"OFF", b"x"])],
            "client|kill": self.kill_filters,
            "command|getkeys": self.described,
            "command|getkeysandflags": self.described,
            "config|get": lambda: self.some(lambda: one_of([b"save", b"SAVE", b"appendonly", b"no-such", b"sav[e]"])),
            "config|resetstat": lambda: [],
            "client|nosuch": lambda: [],
            "nosuch": lambda: self.some(self.value, 0, 3),
        }

    def plain(self, name: str, *, with_arity: bool = False) -> Command:
        """A command, seldom with an argument too many, too few, or of another kind."""
        arguments = self.grammar()[name]()
        shape = self.random.random()
        if with_arity or shape > 0.1:
            pass
        elif shape < 0.04:
            arguments = arguments[:-1]
        elif shape < 0.07:
            arguments = [*arguments, self.one_of(NONSENSE)]
        elif arguments:
            arguments[self.random.randrange(len(arguments))] = self.one_of(NONSENSE)
        return [*(self.cased(word.encode()) for word in name.split("|")), *arguments]

    def conversation(self) -> Iterator[Command]:
        grammar = self.grammar()
        rare = {"reset", "hello", "flushall", "flushdb", "multi", "exec", "discard", "config|resetstat"}
        often = ["set", "set", "get", "getrange", "getex", "expire", "pexpire"]
        names = [*often, *(name for name in grammar if name not in rare)] * 3 + sorted(rare)
        while True:
            if self.random.random() < 0.05:
                yield [self.cased(b"MULTI")]
                yield from (self.plain(self.random.choice(names)) for _ in range(self.random.randint(0, 8)))
                yield [self.cased(self.random.choice([b"EXEC", b"EXEC", b"EXEC", b"DISCARD"]))]
            else:
                yield self.plain(self.random.choice(names))


def is_safe(command: Command) -> bool:
    """Leave out what would not be the same in two servers, or not at another time.

    An expiry of less than a day may pass while the test runs; a nonsense argument may have become one.
    """
    name = command[0].lower()
    if name in (b"set", b"getex", b"setex", b"psetex", b"expire", b"pexpire"):
        relative = [
            after for word, after in zip(command, [*command[1:], b""], strict=True) if word.upper() in (b"EX", b"PX")
        ]
        relative += command[2:3] if name not in (b"set", b"getex") else []
        return not any(number.isdigit() and 0 < int(number) < 10**9 for number in relative)
    if name == b"client" and len(command) > 2 and command[1].lower() == b"kill":
        return (
            len(command) != 4 or command[2].lower() != b"skipme" or command[3].lower() == b"maybe"
        )  # kills all others
    return name != b"select"


def reply_end(data: bytes, begin: int) -> int:
    """Return where the reply ends that begins there; -1 if it has not all arrived."""
    end = data.find(b"\r\n", begin)
    if end < 0:
        return -1
    kind, text = data[begin : begin + 1], data[begin + 1 : end]
    position = end + 2
    if kind in b"$=!":
        position += int(text) + 2 if int(text) >= 0 else 0
        return position if position <= len(data) else -1
    if kind in b"*~>%":
        for _ in range(int(text) * (2 if kind == b"%" else 1)):
            position = reply_end(data, position)
            if position < 0:
                return -1
    return position


def converse(port: int, commands: list[Command], protocol: int, pieces: list[int]) -> list[bytes]:
    """Return the reply to each command; they are sent so many at a time."""
    replies: list[bytes] = []
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
        waiting = [encode_command("FLUSHALL"), encode_command("HELLO", protocol)]
        waiting += [encode_command(*command) for command in commands]
        data, position, sent, wanted = b"", 0, 0, 0
        for piece in [2, *pieces]:
            sock.sendall(b"".join(waiting[sent : sent + piece]))
            sent += piece
            wanted = min(sent, len(waiting))
            while len(replies) < wanted:
                end = reply_end(data, position)
                if end < 0:
                    received = sock.recv(1 << 20)
                    assert received, f"closed the connection after {commands[len(replies) - 3 : len(replies) - 1]}"
                    data, position = data[position:] + received, 0
                    continue
                replies.append(data[position:end])
                position = end
    return replies[2:]


def value_of(reply: bytes) -> Value:
    reader = ReplyReader()
    reader.feed(reply)
    value = reader.next_value()
    assert value is not NEED_DATA
    return value  # type: ignore[return-value]


def told(command: Command, reply: bytes) -> object:
    """Return what is compared of a reply: all of it, but for what the protocol leaves open.

    - SCAN: no cursor of one server means anything to the other, so only a scan from 0 to the end is compared as a set,
      and otherwise what shape the reply has.
    - KEYS: the order is open.
    - TTL, PTTL and the times that follow from a time to live: time passes between one server and the other.
    - DBSIZE: Redis counts keys that have expired until it comes across them.
    - HELLO: the id of the connection.
    - CONFIG GET: the order is open.
    """
    name = command[0].lower()
    value = value_of(reply)
    if isinstance(value, ErrorReply):
        return reply
    if name == b"scan" and isinstance(value, list):
        assert isinstance(value[0], bytes) and value[0].isdigit() and isinstance(value[1], list)
        whole = len(command) > 3 and command[1] == b"0" and b"100000" in command
        return (value[0], set(value[1])) if whole else (type(value), len(value))  # type: ignore[arg-type]
    if name == b"dbsize":
        return type(value)
    if name == b"keys" and isinstance(value, list):
        return sorted(value)  # type: ignore[type-var]
    if name in (b"ttl", b"pttl", b"expiretime", b"pexpiretime") and isinstance(value, int) and value > 0:
        return round(value, -4 if name in (b"ttl", b"expiretime") else -7)  # hours
    if name == b"hello" and isinstance(value, (Map, list)):
        return [reply[:1], *(word for word in value if not isinstance(word, int) or word in (2, 3))]
    if name == b"config" and isinstance(value, (Map, list)):
        return [reply[:1], *sorted(zip(value[::2], value[1::2], strict=True))]  # type: ignore[type-var]
    return reply


def flattened(commands: list[Command], replies: list[bytes]) -> Iterator[tuple[Command, object]]:
    """Yield what is compared of each reply; those within that of EXEC belong to the commands that it executed."""
    queued: list[Command] = []
    for command, reply in zip(commands, replies, strict=True):
        if reply == b"+QUEUED\r\n":
            queued.append(command)
            yield command, reply
            continue
        name = command[0].lower()
        if name == b"exec" and reply[:1] == b"*" and int(reply[1 : reply.index(b"\r\n")]) == len(queued):
            yield command, len(queued)
            position = reply.index(b"\r\n") + 2
            for inner in queued:
                end = reply_end(reply, position)
                yield inner, told(inner, reply[position:end])
                position = end
        else:
            yield command, told(command, reply)
        if name in (b"exec", b"discard", b"reset"):
            queued = []


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("seed", range(CONVERSATIONS))
def test_generated_commands_are_answered_as_redis_answers_them(
    seed: int, protocol: int, shared_server: Child, redis_port: int
) -> None:
    generator = Generator(1000 * protocol + seed)
    conversation = (command for command in generator.conversation() if is_safe(command))
    commands = [command for command, _ in zip(conversation, range(COMMANDS), strict=False)]
    commands += [[b"DISCARD"], *([word, key] for key in KEYS for word in (b"GET", b"PTTL")), [b"KEYS", b"*"]]
    pieces = [generator.random.choice([1, 2, 10, 50]) for _ in commands]
    expected = converse(redis_port, commands, protocol, pieces)
    got = converse(shared_server.port, commands, protocol, pieces)
    pairs = zip(flattened(commands, got), flattened(commands, expected), strict=True)
    for number, ((command, answer), (_, reference)) in enumerate(pairs):
        before = [[word[:40] for word in earlier] for earlier in commands[max(0, number - 5) : number]]
        assert answer == reference, f"to {[word[:100] for word in command]}, number {number}, after {before}"


def test_the_grammar_has_every_command_that_both_servers_have(shared_server: Child, redis_port: int) -> None:
    generated = Generator(0).grammar()
    with Child.client(shared_server) as ours, Client(redis_port) as theirs:
        mine, his = (set(client.call("COMMAND", "LIST")) for client in (ours, theirs))  # type: ignore[arg-type]
    containers = {name.partition(b"|")[0] for name in mine if b"|" in name} - {b"command"}
    both = {name.decode() for name in (mine & his) - containers}
    assert {"getex", "client|kill", "exec"} <= both
    for name in both - set(generated):
        container, _, subcommand = name.rpartition("|")
        assert {name, f"{container}|*", f"*|{subcommand}"} & set(NOT_COMPARED), f"no conversation has {name}"
    assert set(generated) - both == {"nosuch", "client|nosuch"}
    assert isinstance(SetReply([]), list)
