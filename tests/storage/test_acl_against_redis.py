"""ACL commands, denials and categories get the replies of a real redis-server."""

from pathlib import Path

import pytest
from storage_support import Child, Client, Start, running_redis
from test_commands_against_redis import commands_of, converse

from shadowserve.resp import ErrorReply, Value

CLEAN = "ACL DELUSER alice bob carol ; ACL LOG RESET ;"

SCRIPTS = {
    "who": r"""
        ACL WHOAMI ; ACL WHOAMI x ; ACL USERS ; ACL LIST ; ACL GETUSER default ; ACL GETUSER nobody ; ACL ; ACL FOO
    """,
    "set": r"""
        ACL SETUSER alice ; ACL GETUSER alice ; ACL SETUSER alice on >pw ~a:* %R~b:* %W~c* %RW~d* &ch* ;
        ACL GETUSER alice ; ACL LIST ; ACL SETUSER alice reset ; ACL LIST ; ACL GETUSER alice ;
        ACL SETUSER alice on nopass allkeys allcommands allchannels ; ACL GETUSER alice ; ACL LIST ;
        ACL SETUSER alice >x >y ; ACL GETUSER alice ; ACL SETUSER alice <x ; ACL GETUSER alice ;
        ACL SETUSER alice skip-sanitize-payload resetpass off -@all ; ACL GETUSER alice ; ACL USERS ;
        ACL SETUSER alice resetkeys %R~x %W~x ~y* %R~y* ; ACL GETUSER alice ; ACL SETUSER alice clearselectors "" ;
        ACL SETUSER alice +get +set -get ;
        ACL SETUSER alice +lpush -eval +cluster|nodes -@list +xgroup|create +SORT_RO +getex +client|kill +command|list ;
        ACL SETUSER alice -@all +@all ; ACL GETUSER alice ; ACL DELUSER alice bob
    """,
    "wrong rules": r"""
        ACL SETUSER bob on ; ACL SETUSER bob +foo ; ACL SETUSER bob +@foo ; ACL SETUSER bob <nopw ;
        ACL SETUSER bob #abc ; ACL SETUSER bob !abc ; ACL SETUSER bob %Q~x ; ACL SETUSER bob %~x ; ACL SETUSER bob %x ;
        ACL SETUSER bob allkeys ~x ; ACL SETUSER bob allchannels &x ; ACL SETUSER bob zzz ; ACL SETUSER "b b" on ;
        ACL SETUSER bob +client|foo ; ACL SETUSER bob +lpushx1 ; ACL SETUSER bob +cluster|foo ; ACL SETUSER bob -hge ;
        ACL SETUSER bob -get|foo ; ACL SETUSER bob +client|list|x ;
        ACL SETUSER bob "~a b" ; ACL SETUSER bob on zzz >x ; ACL GETUSER bob ; ACL SETUSER ; ACL SETUSER bob "zz\x00z"
    """,
    "others": r"""
        ACL CAT ; ACL CAT foo ; ACL CAT a b ; ACL LOG ; ACL LOG x ; ACL LOG RESET ; ACL LOG 5 ; ACL LOG 5 5 ;
        ACL GENPASS 5 5 ;
        ACL SAVE x ; ACL GENPASS 0 ; ACL GENPASS 5000 ; ACL GENPASS x ; ACL DELUSER default ; ACL DELUSER nobody ;
        ACL DELUSER ; ACL DRYRUN nobody get x ; ACL DRYRUN default nosuch x ; ACL DRYRUN default get ;
        ACL DRYRUN default get x ; ACL DRYRUN default client list ; ACL DRYRUN ; ACL DRYRUN default client nope
    """,
    "dry runs": r"""
        ACL SETUSER alice on nopass ~a:* %R~r:* %W~w:* +@read +@write -@dangerous +client|id +acl|whoami -mget ;
        ACL DRYRUN alice get a:1 ; ACL DRYRUN alice get r:1 ; ACL DRYRUN alice get w:1 ; ACL DRYRUN alice get z ;
        ACL DRYRUN alice set a:1 x ; ACL DRYRUN alice set r:1 x ; ACL DRYRUN alice set w:1 x ;
        ACL DRYRUN alice set w:1 x GET ; ACL DRYRUN alice set w:1 x EX 10 ; ACL DRYRUN alice del r:1 ;
        ACL DRYRUN alice del w:1 a:1 ; ACL DRYRUN alice exists w:1 r:1 ; ACL DRYRUN alice exists z ;
        ACL DRYRUN alice getex r:1 ; ACL DRYRUN alice getex a:1 ; ACL DRYRUN alice getdel w:1 ;
        ACL DRYRUN alice getset w:1 x ; ACL DRYRUN alice setex w:1 1 x ; ACL DRYRUN alice setnx r:1 x ;
        ACL DRYRUN alice psetex w:1 1 x ; ACL DRYRUN alice mset w:1 x a:1 y ; ACL DRYRUN alice mset w:1 x r:1 y ;
        ACL DRYRUN alice msetnx w:1 x z y ; ACL DRYRUN alice touch z ; ACL DRYRUN alice touch w:1 ;
        ACL DRYRUN alice keys * ; ACL DRYRUN alice expireat r:1 1 ; ACL DRYRUN alice pexpireat w:1 1 ;
        ACL DRYRUN alice expiretime w:1 ; ACL DRYRUN alice pexpiretime r:1 ; ACL DRYRUN alice multi ;
        ACL DRYRUN alice exec ; ACL DRYRUN alice watch w:1 ; ACL DRYRUN alice client kill x ;
        ACL DRYRUN alice command list ; ACL DRYRUN alice getex w:1 ex 1 ;
        ACL DRYRUN alice strlen w:1 ; ACL DRYRUN alice type w:1 ; ACL DRYRUN alice ttl w:1 ; ACL DRYRUN alice ttl r:1 ;
        ACL DRYRUN alice expire r:1 1 ; ACL DRYRUN alice expire w:1 1 ; ACL DRYRUN alice persist r:1 ;
        ACL DRYRUN alice getrange w:1 0 1 ; ACL DRYRUN alice unlink w:1 z ; ACL DRYRUN alice mget a:1 ;
        ACL DRYRUN alice flushall ; ACL DRYRUN alice client id ;
        ACL DRYRUN alice client list ; ACL DRYRUN alice dbsize ;
        ACL DRYRUN alice scan 0 ; ACL DRYRUN alice info ; ACL DRYRUN alice auth x ; ACL DRYRUN alice hello ;
        ACL DRYRUN alice ping ; ACL DRYRUN alice acl whoami ; ACL DRYRUN alice acl list
    """,
    "denials": r"""
        ACL SETUSER carol on >pc ~a:* %R~r:* +@read +set +acl|whoami +echo ;
        AUTH carol wrong ; AUTH carol pc ; ACL WHOAMI ;
        ACL LIST ; GET z ; MGET a:1 z ; MGET z ; SET r:1 x ; SET a:1 x ; SET a:1 y GET ; FLUSHALL ; CLIENT LIST ;
        CLIENT ID ;
        MULTI ; EXEC ; KEYS * ; WATCH a:1 ; MGET a:1 a:2 ; SETEX a:1 1 x ;
        DEL a:1 ; EXISTS zzz ; CONFIG GET save ; NOSUCH ; GET ; PING ; HELLO 2 ; RESET ; ACL WHOAMI ;
        AUTH carol ;
        AUTH default x ; HELLO 2 AUTH carol pc ; ACL WHOAMI ; HELLO 2 AUTH nobody pc ; ACL WHOAMI ; RESET
    """,
}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_replies_equal_those_of_redis(name: str, protocol: int, shared_server: Child, redis_port: int) -> None:
    commands = commands_of(CLEAN + SCRIPTS[name])
    expected = converse(redis_port, commands, protocol)
    got = converse(shared_server.port, commands, protocol)
    for command, answer, reference in list(zip(commands, got, expected, strict=True))[2:]:
        if command[0] == b"HELLO" and answer[:1] in b"*%" and reference[:1] in b"*%":
            continue  # the id of the connection differs
        assert answer == reference, f"to {str(command)[:200]}"


