"""Users: rules and their parser, passwords, denials, and the users file."""

import hashlib
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from machine import wait_for
from slow_store import Served
from storage_support import Child, Client, Start

from shadowserve.errors import ConfigurationError
from shadowserve.resp import ErrorReply
from storage_kv.access import users as module
from storage_kv.access.authentication_throttle import AuthenticationThrottle
from storage_kv.access.rules import CATEGORIES, RuleError, User, parse_line
from storage_kv.access.users import Users, read_users
from storage_kv.commands import BY_FULL_NAME, TABLE
from storage_kv.config import StorageConfig

CORPUS = Path(__file__).parent / "corpus" / "users"


def user_with(*rules: str) -> User:
    user = User(b"alice")
    for rule in rules:
        user.apply(rule.encode(), BY_FULL_NAME)
    return user


def allowed(user: User) -> set[str]:
    return {name for name, command in BY_FULL_NAME.items() if user.may_run(command)}


def test_the_last_matching_rule_decides() -> None:
    open_to_all = {command.full_name for command in TABLE.commands if command.open_to_all}
    assert allowed(user_with()) == open_to_all
    assert allowed(user_with("+@all")) == set(BY_FULL_NAME)
    assert allowed(user_with("+@all", "-@all")) == open_to_all
    assert allowed(user_with("+get", "-@read")) == open_to_all
    assert allowed(user_with("-@read", "+get")) == open_to_all | {"get"}
    assert allowed(user_with("+get", "-get", "+GET")) == open_to_all | {"get"}
    assert allowed(user_with("+@all", "-@dangerous", "+info")) == {
        name for name, command in BY_FULL_NAME.items() if name == "info" or "dangerous" not in command.categories
    }
    assert {"client|list", "client|id", "client"} <= allowed(user_with("+client"))
    assert allowed(user_with("+client", "-client|list")) == allowed(user_with("+client")) - {"client|list"}
    assert allowed(user_with("-client|list", "+client")) == allowed(user_with("+client"))
    assert allowed(user_with("+client|id")) == open_to_all | {"client|id"}


def test_key_patterns_allow_reading_and_writing() -> None:
    user = user_with("~a:*", "%R~r:*", "%W~w:*", "%rw~b:*")
    for key, may in ((b"a:1", "RW"), (b"b:", "RW"), (b"r:1", "R"), (b"w:1", "W"), (b"x", "")):
        for access in ("R", "W", "RW"):
            assert user.may_use(key, access) == set(access).issubset(may), (key, access)
        assert user.may_use(key, "") == bool(may)  # with the check for existence
    assert BY_FULL_NAME["get"].denial_of(user_with("+get"), [b"GET", b"k" * 60_000]) == ("key", b"k" * 256)
    user.apply(b"%W~r:*", BY_FULL_NAME)
    assert user.may_use(b"r:1", "RW") and b"~r:*" in user.keys_text.split()
    user.apply(b"allkeys", BY_FULL_NAME)
    assert user.may_use(b"anything", "RW")
    user.apply(b"resetkeys", BY_FULL_NAME)
    assert not user.may_use(b"a:1", "")


def test_only_unrestricted_users_skip_checks() -> None:
    assert user_with("allkeys", "allcommands").unrestricted
    for rules in (["allkeys", "allcommands", "-flushall"], ["~a*", "allcommands"], ["allkeys", "+@read"], []):
        assert not user_with(*rules).unrestricted
    assert user_with("~x", "+acl").is_operator and not user_with("~*", "+@all", "-@admin").is_operator


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("zzz", "Syntax error"), ("+nosuch", "Unknown command"), ("-@nosuch", "Unknown command"),
        ("+get|x", "Unknown command"), ("+client|list|x", "first-arg"), ("<other", "does not exist"),
        ("#abc", "exactly 64"), ("!" + "A" * 64, "exactly 64"), ("%~x", "Syntax"), ("%Q~x", "Syntax"), ("%R", "Syntax"),
        ("~a b", "Syntax"), ("(+get ~x)", "Selectors are not supported"), ("+", "Syntax"), ("tenant=a b", "tenant"),
        ("tenant=" + "x" * 129, "tenant"),
    ],
)  # fmt: skip
def test_invalid_rules_change_nothing(rule: str, reason: str) -> None:
    user = user_with("on", ">pw", "~a*", "+@read")
    before = user.describe()
    with pytest.raises(RuleError, match=reason):
        user.apply(rule.encode(), BY_FULL_NAME)
    assert user.describe() == before


