"""The description of a command: flags, keys, ACL categories, and the reply of COMMAND."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

from shadowserve.resp import Map, SetReply, SimpleString, Value
from storage_kv.access.rules import CATEGORIES, User
from storage_kv.commands._arguments import quote
from storage_kv.node import Node
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session

Handler: TypeAlias = Callable[[Node, Session, list[Argument]], Reply]
Positions: TypeAlias = tuple[int, int, int]
"""Positions of arguments: the first one, the last one (negative from the end), step."""

_GROUP_CATEGORIES: Final = {
    "string": ("string",),
    "generic": ("keyspace",),
    "connection": ("connection",),
    "server": (),
    "transactions": ("transaction",),
}
_DENIED_KEY_BYTES_MAX: Final = 256  # of a key in ACL LOG


@dataclass(eq=False)
class Command:
    """A command or a subcommand; :meth:`enter` completes it. Positions count the command's name as 0."""

    name: str
    arity: int  # number of arguments, names included; -n means n or more
    flags: str  # in Redis' words; ``no_auth`` allows unauthenticated clients
    handler: Handler
    since: str  # version of Redis, or of ShadowServe for its own commands
    summary: str
    keys: Positions = (0, 0, 0)  # zeros for none
    access: str = ""  # to keys, by letters: R reads, W writes, D deletes. A test for existence is no access
    values: Positions = (0, 0, 0)  # of values; only values may be large
    own_categories: tuple[str, ...] | None = None  # ACL categories beside those of the flags; None for the group's
    subcommands: Sequence["Command"] = ()
    group: str = field(init=False)  # in Redis' words
    parent: str = field(init=False)  # name of the command that a subcommand belongs to
    full_name: str = field(init=False)
    open_to_all: bool = field(init=False)
    categories: tuple[str, ...] = field(init=False)  # ACL categories in Redis' order
    lends: bool = field(init=False)  # its reply may hold stored values
    is_audited: bool = field(init=False)

    def enter(self, group: str, parent: str = "") -> None:
        """Enter a group, or a command of a group as its subcommand."""
        self.group, self.parent = group, parent
        self.full_name = f"{parent}|{self.name}" if parent else self.name
        flags = self.flags.split()
        self.open_to_all = "no_auth" in flags
        self.categories = tuple(self._all_categories(flags))
        self.lends = group == "string" and "R" in self.access
        self.is_audited = "admin" in flags or ("write" in flags and "dangerous" in self.categories)

    def _all_categories(self, flags: Sequence[str]) -> Iterator[str]:
        found = set(_GROUP_CATEGORIES[self.group] if self.own_categories is None else self.own_categories)
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

    def access_of(self, arguments: Sequence[Argument]) -> str:
        """Return the access with these arguments: SET reads only with the option GET."""
        if self.full_name == "set" and not any(bytes(option[:4]).upper() == b"GET" for option in arguments[3:]):
            return "W"
        return self.access

    def denial_of(self, user: User, arguments: Sequence[Argument]) -> tuple[str, bytes] | None:
        """Return ``("command", name)`` or ``("key", key)`` if a user may not execute it; otherwise None."""
        if not user.may_run(self):
            return "command", self.full_name.encode()
        access = self.access_of(arguments).replace("D", "W")
        for key in self.keys_of(arguments):
            if not user.may_use(bytes(key), access):
                return "key", bytes(key[:_DENIED_KEY_BYTES_MAX])
        return None

    def describe(self) -> Value:
        """Return the elements of COMMAND INFO. The hints for cluster clients are empty."""
        return [
            self.full_name.encode(),
            self.arity,
            _words(self.flags.split()),
            *self.keys,
            _words(f"@{category}" for category in self.categories),
            SetReply([]),
            SetReply([]),
            SetReply([subcommand.describe() for subcommand in self.subcommands]),
        ]

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


def _words(words: Iterable[str]) -> SetReply:
    return SetReply([SimpleString(word.encode()) for word in words])


class CommandTable:
    """All commands, without subcommands, in order. ``_table.py`` fills it."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

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
