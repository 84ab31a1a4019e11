"""The same commands to our server and to a real redis-server: the same bytes back."""

import socket

import pytest
from storage_support import TIMEOUT_S, Child, Client

from shadowserve.resp import Value, encode_command, split_inline

BIG = b"v" * 100_000
FUTURE = b"99999999999"  # Unix time, far away
SILENCE = [b"CLIENT", b"REPLY", b"OFF"]
UNANSWERED = [SILENCE, [b"CLIENT", b"REPLY", b"SKIP"], [b"PING", b"skipped"], [b"PING", b"unseen"]]

# One conversation each, commands as one would type them, separated by semicolons.
SCRIPTS = {
    "ping": r"""
        PING ; ping hi ; PING a b ; ECHO x ; ECHO ; EcHo BIG
    """,
    "get and set": r"""
        GET a ; SET a 1 ; GET a ; SET a "" ; GET a ; GET ; GET a b ; SET a ; SET a BIG ; GET a ; STRLEN a ;
        STRLEN none ; MGET a none a ; MGET ; SET "\x00\x0d\x0a\xff" "\x0d\x0a" ; GET "\x00\x0d\x0a\xff"
    """,
    "set with options": r"""
        SET a 1 XX ; SET a 1 NX ; SET a 2 NX ; GET a ; SET a 3 xx get ; SET a 4 NX GET ; SET b 5 NX GET ; GET b ;
        SET a 1 NX XX ; SET a 1 EX ; SET a 1 EX x ; SET a 1 EX 0 ; SET a 1 PX -5 ; SET a 1 EX 10 PX 10 ;
        SET a 1 EX 1.5 ; SET a 1 EX 10 KEEPTTL ; SET a 1 KEEPTTL EX 10 ; SET a 1 FOO ;
        SET a 1 EX 9223372036854775807 ; SET a 1 EX 99999999999999999999 ; SET a 1 EX 100 ; TTL a ;
        SET a 2 KEEPTTL ; TTL a ; SET a 3 ; TTL a ; SET a 1 EXAT FUTURE ; PERSIST a ;
        SET a 1 PXAT 99999999999000 ; PERSIST a ; SET a 1 EXAT 1 ; GET a ; EXISTS a ; SET a 1 NX NX ; GET a
    """,
    "getrange": r"""
        SET a "Hello, world" ; GETRANGE a 0 -1 ; GETRANGE a 0 4 ; GETRANGE a -5 -1 ; GETRANGE a 7 100 ;
        GETRANGE a 5 3 ; GETRANGE a -100 3 ; GETRANGE a 100 200 ; GETRANGE a -3 -5 ; GETRANGE a 0 0 ;
        GETRANGE a -1 0 ; GETRANGE a 3 -100 ; GETRANGE a 12 12 ; GETRANGE none 0 -1 ; GETRANGE a x 1 ;
        GETRANGE a 0 ; SUBSTR a 1 3 ; SUBSTR a ; SET a "" ; GETRANGE a 0 -1 ; SET a BIG ; GETRANGE a 1 70000 ;
        GETRANGE a -30000 -1 ; GETRANGE a 9223372036854775808 1 ; GETRANGE a -0 1 ; GETRANGE a 0 -0
    """,
    "keys": r"""
        EXISTS a ; SET a 1 ; EXISTS a a b ; EXISTS ; TYPE a ; TYPE b ; DBSIZE ; DEL a a b ; DEL ; SET a 1 ;
        UNLINK a b ; DBSIZE ; DBSIZE x ; SET a 1 ; FLUSHDB x ; FLUSHDB ASYNC ; DBSIZE ; FLUSHALL sync ;
        FLUSHALL SYNC x ; SELECT 0 ; SELECT x ; SELECT -1 ; SELECT 100
    """,
    "expiry": r"""
        TTL a ; PTTL a ; SET a 1 ; TTL a ; PTTL a ; PERSIST a ; PERSIST none ; EXPIRE a 100 ; TTL a ; PERSIST a ;
        TTL a ; EXPIRE none 1 ; EXPIRE a x ; EXPIRE a 100 NX ; EXPIRE a 200 NX ; EXPIRE a 50 GT ; EXPIRE a 50 LT ;
        TTL a ; EXPIRE a 70 xx gt ; TTL a ; EXPIRE a 1 NX XX ; EXPIRE a 1 GT LT ; EXPIRE a 1 NX GT ;
        EXPIRE a 1 FOO ; PERSIST a ; EXPIRE a 9 XX ; EXPIRE a 9 GT ; EXPIRE a 9 LT ; TTL a ; PEXPIRE a 100000 ;
        TTL a ; PEXPIRE a 1e3 ; EXPIRE a 9223372036854775807 ; PEXPIRE a 9223372036854775807 ;
        EXPIRE a -9223372036854775808 ; EXPIRE a -1 ; EXISTS a ; SET a 1 ; PEXPIRE a 0 ; GET a ; EXPIRE a
    """,
    "scan": r"""
        SCAN 0 ; SET key:1 x ; SCAN 0 ; SCAN 0 MATCH k*[0-9] ; SCAN 0 MATCH z* ; SCAN 0 COUNT 5 TYPE string ;
        SCAN 0 TYPE list ; SCAN x ; SCAN ; SCAN 0 COUNT 0 ; SCAN 0 COUNT x ; SCAN 0 FOO ; SCAN 0 MATCH ;
        SCAN 1x ; SCAN -0 ; SCAN +0 ; SCAN - ; SCAN " 0" ; SCAN 00000000000000000000000000 ; SCAN "" ; SCAN "0\x00" ;
        SCAN 18446744073709551616 ; SCAN -18446744073709551616 ; SCAN -x ;
        SCAN 0 MATCH "key\\:1" ; SCAN 0 MATCH [^a]ey:? ; SCAN 0 MATCH key:[1
    """,
    "set and expire": r"""
        SETEX a 100 1 ; TTL a ; SETEX a 0 1 ; SETEX a x 1 ; PSETEX a -1 1 ; PSETEX a 100000 2 ; GET a ; SETNX a 3 ;
        SETNX b 3 ; GETSET a 4 ; TTL a ; GETSET none 5 ; GETDEL none ; GETDEL c ; GETEX a ; GETEX a EX 100 ; TTL a ;
        GETEX a PERSIST ; TTL a ; GETEX a EXAT 1 ; GET a ; GETEX none EX 0 ; GETEX b EX 0 ; MSET a 1 b 2 a 3 ; GET a ;
        MSET a ; MSET a 1 b ; MSETNX c 1 a 2 ; EXISTS c ; MSETNX c 1 d 2 ; MGET c d ; EXPIREAT a FUTURE ; EXPIRETIME a ;
        PEXPIREAT a 99999999999999 ; PEXPIRETIME a ; EXPIREAT a 5 XX GT ; EXPIREAT a -1 ; EXISTS a ; EXPIRETIME a ;
        PEXPIRETIME b ; TOUCH a b c ; SET a 1 EX 100 EX 200 ; TTL a ; SET a 1 EX 100 PX 100 ; GETRANGE a -0 -0 ;
        PEXPIRE a -9223372036854775808 ; EXISTS a ; PEXPIREAT b -9223372036854775808 ; EXISTS b
    """,
    "commands about commands": r"""
        COMMAND GETKEYS GET a ; COMMAND GETKEYS MSET a 1 b 2 ; COMMAND GETKEYS PING x ; COMMAND GETKEYS NOSUCH x ;
        COMMAND GETKEYS GET a b ; COMMAND GETKEYS DEL a b ; COMMAND GETKEYS ; COMMAND GETKEYSANDFLAGS SET a b ;
        COMMAND GETKEYSANDFLAGS SET a b EX 1 GET ; COMMAND GETKEYSANDFLAGS GETDEL a ; COMMAND LIST x ;
        COMMAND LIST FILTERBY ACLCAT foo ; COMMAND LIST FILTERBY MODULE x ; COMMAND LIST FILTERBY PATTERN mge* ;
        COMMAND LIST FILTERBY FOO x ; COMMAND LIST FILTERBY PATTERN ; COMMAND LIST FILTERBY pattern GETE? ;
        COMMAND INFO get SET client|kill mset ; COMMAND INFO nosuch client|nosuch
    """,
    "unknown": r"""
        NOSUCH ; nosuch a "b c" ; NOSUCH LONG "never shown" ; LONG ; "GET\x0d\x0aX" a ; CLIENT NOSUCH ; CLIENT ;
        CONFIG ; CONFIG NOSUCH x ; COMMAND NOSUCH ; client|id
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
        CONFIG RESETSTAT x ; COMMAND INFO nosuch ; COMMAND COUNT x ; COMMAND DOCS nosuch
    """,
}


