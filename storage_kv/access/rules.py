"""A user and its rules: Redis' ACL rules, and ``tenant=NAME``.

Rules are applied in order; for each command the last matching one decides. They are kept as given, as Redis does since
7.2. Selectors, ``(...)``, are not supported.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from storage_kv.config import is_tenant_name
from storage_kv.glob import Glob

CATEGORIES: Final = (
    *("keyspace", "read", "write", "set", "sortedset", "list", "hash", "string", "bitmap", "hyperloglog", "geo"),
    *("stream", "pubsub", "admin", "fast", "slow", "blocking", "dangerous", "connection", "transaction", "scripting"),
)
"""ACL categories of Redis 7.0, in its order; some have no command here."""

_HASH: Final = re.compile(rb"[0-9a-f]{64}")
_PATTERN: Final = re.compile(rb"%([RW]+)~", re.IGNORECASE)

_SPACE: Final = re.compile(rb"[\s\0]")

_SYNTAX: Final = "Syntax error"
_UNKNOWN: Final = "Unknown command or category name in ACL"
_AFTER_ALL_KEYS: Final = (
    "Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does not have any effect. Try "
    "'resetkeys' to start with an empty list of patterns"
)
_AFTER_ALL_CHANNELS: Final = (
    "Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and does not have any effect. Try "
    "'resetchannels' to start with an empty list of channels"
)
_NO_SUCH_PASSWORD: Final = "The password you are trying to remove from the user does not exist"
_BAD_HASH: Final = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"
_FIRST_ARGUMENT: Final = "Allowing first-arg of a subcommand is not supported"
_NO_SELECTORS: Final = "Selectors are not supported by this server: give the user one set of rules"
_BAD_TENANT: Final = "The name of a tenant must be 1 to 128 visible ASCII characters"

_REDIS_NAMES: Final = """
append asking bgrewriteaof bgsave bitcount bitfield bitfield_ro bitop bitpos blmove blmpop blpop brpop brpoplpush
bzmpop bzpopmax bzpopmin cluster copy debug decr decrby dump eval eval_ro evalsha evalsha_ro failover fcall fcall_ro
function geoadd geodist geohash geopos georadius georadius_ro georadiusbymember georadiusbymember_ro geosearch
geosearchstore getbit hdel hexists hget hgetall hincrby hincrbyfloat hkeys hlen hmget hmset hrandfield hscan hset
hsetnx hstrlen hvals incr incrby incrbyfloat lastsave latency lcs lindex linsert llen lmove lmpop lolwut lpop lpos
lpush lpushx lrange lrem lset ltrim memory migrate module monitor move object pfadd pfcount pfdebug pfmerge pfselftest
psubscribe psync publish pubsub punsubscribe randomkey readonly readwrite rename renamenx replconf replicaof restore
restore-asking role rpop rpoplpush rpush rpushx sadd save scard script sdiff sdiffstore setbit setrange shutdown
sinter sintercard sinterstore sismember slaveof slowlog smembers smismember smove sort sort_ro spop spublish
srandmember srem sscan ssubscribe subscribe sunion sunionstore sunsubscribe swapdb sync time unsubscribe wait xack
xadd xautoclaim xclaim xdel xgroup xinfo xlen xpending xrange xread xreadgroup xrevrange xsetid xtrim zadd zcard
zcount zdiff zdiffstore zincrby zinter zintercard zinterstore zlexcount zmpop zmscore zpopmax zpopmin zrandmember
zrange zrangebylex zrangebyscore zrangestore zrank zrem zremrangebylex zremrangebyrank zremrangebyscore zrevrange
zrevrangebylex zrevrangebyscore zrevrank zscan zscore zunion zunionstore

