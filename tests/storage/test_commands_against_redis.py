"""Commands get the replies of a real redis-server, byte by byte.

Most conversations are generated from a grammar of all commands that both servers have: options in any order and case,
twice, or without values; numbers at and beyond the edges; too few and too many arguments; in pipelines and
transactions, in RESP2 and RESP3. They are the same in every run. :data:`NOT_COMPARED` and :func:`compared` list the
exceptions. Written conversations cover what the grammar leaves out.
"""

import random
import socket
from collections.abc import Callable, Iterator

import pytest
from storage_support import TIMEOUT_S, Child, Client

from shadowserve.resp import NEED_DATA, ErrorReply, Map, ReplyReader, Value, encode_command, split_inline

Command = list[bytes]

CONVERSATIONS = 40
COMMANDS = 150  # commands of one conversation

NOT_COMPARED = {
    "acl": "has a comparison of its own",
    "acl|*": "has a comparison of its own",
    "auth": "this server delays replies after failures",
    "client|id": "differs from connection to connection",
    "client|info": "differs from connection to connection",
    "client|list": "differs from connection to connection",
    "client|reply": "a written conversation has it",
    "*|help": "our own words",
    "command": "the rows are compared one by one",
    "command|count": "we have fewer",
    "command|docs": "our own words",
    "command|info": "the rows are compared one by one",
    "command|list": "we have fewer",
    "config|rewrite": "this server refuses it",
    "config|set": "each server has its own parameters",
    "info": "tells of the server",
    "quit": "ends the connection",
    "select": "we have one database",
}
"""Commands of both servers without a conversation, with the reason."""

KEYS = [b"a", b"b", b"c", b"key:1", b"key:2", b"", b"\x00\r\n\xff", b"K" * 300]
VALUES = [b"", b"0", b"-0", b"1", b"Hello, world", b"\x00\r\n\xff", b"v" * 20_000, b"w" * 70_000, b"-1", b" 1"]
NUMBERS = [
    *(b"0", b"-0", b"+1", b"01", b"1.0", b"1e3", b"", b" 1", b"1 ", b"0x10", b"-", b"--1", b"1_0", b"x", b"\xb2"),
    *(b"-1", b"-5", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"-9223372036854775809"),
    *(b"99999999999999999999", b"-99999999999999999999", b"2147483648", b"4294967296", b"18446744073709551615"),
]
OFFSETS = [*NUMBERS, b"1", b"2", b"3", b"4", b"12", b"13", b"100", b"-2", b"-12", b"-13", b"69999", b"70000"]
# Expiries during the test are impossible: short ones pass at once, and long ones last for days.
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
    """Generates commands. Equal seeds give equal commands."""

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
        """Return some options in any order, sometimes twice, seldom without their values."""
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
        """Return a command and arguments for COMMAND GETKEYS."""
        return self.random.choice([self.plain(name, with_arity=True) for name in ("set", "mset", "get", "del", "ping")])

    def grammar(self) -> dict[str, Callable[[], Command]]:
        key, one_of = self.key, self.one_of
        expiring = {
            name: (lambda numbers=numbers: [key(), one_of(numbers), *self.conditions()])
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
            "config|get": lambda: self.some(lambda: one_of([b"save", b"SAVE", b"appendonly", b"no-such", b"sav[e]"])),
            "config|resetstat": lambda: [],
            "client|nosuch": lambda: [],
            "nosuch": lambda: self.some(self.value, 0, 3),
        }

    def plain(self, name: str, *, with_arity: bool = False) -> Command:
        """Return a command, seldom with an argument too many, too few, or of another kind."""
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
    """Return False for commands whose replies depend on the server or on the time.

    An expiry of less than a day may pass during the test, and a random argument may be such an expiry.
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
    """Return the end of the reply at a position; -1 if it has not arrived completely."""
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


def is_answered(commands: list[Command]) -> list[bool]:
    """Return for each command whether it has a reply; see CLIENT REPLY."""
    answered, silent, skipped = [], False, False
    for command in commands:
        words = [word.upper() for word in command]
        mode = words[2] if words[:2] == [b"CLIENT", b"REPLY"] and len(words) == 3 else b""
        silent = mode == b"OFF" or (silent and mode != b"ON")
        answered.append(not (silent or skipped or mode == b"SKIP"))
        skipped = mode == b"SKIP"
    return answered


def converse(port: int, commands: list[Command], protocol: int, pieces: list[int] | None = None) -> list[bytes]:
    """Return the reply to each answered command; ``pieces`` is the number of commands sent at a time, by default 1."""
    replies: list[bytes] = []
    commands = [[b"FLUSHALL"], [b"HELLO", b"%d" % protocol], *commands]
    answered = is_answered(commands)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
        data, position, sent = b"", 0, 0
        for piece in [2, *(pieces or [1] * len(commands))]:
            sock.sendall(b"".join(encode_command(*command) for command in commands[sent : sent + piece]))
            sent = min(sent + piece, len(commands))
            while len(replies) < sum(answered[:sent]):
                end = reply_end(data, position)
                if end < 0:
                    received = sock.recv(1 << 20)
                    assert received, f"closed the connection after {commands[max(0, sent - 3) : sent]}"
                    data, position = data[position:] + received, 0
                    continue
                replies.append(data[position:end])
                position = end
        assert position == len(data), "a command that has no reply was answered"
    return replies[2:]


def value_of(reply: bytes) -> Value:
    reader = ReplyReader()
    reader.feed(reply)
    value = reader.next_value()
    assert value is not NEED_DATA
    return value


def compared(command: Command, reply: bytes) -> object:
    """Return the comparable part of a reply: all of it, except parts that the protocol leaves open.

    - SCAN: cursors differ between the servers. A scan from 0 to the end is compared as a set, other scans only by
        the shape of the reply.
    - KEYS: the order is open.
    - TTL, PTTL and the times that follow from a time to live: time passes between the two servers.
    - DBSIZE: Redis counts expired keys until it finds them.
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
        return (value[0], set(value[1])) if whole else (type(value), len(value))
    if name == b"dbsize":
        return type(value)
    if name == b"keys" and isinstance(value, list):
        return sorted(value)
    if name in (b"ttl", b"pttl", b"expiretime", b"pexpiretime") and isinstance(value, int) and value > 0:
        return round(value, -4 if name in (b"ttl", b"expiretime") else -7)  # hours
    if name == b"hello" and isinstance(value, (Map, list)):
        return [reply[:1], *(word for word in value if not isinstance(word, int) or word in (2, 3))]
    if name == b"config" and isinstance(value, (Map, list)):
        return [reply[:1], *sorted(zip(value[::2], value[1::2], strict=True))]
    return reply