def test_categories_equal_those_of_redis(shared_server: Child, redis_port: int) -> None:
    with shared_server.client() as ours, Client(redis_port) as theirs:
        assert ours.call("ACL", "CAT") == theirs.call("ACL", "CAT")
        for category in ours.call("ACL", "CAT"):
            mine, his = (set(client.call("ACL", "CAT", category)) for client in (ours, theirs))
            assert {name for name in mine if not name.startswith(b"kv.") and b"setinfo" not in name} <= his, category


def test_the_log_has_the_entries_of_redis(start: Start, redis_port: int, tmp_path: Path) -> None:
    ours = start()
    told = []
    for port in (ours.port, redis_port):
        with Client(port) as admin, Client(port) as client:
            for command in (["ACL", "LOG", "RESET"], ["ACL", "DELUSER", "dave"]):
                admin.call(*command)
            assert admin.call("ACL", "SETUSER", "dave", "on", ">pd", "~a*", "+get") == b"OK"
            for command in (["AUTH", "dave", "x"], ["HELLO", "2", "AUTH", "nobody", "x"], ["AUTH", "dave", "pd"],
                            ["GET", "b"], ["GET", "b"], ["SET", "a", "1"], ["CLIENT", "LIST"]):  # fmt: skip
                client.call(*command)
            entries = admin.call("ACL", "LOG")
            told.append([
                {name: value for name, value in zip(entry[::2], entry[1::2], strict=True)
                 if name not in (b"age-seconds", b"client-info")}
                for entry in entries
            ])  # fmt: skip
            assert admin.call("ACL", "DELUSER", "dave") == 1
            with pytest.raises((EOFError, ConnectionError)):
                client.call("GET", "a")
    assert told[0] == told[1] and len(told[0]) == 5
    with ours.client() as client:
        info = client.info()
        names = ("acl_access_denied_auth", "acl_access_denied_cmd", "acl_access_denied_key")
        assert [info[name] for name in names] == ["2", "2", "2"]


def words_of(lines: Value) -> list[set[bytes]]:
    """Return the words of each user: Redis 7.0 orders rules on commands differently."""
    return [set(line.split()) for line in lines]


def test_users_files_are_exchangeable_with_redis(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    file.write_text("user default on nopass ~* &* +@all\nuser alice on >pw ~a:* %R~b:* -@all +set +get\n")
    child = start("--users-file", str(file))
    with child.client() as client:
        assert client.call("ACL", "SETUSER", "bob", "on", "nopass", "~*", "-@all", "+get") == b"OK"
        assert client.call("ACL", "SAVE") == b"OK"
        ours = client.call("ACL", "LIST")
    with running_redis(tmp_path, "--aclfile", str(file)) as port, Client(port) as reference:
        assert words_of(reference.call("ACL", "LIST")) == words_of(ours)
        assert reference.call("ACL", "SAVE") == b"OK"
    with child.client() as client:
        loaded = client.call("ACL", "LOAD")
        assert not isinstance(loaded, ErrorReply)
        assert words_of(client.call("ACL", "LIST")) == words_of(ours)