def commands_of(script: str) -> list[list[bytes]]:
    """Return the commands of a script; BIG and LONG stand for arguments that are."""
    words = {b"BIG": BIG, b"LONG": b"x" * 200, b"FUTURE": FUTURE}
    commands = []
    for text in script.split(";"):
        split = split_inline(text.strip().encode())
        assert split, f"cannot split {text}"
        commands.append([words.get(word, word) for word in split])
    return commands


def converse(port: int, commands: list[list[bytes]], protocol: int) -> list[bytes]:
    """Return the bytes that answer each command, in one connection; a mark is sent after each to tell where it ends."""
    answers = []
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
        sock.sendall(encode_command("FLUSHALL"))
        assert read_to(sock, b"+OK\r\n") == b"+OK\r\n"
        if protocol == 3:
            sock.sendall(encode_command("HELLO", 3) + encode_command("ECHO", "hello 3"))
            read_to(sock, b"$7\r\nhello 3\r\n")
        silent = False
        for number, command in enumerate(commands):
            silent = silent or command == SILENCE
            silent = silent and command != [b"CLIENT", b"REPLY", b"ON"]
            sock.sendall(encode_command(*command))
            if silent or command in UNANSWERED:
                continue
            mark = encode_command("ECHO", f"mark {number}")
            sock.sendall(mark)
            end = b"$%d\r\nmark %d\r\n" % (len(f"mark {number}"), number)
            answers.append(read_to(sock, end).removesuffix(end))
    return answers