def flattened(commands: list[Command], replies: list[bytes]) -> Iterator[tuple[Command, object]]:
    """Yield the comparable part of each reply. Replies within EXEC's belong to the queued commands."""
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
                yield inner, compared(inner, reply[position:end])
                position = end
        else:
            yield command, compared(command, reply)
        if name in (b"exec", b"discard", b"reset"):
            queued = []


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[Child]:
    """A server whose turns end after few commands, and after replies of few bytes."""
    with Child("--pipeline-commands-max", "3", "--output-buffer-bytes-max", "4096") as child:
        yield child


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("seed", range(CONVERSATIONS))
def test_generated_commands_are_answered_as_redis_answers_them(
    seed: int, protocol: int, shared_server: Child, narrow_server: Child, redis_port: int
) -> None:
    generator = Generator(1000 * protocol + seed)
    conversation = (command for command in generator.conversation() if is_safe(command))
    commands = [command for command, _ in zip(conversation, range(COMMANDS), strict=False)]
    commands += [[b"DISCARD"], *([word, key] for key in KEYS for word in (b"GET", b"PTTL")), [b"KEYS", b"*"]]
    pieces = [generator.random.choice([1, 2, 10, 50]) for _ in commands]
    expected = converse(redis_port, commands, protocol, pieces)
    server = narrow_server if seed % 2 else shared_server
    got = converse(server.port, commands, protocol, pieces)
    pairs = zip(flattened(commands, got), flattened(commands, expected), strict=True)
    for number, ((command, answer), (_, reference)) in enumerate(pairs):
        before = [[word[:40] for word in earlier] for earlier in commands[max(0, number - 5) : number]]
        assert answer == reference, f"to {[word[:100] for word in command]}, number {number}, after {before}"


def test_the_grammar_has_every_command_that_both_servers_have(shared_server: Child, redis_port: int) -> None:
    generated = Generator(0).grammar()
    with Child.client(shared_server) as ours, Client(redis_port) as theirs:
        mine, his = (set(client.call("COMMAND", "LIST")) for client in (ours, theirs))
    containers = {name.partition(b"|")[0] for name in mine if b"|" in name} - {b"command"}
    both = {name.decode() for name in (mine & his) - containers}
    assert {"getex", "client|kill", "exec"} <= both
    for name in both - set(generated):
        container, _, subcommand = name.rpartition("|")
        assert {name, f"{container}|*", f"*|{subcommand}"} & set(NOT_COMPARED), f"no conversation has {name}"
    assert set(generated) - both == {"nosuch", "client|nosuch"}


