"""The description of a command: flags, keys, ACL categories, and the reply of COMMAND."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

from shadowserve.resp import Map, SetReply, SimpleString, Value
from storage_kv.access.rules import CATEGORIES
from storage_kv.commands._arguments import quote
from storage_kv.node import Node
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session

Handler: TypeAlias = Callable[[Node, Session, list[Argument]], Reply]

_GROUP_CATEGORIES: Final = {
    "string": ("string",),
    "generic": ("keyspace",),
    "connection": ("connection",),
    "server": (),
    "transactions": ("transaction",),
}

_VARIABLE: Final = "variable_flags"
"""Key flag of SET, whose options change what it does to its key."""

_KEY_NOTES: Final = {
    "getex": b"RW and UPDATE because it changes the TTL",
    "set": b"RW and ACCESS due to the optional `GET` argument",
}


@dataclass(eq=False)
class Command:
    """A command or a subcommand. Positions count the command's name as 0.

    Attributes:
        name: Lower case.
        arity: Number of arguments, names included; -n means n or more.
        flags: Flags in Redis' words; ``no_auth`` allows unauthenticated clients.
        handler: Executes it.
        since: Version of Redis, or of ShadowServe for its own commands.
        group: Group in Redis' words.
        summary: One sentence.
        keys: Position of the first key, of the last one (negative from the end), step; zeros for none.
        values: Positions of values, likewise; only values may be large.
        key_flags: Accesses to its keys, in Redis' words and order. A test for existence is no access.
        categories: ACL categories beside those that follow from the flags; None for those of the group.
        tips: Hints for cluster clients, in Redis' words.
        parent: Name of the command that a subcommand belongs to.
        access: Access to its keys for ACLs: letters of ``RW``.
        lends: Its reply may hold stored values.
    """

    name: str
    arity: int
    flags: str
    handler: Handler
    since: str
    group: str
    summary: str
    keys: tuple[int, int, int] = (0, 0, 0)
    values: tuple[int, int, int] = (0, 0, 0)
    key_flags: str = ""
    categories: Collection[str] | None = None
    tips: str = ""
    parent: str = ""
    subcommands: Sequence["Command"] = ()
    full_name: str = field(init=False)
    open_to_all: bool = field(init=False)
    is_audited: bool = field(init=False)
    access: str = field(init=False)
    lends: bool = field(init=False)

    def __post_init__(self) -> None:
        self.full_name = f"{self.parent}|{self.name}" if self.parent else self.name
        flags = self.flags.split()
        self.open_to_all = "no_auth" in flags
        self.categories = tuple(self._all_categories(flags))
        self.access = _access(self.key_flags)
        self.lends = self.group == "string" and "R" in self.access
        flushes = "write" in flags and "dangerous" in self.categories
        self.is_audited = "admin" in flags or flushes

    def _all_categories(self, flags: Sequence[str]) -> Iterator[str]:
        """Yield the ACL categories in Redis' order."""
        found = set(_GROUP_CATEGORIES[self.group] if self.categories is None else self.categories)
        found |= {"read"} if "readonly" in flags else set()
        found |= {"write"} if "write" in flags else set()
        found |= {"admin", "dangerous"} if "admin" in flags else set()
        found.add("fast" if "fast" in flags else "slow")
        return (category for category in CATEGORIES if category in found)

    def check_arity(self, arguments: Sequence[Argument]) -> None:
        if len(arguments) != self.arity and (self.arity > 0 or len(arguments) < -self.arity):
            raise CommandError(f"ERR wrong number of arguments for '{self.full_name}' command")

    def keys_of(self, arguments: Sequence[Argument]) -> Sequence[Argument]:
        first, last, step = self.keys
        if not first:
            return ()
        return arguments[first : last + 1 if last >= 0 else len(arguments) + last + 1 : step]

    def takes_value(self, position: int) -> bool:
        """Return True if the argument at a position is a value."""
        first, last, step = self.values
        return bool(first) and first <= position <= (last if last >= 0 else position) and not (position - first) % step

    def flags_of_keys(self, arguments: Sequence[Argument]) -> str:
        """Return the key flags of the command with these arguments, in Redis' words."""
        if not self.key_flags.endswith(_VARIABLE):
            return self.key_flags
        returns_old = any(bytes(option[:4]).upper() == b"GET" for option in arguments[3:])
        return "RW access update" if returns_old else "OW update"

    def access_of(self, arguments: Sequence[Argument]) -> str:
        """Return the access to its keys with these arguments: letters of ``RW``."""
        return _access(self.flags_of_keys(arguments)) if self.key_flags.endswith(_VARIABLE) else self.access

    def describe(self) -> Value:
        """Return the ten elements of COMMAND INFO, as since Redis 7."""
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
        first, last, step = self.keys
        # Redis counts the last key's position from the first key's.
        key_range: list[Value] = [b"lastkey", last if last < 0 else last - first, b"keystep", step, b"limit", 0]
        notes: list[Value] = [b"notes", _KEY_NOTES[self.name]] if self.name in _KEY_NOTES else []
        return Map([
            *notes,
            *(b"flags", _words(self.key_flags)),
            *(b"begin_search", Map([b"type", b"index", b"spec", Map([b"index", first])])),
            *(b"find_keys", Map([b"type", b"range", b"spec", Map(key_range)])),
        ])  # fmt: skip

    def document(self) -> Value:
        """Return the map of COMMAND DOCS."""
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


class CommandTable:
    """All commands. ``_table.py`` fills it.

    Attributes:
        commands: The commands without subcommands, in order.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def add(self, *commands: Command) -> None:
        self.commands += commands

    @cached_property
    def by_full_name(self) -> dict[str, Command]:
        """Commands and subcommands by full name: ``client|list``."""
        return {command.full_name: command for parent in self.commands for command in (parent, *parent.subcommands)}

    @cached_property
    def _by_name(self) -> dict[bytes, Command]:
        return {command.name.encode(): command for command in self.commands}

    @cached_property
    def fast(self) -> dict[bytes, Command]:
        """Commands without subcommands by their names in lower and in upper case, so that most need no conversion."""
        names = {name: command for name, command in self._by_name.items() if not command.subcommands}
        return names | {name.upper(): command for name, command in names.items()}

    def find(self, name: Argument) -> Command | None:
        """Return the command of a name in any case; not of a subcommand."""
        return self.fast.get(bytes(name[:64])) or self._by_name.get(bytes(name[:64]).lower())

    def find_full_name(self, name: bytes) -> Command | None:
        """Return the command of a name such as ``get`` or ``client|list``, in any case."""
        return self.by_full_name.get(name.lower().decode("latin-1"))

    def look_up(self, arguments: list[Argument]) -> Command:
        """Return the command or subcommand that arguments begin with; raise CommandError if there is none."""
        command = self._by_name.get(bytes(arguments[0][:64]).lower())
        if command is None:
            shown = ""
            for argument in arguments[1:]:
                if len(shown) >= 128:
                    break
                shown += f"'{quote(argument, 128 - len(shown))}' "
            raise CommandError(f"ERR unknown command '{quote(arguments[0], 128)}', with args beginning with: {shown}")
        if not command.subcommands or len(arguments) == 1:
            return command
        subcommand = self.find_full_name(b"%b|%b" % (command.name.encode(), bytes(arguments[1][:64])))
        if subcommand is None:
            raise CommandError(f"ERR unknown subcommand '{quote(arguments[1], 128)}'. Try {command.name.upper()} HELP.")
        return subcommand


TABLE: Final = CommandTable()