WORDS = st.one_of(
    st.sampled_from([
        "on", "off", "nopass", "resetpass", "allkeys", "~*", "resetkeys", "allchannels", "&*", "resetchannels", "reset",
        "allcommands", "nocommands", "+@all", "-@all", "sanitize-payload", "skip-sanitize-payload", "clearselectors",
        "tenant=", "tenant=team-a", "<pw", "(", "", "%", "%RW~", "+", "-", "#", "!",
    ]),
    st.builds("{}@{}".format, st.sampled_from("+-"), st.sampled_from([*CATEGORIES, "nosuch"])),
    st.builds("{}{}".format, st.sampled_from("+-"), st.sampled_from([*BY_FULL_NAME, "nosuch", "client|x"])),
    st.builds(
        "{}{}".format, st.sampled_from([">", "~", "%R~", "%w~", "&", "tenant="]), st.text("ab:*?[]\\^-", max_size=8)
    ),
    st.builds("#{}".format, st.text("0123456789abcdef", min_size=64, max_size=64)),
).map(str.encode)  # fmt: skip


@given(st.lists(st.one_of(WORDS, st.binary(max_size=12)), max_size=12))
def test_the_description_of_a_user_parses_to_the_same_user(rules: list[bytes]) -> None:
    user = User(b"alice")
    for rule in rules:
        try:
            user.apply(rule, BY_FULL_NAME)
        except RuleError:
            continue
    parsed = parse_line(user.describe())
    name, words = parsed
    again = User(name)
    for word in words:
        again.apply(word, BY_FULL_NAME)
    assert again.describe() == user.describe()
    assert allowed(again) == allowed(user) and again.unrestricted == user.unrestricted
    for key in (b"", b"a", b"ab:", b"[", b"\\a", b"zz"):
        for access in ("", "R", "W", "RW"):
            assert again.may_use(key, access) == user.may_use(key, access)


@given(st.binary(max_size=200))
@example(b"user")
@example(b"user  a on")
@example(b"user a on\x00")
def test_any_line_of_a_users_file_is_a_user_or_an_error(line: bytes) -> None:
    try:
        parsed = parse_line(line)
        for word in parsed[1] if parsed else ():
            User(b"a").apply(word, BY_FULL_NAME)
    except RuleError:
        pass


def test_the_fuzzing_corpus_of_users_files_still_gives_its_results(tmp_path: Path) -> None:
    kept = sorted(CORPUS.iterdir())
    assert len(kept) >= 8
    for path in kept:
        expected, _, content = path.read_bytes().partition(b"\n")
        file = tmp_path / "users.acl"
        file.write_bytes(content)
        if expected.startswith(b"refused: "):
            with pytest.raises(ConfigurationError, match=re.escape(expected.removeprefix(b"refused: ").decode())):
                read_users(str(file), BY_FULL_NAME)
        else:
            names = sorted(read_users(str(file), BY_FULL_NAME))
            assert b"users: " + b" ".join(names) == expected, path.name


@pytest.mark.parametrize("sign", ["<", "#", "!", "", ">first "])
def test_error_messages_about_a_users_file_show_no_passwords(tmp_path: Path, sign: str) -> None:
    """Symptom: a password with # instead of >, without a sign or behind a space was in the message and in the log."""
    file = tmp_path / "users.acl"
    file.write_text(f"user alice on {sign}secret-word\n")
    with pytest.raises(ConfigurationError) as caught:
        read_users(str(file), BY_FULL_NAME)
    assert "secret-word" not in str(caught.value) and f"{file}:1: " in str(caught.value)