def read_to(sock: socket.socket, end: bytes) -> bytes:
    found = bytearray()
    while not found.endswith(end):
        data = sock.recv(1 << 16)
        assert data, f"the server closed the connection after {bytes(found[-200:])!r}"
        found += data
    return bytes(found)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_replies_equal_those_of_redis(name: str, protocol: int, shared_server: Child, redis_port: int) -> None:
    commands = commands_of(SCRIPTS[name])
    expected = converse(redis_port, commands, protocol)
    got = converse(shared_server.port, commands, protocol)
    answered = [command for command in commands if command not in UNANSWERED]
    assert len(expected) == len(answered)
    for command, answer, reference in zip(answered, got, expected, strict=True):
        assert answer == reference, f"to {str(command)[:200]}"


MALFORMED = [
    b"*x\r\n", b"*1\r\n:5\r\n", b"*1\r\nGET\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$x\r\n", b"*1\r\n$99999999999999999\r\n",
    b'echo "a\r\n', b"echo 'a'b\r\n", b"*" + b"1" * 70_000, b"*1\r\n$" + b"1" * 70_000, b"a" * 70_000, b"*01\r\n",
    b"*9999999999\r\n", b"*1_0\r\n$1\r\n", b"*01\r\n$4\r\nPING\r\n", b"*-0\r\n", b"*1\r\n$-0\r\n",
    b"*1\r\n$04\r\nPING\r\n", b"*+1\r\n", b"*\r\n", b"* 1\r\n", b"*1\r\n$4 \r\nPING\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data)[:30])
def test_malformed_requests_get_the_answer_of_redis_and_end_the_connection(
    data: bytes, shared_server: Child, redis_port: int
) -> None:
    answers = []
    for port in (redis_port, shared_server.port):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
            sock.sendall(encode_command("PING") + data)
            found = bytearray()
            while piece := sock.recv(1 << 16):
                found += piece
            answers.append(bytes(found))
    assert answers[1] == answers[0]
    assert answers[1].startswith(b"+PONG\r\n-ERR Protocol error: ")


@pytest.mark.parametrize(
    "data",
    [
        b"PING\r\n", b"PING\n", b"\r\n\r\nPING\r\n", b"*0\r\n*-1\r\nPING\r\n", b"echo \"x\\x41\\n\"\r\nping a\r\n",
        b"  ECHO   x  \r\n", b"echo 'it\\'s'\r\n", b"echo \"\"\r\n", b"ping a 'b c'\r\n",
    ],
    ids=repr,
)  # fmt: skip
def test_requests_as_people_type_them(data: bytes, shared_server: Child, redis_port: int) -> None:
    answers = []
    for port in (redis_port, shared_server.port):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
            sock.sendall(data + encode_command("ECHO", "the end"))
            answers.append(read_to(sock, b"$7\r\nthe end\r\n"))
    assert answers[1] == answers[0]


def test_command_table_agrees_with_redis(shared_server: Child, redis_port: int) -> None:
    """Every field of every row that both have, subcommands' included: flags, keys, categories, tips, specifications."""
    with Child.client(shared_server) as ours, Client(redis_port) as theirs:
        for protocol in (2, 3):
            names = ours.call("COMMAND", "LIST")
            assert isinstance(names, list)
            rows = [client.call("COMMAND", "INFO", *names) for client in (ours, theirs)]  # type: ignore[arg-type]
            assert all(isinstance(found, list) for found in rows)
            compared = 0
            for name, row, other in zip(names, *rows, strict=True):  # type: ignore[call-overload, arg-type]
                assert isinstance(name, bytes)
                if other is None:
                    assert name.startswith(b"kv.") or name == b"client|setinfo"  # that is of Redis 7.2
                    continue
                assert row[:9] == other[:9], name
                assert {subcommand[0] for subcommand in row[9]} - {other[0] for other in other[9]} <= {
                    b"client|setinfo"
                }
                compared += 1
            assert compared >= 80
            for client in (ours, theirs):
                client.call("HELLO", protocol + 1 if protocol == 2 else 2)


def test_every_command_is_described_in_the_shape_of_redis(shared_server: Child, redis_port: int) -> None:
    """Of COMMAND DOCS the words are ours; what there is of each command is Redis', less what only people read."""
    with Child.client(shared_server) as ours, Client(redis_port) as theirs:
        names = ours.call("COMMAND", "LIST")
        assert isinstance(names, list)
        mine, his = (
            dict(zip(found[::2], found[1::2], strict=True))
            for found in (client.call("COMMAND", "DOCS", *names) for client in (ours, theirs))  # type: ignore[arg-type]
            if isinstance(found, list)
        )
        assert {name for name in mine if b"|" not in name} >= {name for name in his if b"|" not in name}
        for name, fields in mine.items():
            described = dict(zip(fields[::2], fields[1::2], strict=True))
            assert (
                {b"summary", b"since", b"group"} <= set(described) <= {b"summary", b"since", b"group", b"subcommands"}
            )
            if name in his:
                reference = dict(zip(his[name][::2], his[name][1::2], strict=True))
                assert described[b"since"] == reference[b"since"] and described[b"group"] == reference[b"group"], name
        count = ours.call("COMMAND", "COUNT")
        whole = ours.call("COMMAND")
        assert isinstance(whole, list) and len(whole) == count


def test_clients_that_were_killed_are_in_no_list_any_more(shared_server: Child, redis_port: int) -> None:
    """All 200 were still there: their connections end a moment after the reply."""

    def left(port: int) -> tuple[Value, int, int]:
        clients = [Client(port) for _ in range(200)]
        try:
            for number, client in enumerate(clients):
                assert client.call("CLIENT", "SETNAME", f"killed-{number}") == b"OK"
            with Client(port) as killer:
                # In one piece, so that the list is made right behind the reply.
                killer.socket.sendall(
                    encode_command("CLIENT", "KILL", "TYPE", "normal")
                    + encode_command("CLIENT", "LIST")
                    + encode_command("INFO", "clients")
                )
                killed, listed, info = killer.receive(), killer.receive(), killer.receive()
                assert isinstance(killed, int) and isinstance(listed, bytes) and isinstance(info, bytes)
                connected = int(info.partition(b"connected_clients:")[2].split()[0])
                return killed >= len(clients), listed.count(b"name=killed-"), connected
        finally:
            for client in clients:
                client.close()

    assert left(shared_server.port) == left(redis_port) == (True, 0, 1)
