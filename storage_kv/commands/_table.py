"""The shape of a row in the command table, and what COMMAND tells of it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shadowserve.resp import Map, SetReply, SimpleString, Value
from storage_kv.access.rules import CATEGORIES
from storage_kv.node import Node, Reply
from storage_kv.session import Argument, Session

Handler: TypeAlias = Callable[[Node, Session, list[Argument]], Reply]

_GROUPS: Final = {
    "string": ("string",),
    "generic": ("keyspace",),
    "connection": ("connection",),
    "server": (),
    "transactions": ("transaction",),
}


_VARIABLE: Final = "variable_flags"
"""Of a command, SET, that does more to its key with an option."""

_KEY_NOTES: Final = {
    "getex": b"RW and UPDATE because it changes the TTL",
    "set": b"RW and ACCESS due to the optional `GET` argument",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """One command, or one subcommand of one.

    Attributes:
        name: lower case.
        arity: number of arguments, the name included (for a subcommand, its command's too); -n means n or more.
        flags: as Redis names them; ``no_auth`` is what unauthenticated clients may call.
        categories: of ACLs, beside those that follow from the flags; None for that of the group.
        keys: first key's position, last key's (negative from the end), step; zeros for none.
        values: where its values are, likewise: these may be large, all other arguments not.
        key_flags: what it does to its keys, in Redis' words, in its order. Asking whether a key is there is no access.
        tips: for clients of clusters, as Redis names them.
        access: what that is for ACLs: of ``R`` and ``W``.
        lends: its reply may be stored values.
        since: version of Redis that brought it; of ShadowServe for ours.
    """

    name: str
    arity: int
    flags: str
    summary: str
    since: str
    group: str
    handler: Handler
    keys: tuple[int, int, int] = (0, 0, 0)
    values: tuple[int, int, int] = (0, 0, 0)
    key_flags: str = ""
    tips: str = ""
    subcommands: Sequence["Command"] = ()
    parent: str = ""
    categories: Collection[str] | None = None
    full_name: str = field(init=False)
    open_to_all: bool = field(init=False)
    is_audited: bool = field(init=False)
    access: str = field(init=False)
    lends: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_name", f"{self.parent}|{self.name}" if self.parent else self.name)
        flags = self.flags.split()
        object.__setattr__(self, "open_to_all", "no_auth" in flags)
        object.__setattr__(self, "categories", tuple(self._categories(flags)))
        object.__setattr__(self, "access", _access(self.key_flags))
        object.__setattr__(self, "lends", self.group == "string" and "R" in self.access)
        flushes = "write" in flags and "dangerous" in (self.categories or ())
        object.__setattr__(self, "is_audited", "admin" in flags or flushes)

    def _categories(self, flags: Sequence[str]) -> Iterator[str]:
        """Yield the categories of ACLs, in Redis' order."""
        found = set(_GROUPS[self.group] if self.categories is None else self.categories)
        found |= {"read"} if "readonly" in flags else set()
        found |= {"write"} if "write" in flags else set()
        found |= {"admin", "dangerous"} if "admin" in flags else set()
        found.add("fast" if "fast" in flags else "slow")
        return (category for category in CATEGORIES if category in found)

    def keys_of(self, arguments: Sequence[Argument]) -> Sequence[Argument]:
        first, last, step = self.keys
        if not first:
            return ()
        return arguments[first : last + 1 if last >= 0 else len(arguments) + last + 1 : step]

    def takes_value(self, position: int) -> bool:
        """Return whether the argument there is a value."""
        first, last, step = self.values
        return bool(first) and first <= position <= (last if last >= 0 else position) and not (position - first) % step

    def flags_of_keys(self, arguments: Sequence[Argument]) -> str:
        """Return what the command, with these arguments, does to its keys, in Redis' words."""
        if not self.key_flags.endswith(_VARIABLE):
            return self.key_flags
        returns_old = any(bytes(option[:4]).upper() == b"GET" for option in arguments[3:])
        return "RW access update" if returns_old else "OW update"

    def access_of(self, arguments: Sequence[Argument]) -> str:
        """Return what the command, with these arguments, does to its keys, of ``R`` and ``W``."""
        return _access(self.flags_of_keys(arguments)) if self.key_flags.endswith(_VARIABLE) else self.access

    def describe(self) -> Value:
        """Return what COMMAND INFO says: ten elements, as since Redis 7."""
        return [
            self.full_name.encode(),
            self.arity,
            _words(self.flags),
            *self.keys,
            SetReply([SimpleString(f"@{category}".encode()) for category in self.categories or ()]),
            SetReply([tip.encode() for tip in self.tips.split()]),
            SetReply([self._describe_keys()] if self.key_flags else []),
            SetReply([subcommand.describe() for subcommand in self.subcommands]),
        ]

    def _describe_keys(self) -> Value:
        """Return where the keys are among the arguments, and what is done to them."""
        first, last, step = self.keys
        # Of a range, Redis counts the last key's position from the first's.
        found: list[Value] = [b"lastkey", last if last < 0 else last - first, b"keystep", step, b"limit", 0]
        notes: list[Value] = [b"notes", _KEY_NOTES[self.name]] if self.name in _KEY_NOTES else []
        return Map([
            *notes,
            *(b"flags", _words(self.key_flags)),
            *(b"begin_search", Map([b"type", b"index", b"spec", Map([b"index", first])])),
            *(b"find_keys", Map([b"type", b"range", b"spec", Map(found)])),
        ])  # fmt: skip

    def document(self) -> Value:
        fields: list[Value] = [b"summary", self.summary.encode(), b"since", self.since.encode()]
        fields += [b"group", self.group.encode()]
        if self.subcommands:
            nested: list[Value] = []
            for subcommand in self.subcommands:
                nested += [subcommand.full_name.encode(), subcommand.document()]
            fields += [b"subcommands", Map(nested)]
        return Map(fields)


def _access(key_flags: str) -> str:
    words = set(key_flags.split())
    return ("R" if "access" in words else "") + ("W" if words & {"insert", "update", "delete"} else "")


def _words(text: str) -> SetReply:
    return SetReply([SimpleString(word.encode()) for word in text.split()])
