"""The shape of a row in the command table, and what COMMAND tells of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shadowserve.resp import Map, SetReply, SimpleString, Value
from storage_kv.node import Argument, Node, Reply, Session

__all__ = ["Command", "Handler"]

Handler: TypeAlias = Callable[[Node, Session, list[Argument]], Reply]

_GROUPS: Final = {"string": "@string", "generic": "@keyspace", "connection": "@connection", "server": ""}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command, or one subcommand of one.

    Attributes:
        name: lower case.
        arity: number of arguments, the name included (for a subcommand, its command's too); -n means n or more.
        flags: as Redis names them; ``no_auth`` is what unauthenticated clients may call.
        keys: first key's position, last key's (negative from the end), step; zeros for none.
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
    subcommands: Sequence["Command"] = ()
    parent: str = ""
    full_name: str = field(init=False)
    open_to_all: bool = field(init=False)

    def __post_init__(self) -> None:
        """Derive the name that errors and COMMAND use, and whether clients need not have authenticated."""
        object.__setattr__(self, "full_name", f"{self.parent}|{self.name}" if self.parent else self.name)
        object.__setattr__(self, "open_to_all", "no_auth" in self.flags.split())

    def describe(self) -> Value:
        """Return what COMMAND INFO says: ten elements, as since Redis 7."""
        flags = self.flags.split()
        categories = [_GROUPS[self.group]] if _GROUPS[self.group] else []
        categories += ["@read"] if "readonly" in flags else []
        categories += ["@write"] if "write" in flags else []
        categories += ["@admin", "@dangerous"] if "admin" in flags else []
        categories += ["@fast"] if "fast" in flags else ["@slow"]
        return [
            self.full_name.encode(),
            self.arity,
            SetReply([SimpleString(flag.encode()) for flag in flags]),
            *self.keys,
            SetReply([SimpleString(category.encode()) for category in categories]),
            [],
            [],
            [subcommand.describe() for subcommand in self.subcommands],
        ]

    def document(self) -> Value:
        """Return what COMMAND DOCS says."""
        fields: list[Value] = [b"summary", self.summary.encode(), b"since", self.since.encode()]
        fields += [b"group", self.group.encode()]
        if self.subcommands:
            nested: list[Value] = []
            for subcommand in self.subcommands:
                nested += [subcommand.full_name.encode(), subcommand.document()]
            fields += [b"subcommands", Map(nested)]
        return Map(fields)