commandlog delifeq hexpire hexpireat hexpiretime hgetdel hgetex hpersist hpexpire hpexpireat hpexpiretime hpttl hsetex
httl waitaof
"""

_REDIS_SUBCOMMANDS: Final = {
    "client": "caching getredir pause tracking trackinginfo unblock unpause capa import-source no-touch",
    "command": "getkeysandflags",
    "cluster": (
        "addslots addslotsrange bumpepoch count-failure-reports countkeysinslot delslots delslotsrange "
        "failover flushslots forget getkeysinslot help info keyslot links meet myid nodes replicas replicate "
        "reset saveconfig set-config-epoch setslot shards slaves slots myshardid slot-stats"
    ),
    "function": "delete dump flush help kill list load restore stats",
    "latency": "doctor graph help histogram history latest reset",
    "memory": "doctor help malloc-stats purge stats usage",
    "module": "help list load loadex unload",
    "object": "encoding freq help idletime refcount",
    "pubsub": "channels help numpat numsub shardchannels shardnumsub",
    "script": "debug exists flush help kill load show",
    "slowlog": "get help len reset",
    "xgroup": "create createconsumer delconsumer destroy help setid",
    "xinfo": "consumers groups help stream",
    "commandlog": "get help len reset",
}

_ELSEWHERE: Final = frozenset(_REDIS_NAMES.split()) | {
    f"{command}|{subcommand}" for command, text in _REDIS_SUBCOMMANDS.items() for subcommand in text.split()
}
"""Full names of Redis' commands that do not exist here; rules may name them, so that Redis' users files can be read.