def test_authentication_does_the_same_work_for_unknown_users(monkeypatch: pytest.MonkeyPatch) -> None:
    users = Users(StorageConfig(), BY_FULL_NAME)
    users.set_user(b"alice", [b"on", b">right"])
    users.set_user(b"off", [b">right"])
    calls: list[str] = []
    real_hash, real_compare = module.hash_password, module.hmac.compare_digest

    def hashed(password: bytes) -> bytes:
        calls.append("hash")
        return real_hash(password)

    def compared(first: bytes, second: bytes) -> bool:
        calls.append(f"compare {len(first)} {len(second)}")
        return real_compare(first, second)

    monkeypatch.setattr(module, "hash_password", hashed)
    monkeypatch.setattr(module.hmac, "compare_digest", compared)
    for name, password, accepted in (
        (b"alice", b"right", True), (b"alice", b"wrong", False), (b"nobody", b"right", False), (b"off", b"right", False)
    ):  # fmt: skip
        calls.clear()
        assert (users.authenticate(name, password) is not None) == accepted
        assert calls == ["hash", "compare 64 64"], name


def test_after_failures_all_attempts_of_an_address_are_delayed() -> None:
    throttle = AuthenticationThrottle()
    assert throttle.answer_at("10.0.0.1:1", 100.0, accepted=True) == 0.0
    first = throttle.answer_at("10.0.0.1:2", 100.0, accepted=False)
    second = throttle.answer_at("10.0.0.1:3", 100.0, accepted=True)
    assert 100.0 < first < second
    assert throttle.answer_at("10.0.0.2:1", 100.0, accepted=True) == 0.0
    while not throttle.is_refused("10.0.0.1:4", 100.0):
        assert throttle.answer_at("10.0.0.1:4", 100.0, accepted=False) < 100.0 + 10.0
    assert throttle.answer_at("10.0.0.1:5", 200.0, accepted=True) == 0.0  # the failure is forgotten
    throttle.answer_at("[2001:db8::1]:1", 100.0, accepted=False)
    assert throttle.answer_at("[2001:db8::2]:1", 100.0, accepted=True) > 100.0  # an address of the same network
    assert throttle.answer_at("[::ffff:10.9.9.9]:1", 100.0, accepted=True) == 0.0
    for number in range(10_000):
        throttle.answer_at(f"10.{number >> 8}.{number & 255}.1:1", 100.0, accepted=False)
    assert len(throttle._queues) <= 4096


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    file = tmp_path / "users.acl"
    hashed = hashlib.sha256(b"pa").hexdigest()
    file.write_text(f"user admin on >root ~* &* +@all\nuser alice on #{hashed} ~a:* %R~b:* +@read +@write -flushall\n")
    return file


def test_changed_rules_apply_to_connected_clients_at_once(start: Start, users_file: Path) -> None:
    child = start("--users-file", str(users_file))
    with child.client() as admin, child.client() as alice:
        assert admin.call("AUTH", "admin", "root") == b"OK" and alice.call("AUTH", "alice", "pa") == b"OK"
        assert alice.call("GET", "a:1") is None
        assert admin.call("ACL", "SETUSER", "alice", "-get") == b"OK"
        assert alice.call("GET", "a:1").startswith(b"NOPERM")
        assert admin.call("ACL", "SETUSER", "alice", "+get", "off") == b"OK"
        assert alice.call("GET", "a:1") is None  # existing users stay
        assert alice.call("AUTH", "alice", "pa").startswith(b"WRONGPASS")
        assert admin.call("ACL", "SETUSER", "alice", "on", "+nosuch").startswith(b"ERR Error in")
        assert b"off" in admin.call("ACL", "GETUSER", "alice")[1]
        assert admin.call("ACL", "DELUSER", "alice", "nobody") == 1
        assert alice.receive_to_end() == b""
        assert admin.call("ACL", "DELUSER", "default") == b"ERR The 'default' user cannot be removed"