# ---- Written conversations

# Commands as a user would type them, separated by semicolons.
SCRIPTS = {
    "commands about commands": r"""
        COMMAND GETKEYS GET a ; COMMAND GETKEYS MSET a 1 b 2 ; COMMAND GETKEYS PING x ; COMMAND GETKEYS NOSUCH x ;
        COMMAND GETKEYS GET a b ; COMMAND GETKEYS DEL a b ; COMMAND GETKEYS ; COMMAND LIST x ;
        COMMAND LIST FILTERBY ACLCAT foo ; COMMAND LIST FILTERBY MODULE x ; COMMAND LIST FILTERBY PATTERN mge* ;
        COMMAND LIST FILTERBY FOO x ; COMMAND LIST FILTERBY PATTERN ; COMMAND LIST FILTERBY pattern GETE? ;
        COMMAND INFO nosuch client|nosuch
    """,
    "unknown": r"""
        NOSUCH ; nosuch a "b c" ; NOSUCH LONG "never shown" ; LONG ; "GET\x0d\x0aX" a ; CLIENT NOSUCH ; CLIENT ;
        CONFIG ; CONFIG NOSUCH x ; COMMAND NOSUCH ; client|id ; CLIENT "\xe2\x84\xaaILL" ID 1
    """,
    "client": r"""
        CLIENT GETNAME ; CLIENT SETNAME me ; CLIENT GETNAME ; CLIENT SETNAME "a b" ; CLIENT SETNAME "" ;
        CLIENT GETNAME ; CLIENT SETNAME ; CLIENT NO-EVICT on ; CLIENT NO-EVICT x ; CLIENT LIST TYPE x ;
        CLIENT LIST FOO ; CLIENT KILL nobody ; CLIENT KILL ID x ; CLIENT KILL ID 0 ; CLIENT KILL FOO x ;
        CLIENT KILL ID ; CLIENT KILL TYPE x ; CLIENT KILL USER x ; CLIENT KILL ID 99999999 ; CLIENT KILL SKIPME maybe ;
        CLIENT KILL TYPE pubsub ADDR x LADDR y SKIPME no ; CLIENT LIST ID x ; CLIENT LIST ID 99999999 ; CLIENT ID x ;
        CLIENT REPLY x ;
        CLIENT REPLY ON ; CLIENT REPLY SKIP ; PING skipped ; PING seen ; CLIENT REPLY OFF ; PING unseen ;
        CLIENT REPLY ON ; RESET ; CLIENT GETNAME
    """,
    "authentication without a password": r"""
        AUTH x ; AUTH default x ; AUTH nobody x ; AUTH a b c ; AUTH ; HELLO x ; HELLO 4 ; HELLO 2 FOO ;
        HELLO 2 AUTH x ; HELLO 2 AUTH nobody x ; HELLO 2 SETNAME "a b" ; HELLO 2 SETNAME
    """,
    "server": r"""
        CONFIG GET save ; CONFIG GET appendonly databases-not ; CONFIG GET SAVE ; CONFIG GET ; CONFIG RESETSTAT ;
        CONFIG RESETSTAT x ; COMMAND INFO nosuch ; COMMAND COUNT x ; COMMAND DOCS nosuch ;
        SELECT 0 ; SELECT x ; SELECT -1 ; SELECT 100
    """,
}


def commands_of(script: str) -> list[list[bytes]]:
    """Return the commands of a script; LONG stands for a long argument."""
    words = {b"LONG": b"x" * 200}
    commands = []
    for text in script.split(";"):
        split = split_inline(text.strip().encode())
        assert split, f"cannot split {text}"
        commands.append([words.get(word, word) for word in split])
    return commands


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_written_commands_get_the_replies_of_redis(
    name: str, protocol: int, shared_server: Child, redis_port: int
) -> None:
    commands = commands_of(SCRIPTS[name])
    expected = converse(redis_port, commands, protocol)
    got = converse(shared_server.port, commands, protocol)
    answered = [command for command, is_one in zip(commands, is_answered(commands), strict=True) if is_one]
    for command, answer, reference in zip(answered, got, expected, strict=True):
        assert answer == reference, f"to {str(command)[:200]}"