Source: COMMAND LIST of Redis 7.0, and the additions of Redis 7.2 to 8.0 and Valkey 8.
"""


class RuleError(ValueError):
    """An invalid rule; the message is that of Redis."""


class Described(Protocol):
    """The part of a command that rules decide by; no rule can forbid one that is open to all."""

    full_name: str
    parent: str
    categories: tuple[str, ...]
    open_to_all: bool


def hash_password(password: bytes) -> bytes:
    """Return the SHA-256 of a password in lower-case hexadecimal."""
    return hashlib.sha256(password).hexdigest().encode()


_CHANGING_USERS: Final = frozenset({"acl|setuser", "acl", "@admin", "@slow", "@dangerous"})


@dataclass(slots=True)
class _KeyPattern:
    """A pattern of keys that may be read, written or both."""

    text: bytes
    access: frozenset[str]
    glob: Glob

    def describe(self) -> bytes:
        if len(self.access) == 2:
            return b"~" + self.text
        return b"%%%b~%b" % ("".join(self.access).encode(), self.text)


@dataclass(slots=True)
class User:
    """A user. It is changed in place so that its sessions follow; apply changes that may fail to a copy()."""

    name: bytes
    enabled: bool = False
    no_password: bool = False  # any password is accepted
    passwords: list[bytes] = field(default_factory=list)  # SHA-256 in hexadecimal, in the order given
    tenant: str = ""  # name of its tenant; empty for the default tenant
    unrestricted: bool = False  # it may do everything, so no checks are needed
    _sanitize: str = ""
    _all_keys: bool = False
    _patterns: list[_KeyPattern] = field(default_factory=list)
    _all_channels: bool = False
    _channels: list[bytes] = field(default_factory=list)
    _all_commands: bool = False
    _rules: list[tuple[bool, str]] = field(default_factory=list)
    _decided: dict[str, bool] = field(default_factory=dict)

    # ---- Permissions

    def may_run(self, command: Described) -> bool:
        """Return True if the rules allow a command, with any keys."""
        if command.open_to_all:
            return True
        known = self._decided.get(command.full_name)
        if known is None:
            names = {command.full_name, command.parent, *(f"@{category}" for category in command.categories)}
            known = self._decided[command.full_name] = self._decide(names)
        return known

    def _decide(self, names: Collection[str]) -> bool:
        for allows, rule in reversed(self._rules):
            if rule in names:
                return allows
        return self._all_commands

    def may_use(self, key: bytes, access: Collection[str]) -> bool:
        """Return True if the user has an access, letters of ``RW``, to a key."""
        if self._all_keys:
            return True
        return any(pattern.access.issuperset(access) and pattern.glob.matches(key) for pattern in self._patterns)

    @property
    def reads_every_key(self) -> bool:
        return self._all_keys or any(each.text == b"*" and "R" in each.access for each in self._patterns)

    @property
    def is_operator(self) -> bool:
        """True if it may change users, and so can do everything: an administrator of all tenants."""
        return self.unrestricted or self._decide(_CHANGING_USERS)

    def names_beyond(self, commands: Collection[str]) -> set[str]:
        """Return the commands in its rules that are not among ``commands``: they exist only in Redis."""
        return {rule for _, rule in self._rules if not rule.startswith("@") and rule not in commands}

    # ---- Description

    @property
    def flags(self) -> list[str]:
        found = ["on" if self.enabled else "off"]
        found += ["nopass"] if self.no_password else []
        return [*found, self._sanitize] if self._sanitize else found

    @property
    def keys_text(self) -> bytes:
        return b"~*" if self._all_keys else b" ".join(pattern.describe() for pattern in self._patterns)

    @property
    def channels_text(self) -> bytes:
        """The patterns of channels, which a file of Redis may have; there are no channels here."""
        return b"&*" if self._all_channels else b" ".join(b"&" + channel for channel in self._channels)

    @property
    def commands_text(self) -> bytes:
        rules = [f"{'+' if allows else '-'}{rule}" for allows, rule in self._rules]
        return " ".join(["+@all" if self._all_commands else "-@all", *rules]).encode()

    def describe(self) -> bytes:
        parts = [b"user", self.name, *(flag.encode() for flag in self.flags)]
        parts += [b"#" + password for password in self.passwords]
        parts += [self.keys_text] if self.keys_text else []
        parts += [] if self._all_channels else [b"resetchannels"]
        parts += [self.channels_text] if self.channels_text else []
        parts.append(self.commands_text)
        parts += [b"tenant=" + self.tenant.encode()] if self.tenant else []
        return b" ".join(parts)

    # ---- Changes

    def copy(self) -> "User":
        other = User(self.name)
        other.become(self)
        return other

    def become(self, other: "User") -> None:
        for slot in self.__slots__:
            if slot != "name":
                setattr(self, slot, getattr(other, slot))
        self.passwords, self._patterns = list(other.passwords), [*other._patterns]
        self._channels, self._rules = list(other._channels), list(other._rules)
        self._decided = {}

    def apply(self, rule: bytes, commands: Mapping[str, Described]) -> None:
        """Apply one rule, or raise RuleError and change nothing; ``commands`` are all commands by full name."""
        word = rule.lower()
        simple = _SIMPLE.get(word)
        if simple is not None:
            for slot, value in simple.items():
                setattr(self, slot, value.copy() if isinstance(value, list) else value)
        elif rule[:1] in (b">", b"#", b"<", b"!"):
            self._apply_password(rule)
        elif rule[:1] in (b"~", b"%"):
            self._apply_pattern(rule)
        elif rule[:1] == b"&":
            self._apply_channel(rule[1:])
        elif rule[:1] in (b"+", b"-") and len(rule) > 1:
            self._apply_command(word.decode("utf-8", "replace"), commands)
        elif word.startswith(b"tenant="):
            self._apply_tenant(rule[len(b"tenant=") :])
        elif rule[:1] == b"(":
            raise RuleError(_NO_SELECTORS)
        elif rule and word != b"clearselectors":
            raise RuleError(_SYNTAX)
        self._decided = {}
        self.unrestricted = self._all_keys and self._all_commands and not self._rules

    def _apply_password(self, rule: bytes) -> None:
        given = rule[1:]
        if rule[:1] in (b"#", b"!") and not _HASH.fullmatch(given):
            raise RuleError(_BAD_HASH)
        hashed = given if rule[:1] in (b"#", b"!") else hash_password(given)
        if rule[:1] in (b">", b"#"):
            self.passwords += [hashed] if hashed not in self.passwords else []
            self.no_password = False
        elif hashed in self.passwords:
            self.passwords.remove(hashed)
        else:
            raise RuleError(_NO_SUCH_PASSWORD)

    def _apply_pattern(self, rule: bytes) -> None:
        if self._all_keys:
            raise RuleError(_AFTER_ALL_KEYS)
        if rule[:1] == b"~":
            access, text = frozenset("RW"), rule[1:]
        else:
            found = _PATTERN.match(rule)
            if found is None:
                raise RuleError(_SYNTAX)
            access, text = frozenset(found[1].decode().upper()), rule[found.end() :]
        if _has_space(text):
            raise RuleError(_SYNTAX)
        for number, pattern in enumerate(self._patterns):
            if pattern.text == text:
                self._patterns[number] = _KeyPattern(text, pattern.access | access, pattern.glob)
                return
        self._patterns.append(_KeyPattern(text, access, Glob(text)))

    def _apply_channel(self, text: bytes) -> None:
        if self._all_channels:
            raise RuleError(_AFTER_ALL_CHANNELS)
        if _has_space(text):
            raise RuleError(_SYNTAX)
        self._channels += [text] if text not in self._channels else []

    def _apply_command(self, word: str, commands: Mapping[str, Described]) -> None:
        allows, rule = word[0] == "+", word[1:]
        if rule.count("|") > 1:
            raise RuleError(_FIRST_ARGUMENT)
        is_known = rule[1:] in CATEGORIES if rule.startswith("@") else rule in commands or rule in _ELSEWHERE
        if not is_known:
            raise RuleError(_UNKNOWN)
        # Earlier rules for the same command or its subcommands have no effect any more.
        self._rules = [
            (allowed, other) for allowed, other in self._rules if other != rule and not other.startswith(f"{rule}|")
        ]
        self._rules.append((allows, rule))

    def _apply_tenant(self, name: bytes) -> None:
        text = name.decode("latin-1")
        if text and not is_tenant_name(text):
            raise RuleError(_BAD_TENANT)
        self.tenant = text


def _has_space(text: bytes) -> bool:
    return _SPACE.search(text) is not None


def _simple_rules() -> dict[bytes, Mapping[str, object]]:
    no_passwords: dict[str, object] = {"no_password": False, "passwords": []}
    no_keys: dict[str, object] = {"_all_keys": False, "_patterns": []}
    no_channels: dict[str, object] = {"_all_channels": False, "_channels": []}
    no_commands: dict[str, object] = {"_all_commands": False, "_rules": []}
    all_keys: dict[str, object] = {"_all_keys": True, "_patterns": []}
    all_channels: dict[str, object] = {"_all_channels": True, "_channels": []}
    all_commands: dict[str, object] = {"_all_commands": True, "_rules": []}
    reset = no_passwords | no_keys | no_channels | no_commands
    return {
        b"on": {"enabled": True},
        b"off": {"enabled": False},
        b"nopass": {"no_password": True, "passwords": []},
        b"resetpass": no_passwords,
        b"allkeys": all_keys,
        b"~*": all_keys,
        b"resetkeys": no_keys,
        b"allchannels": all_channels,
        b"&*": all_channels,
        b"resetchannels": no_channels,
        b"allcommands": all_commands,
        b"+@all": all_commands,
        b"nocommands": no_commands,
        b"-@all": no_commands,
        b"sanitize-payload": {"_sanitize": "sanitize-payload"},
        b"skip-sanitize-payload": {"_sanitize": "skip-sanitize-payload"},
        b"reset": reset | {"enabled": False, "_sanitize": "sanitize-payload", "tenant": ""},
    }


_SIMPLE: Final = _simple_rules()


def check_name(name: bytes) -> None:
    """Raise RuleError for an invalid name of a user."""
    if not name or _has_space(name):
        raise RuleError("Usernames can't contain spaces or null characters")


def parse_line(line: bytes) -> tuple[bytes, Sequence[bytes]] | None:
    """Return the name and the rules of a line of a users file; None for an empty line or a comment."""
    words = line.split()
    if not words or words[0].startswith(b"#"):
        return None
    if words[0] != b"user" or len(words) < 2:
        raise RuleError("line should start with user keyword followed by the username")
    check_name(words[1])
    return words[1], words[2:]