def test_the_users_file_is_saved_and_loaded_atomically(start: Start, users_file: Path) -> None:
    child = start("--users-file", str(users_file))
    with child.client() as admin:
        assert admin.call("AUTH", "admin", "root") == b"OK"
        assert admin.call("ACL", "SETUSER", "bob", "on", ">pb", "~b*", "+get", "tenant=team-b") == b"OK"
        assert admin.call("ACL", "SAVE") == b"OK"
        saved = users_file.read_text()
        assert saved.encode().splitlines() == admin.call("ACL", "LIST")
        assert "root" not in saved and users_file.stat().st_mode & 0o777 == 0o600
        with child.client() as bob:
            assert bob.call("AUTH", "bob", "pb") == b"OK"
            users_file.write_text(saved + "user carol on +nosuch\n")
            refused = admin.refused("ACL", "LOAD")
            assert b":5: " in refused and b"no change" in refused
            assert admin.call("ACL", "USERS") == [b"admin", b"alice", b"bob", b"default"]
            users_file.write_text("".join(line for line in saved.splitlines(True) if "bob" not in line))
            assert admin.call("ACL", "LOAD") == b"OK"
            assert admin.call("ACL", "USERS") == [b"admin", b"alice", b"default"]
            assert bob.receive_to_end() == b""
        users_file.parent.chmod(0o755)
        users_file.unlink()
        users_file.mkdir()
        assert admin.call("ACL", "SAVE").startswith(b"ERR There was an error")
    assert [path.name for path in users_file.parent.iterdir()] == ["users.acl"]


def test_too_many_attempts_are_refused_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers parallel attempts one after the other, and refuses those with a too long wait."""
    monkeypatch.setattr("storage_kv.access.authentication_throttle._WAIT_MAX_S", 0.5)
    with Served(password="right") as served:
        clients, began_s = [served.client() for _ in range(20)], time.monotonic()
        for client in clients:
            client.send("AUTH", "wrong")
        answers = [client.receive() for client in clients]
        refused = [answer for answer in answers if b"too many failed" in answer]
        assert refused and len(refused) < len(answers)
        assert time.monotonic() - began_s > 0.5, "the others must wait"
        wait_for(lambda: served.client().call("AUTH", "right") == b"OK")  # the server continues to serve


def test_acl_save_and_load_need_a_users_file(shared_server: Child) -> None:
    with Client(shared_server.port) as client:
        for command in ("SAVE", "LOAD"):
            assert client.call("ACL", command).startswith(b"ERR this server has no users file")


def test_a_users_file_with_unknown_redis_commands_is_accepted_and_logged_once(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    file.write_text(
        "user default on nopass ~* &* +@all -eval -script|load +command|getkeysandflags\n"
        "user alice on >pw ~a:* -@all +get +lpush +xgroup|create -@list +HSET\n"
        "user bob on >pw ~b:* +@read -keys +lpush\n"
    )
    child = start("--users-file", str(file))
    with child.client() as client:
        assert client.call("AUTH", "alice", "pw") == b"OK"
        assert client.call("GET", "a:1") is None
        assert client.call("LPUSH", "a:1", "x") == ErrorReply(
            b"ERR unknown command 'LPUSH', with args beginning with: 'a:1' 'x' "
        )
        lines = [line for line in child.log if "users_file_names_commands_of_redis" in line]
        assert len(lines) == 1 and "eval hset lpush script|load xgroup|create" in lines[0]
        client.call("RESET")
        file.write_text(file.read_text() + "user carol on +lpushh\n")
        refused = client.refused("ACL", "LOAD")
        assert b"+lpushh" in refused and b"Unknown command" in refused
