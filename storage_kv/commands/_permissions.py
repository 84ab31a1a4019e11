"""Whether a user may execute a command, and what happens where it may not."""

from collections.abc import Sequence
from typing import Final

from storage_kv.access.rules import User
from storage_kv.commands._connection import describe_client
from storage_kv.commands._table import Command
from storage_kv.node import CommandError, Node
from storage_kv.session import Argument, Session

_SHOWN_BYTES_MAX: Final = 256
"""Of a key that is denied: ACL LOG keeps it."""


def forbidden(user: User, command: Command, arguments: Sequence[Argument]) -> tuple[str, bytes] | None:
    """Return what a user may not do of a command: ``("command", name)``, ``("key", key)``, or None."""
    if not user.may_run(command):
        return "command", command.full_name.encode()
    access = command.access_of(arguments)
    for key in command.keys_of(arguments):
        if not user.may_use(bytes(key), access):
            return "key", bytes(key[:_SHOWN_BYTES_MAX])
    return None


def check(node: Node, session: Session, command: Command, arguments: Sequence[Argument]) -> None:
    """Raise CommandError if the session's user may not execute a command.

    Keys are checked before any of them is looked up, so that the answer is the same whether they exist.
    """
    found = forbidden(session.user, command, arguments)
    if found is None:
        return
    reason, what = found
    node.deny(session, reason, what, describe_client(session).strip())
    node.audit.write("denied", session, outcome="denied", command=command.full_name, reason=reason)
    if reason == "command":
        node.counters.denied_commands += 1
        raise CommandError(f"NOPERM this user has no permissions to run the '{command.full_name}' command")
    node.counters.denied_keys += 1
    raise CommandError("NOPERM this user has no permissions to access one of the keys used as arguments")