def test_a_null_byte_is_part_of_a_subcommand_s_name(shared_server: Child) -> None:
    """Not compared: Redis finds CLIENT ID or not, depending on the random seed of its hash table."""
    (answer,) = converse(shared_server.port, [[b"CLIENT", b"ID\x00x"]], 2)
    assert answer.startswith(b"-ERR unknown subcommand")


MALFORMED = [
    b"*x\r\n", b"*1\r\n:5\r\n", b"*1\r\nGET\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$x\r\n", b"*1\r\n$99999999999999999\r\n",
    b'echo "a\r\n', b"echo 'a'b\r\n", b"*" + b"1" * 70_000, b"*1\r\n$" + b"1" * 70_000, b"a" * 70_000, b"*01\r\n",
    b"*9999999999\r\n", b"*1_0\r\n$1\r\n", b"*01\r\n$4\r\nPING\r\n", b"*-0\r\n", b"*1\r\n$-0\r\n",
    b"*1\r\n$04\r\nPING\r\n", b"*+1\r\n", b"*\r\n", b"* 1\r\n", b"*1\r\n$4 \r\nPING\r\n",
]  # fmt: skip
TYPED = [
    b"PING\r\n", b"PING\n", b"\r\n\r\nPING\r\n", b"*0\r\n*-1\r\nPING\r\n", b"echo \"x\\x41\\n\"\r\nping a\r\n",
    b"  ECHO   x  \r\n", b"echo 'it\\'s'\r\n", b"echo \"\"\r\n", b"ping a 'b c'\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED + TYPED, ids=lambda data: repr(data)[:30])
def test_malformed_and_typed_requests_get_the_answers_of_redis(
    data: bytes, shared_server: Child, redis_port: int
) -> None:
    answers = []
    for port in (redis_port, shared_server.port):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
            sock.sendall(encode_command("PING") + data + b"QUIT\r\n" * (data in TYPED))
            found = bytearray()
            while piece := sock.recv(1 << 16):
                found += piece
            answers.append(bytes(found))
    assert answers[1] == answers[0]
    assert answers[1].startswith(b"+PONG\r\n" + b"-ERR Protocol error: " * (data in MALFORMED))


def test_command_table_agrees_with_redis(shared_server: Child, redis_port: int) -> None:
    """Compare each common row, with subcommands, up to the hints for cluster clients, which are empty here."""
    with Child.client(shared_server) as ours, Client(redis_port) as theirs:
        for protocol in (2, 3):
            names = ours.call("COMMAND", "LIST")
            rows = [client.call("COMMAND", "INFO", *names) for client in (ours, theirs)]
            assert all(isinstance(found, list) for found in rows)
            compared = 0
            for name, row, other in zip(names, *rows, strict=True):
                if other is None:
                    assert name.startswith(b"kv.") or name == b"client|setinfo"  # that is of Redis 7.2
                    continue
                assert row[:7] == other[:7] and len(row) == len(other), name
                assert {subcommand[0] for subcommand in row[9]} - {other[0] for other in other[9]} <= {
                    b"client|setinfo"
                }
                compared += 1
            assert compared >= 80
            for client in (ours, theirs):
                client.call("HELLO", protocol + 1 if protocol == 2 else 2)


def test_killed_clients_disappear_from_client_list_at_once(shared_server: Child, redis_port: int) -> None:
    """Symptom: all 200 were still listed, because their connections end after the reply."""

    def left(port: int) -> tuple[Value, int, int]:
        clients = [Client(port) for _ in range(200)]
        try:
            for number, client in enumerate(clients):
                assert client.call("CLIENT", "SETNAME", f"killed-{number}") == b"OK"
            with Client(port) as killer:
                # One send, so that the server creates the list directly after the reply.
                killer.socket.sendall(
                    encode_command("CLIENT", "KILL", "TYPE", "normal")
                    + encode_command("CLIENT", "LIST")
                    + encode_command("INFO", "clients")
                )
                killed, listed, info = killer.receive(), killer.receive(), killer.receive()
                assert isinstance(listed, bytes) and isinstance(info, bytes)
                connected = int(info.partition(b"connected_clients:")[2].split()[0])
                return killed >= len(clients), listed.count(b"name=killed-"), connected
        finally:
            for client in clients:
                client.close()

    assert left(shared_server.port) == left(redis_port) == (True, 0, 1)
