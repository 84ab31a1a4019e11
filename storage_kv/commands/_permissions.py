"""Checks the permission of a user to execute a command."""

from collections.abc import Sequence
from typing import Final

from storage_kv.access.rules import User
from storage_kv.commands._command import Command
from storage_kv.commands._connection import describe_client
from storage_kv.node import Node
from storage_kv.reply import CommandError
from storage_kv.session import Argument, Session

_SHOWN_BYTES_MAX: Final = 256
"""Limit of a denied key's bytes in ACL LOG."""


def find_denial(user: User, command: Command, arguments: Sequence[Argument]) -> tuple[str, bytes] | None:
    """Return ``("command", name)`` or ``("key", key)`` if a user may not execute a command; otherwise None."""
    if not user.may_run(command):
        return "command", command.full_name.encode()
    access = command.access_of(arguments)
    for key in command.keys_of(arguments):
        if not user.may_use(bytes(key), access):
            return "key", bytes(key[:_SHOWN_BYTES_MAX])
    return None


def check(node: Node, session: Session, command: Command, arguments: Sequence[Argument]) -> None:
    """Raise CommandError if the session's user may not execute a command.

    Keys are checked before any of them is looked up, so that the answer does not depend on their existence.
    """
    denial = find_denial(session.user, command, arguments)
    if denial is None:
        return
    reason, what = denial
    node.deny(session, reason, what, describe_client(session).strip())
    node.audit.write("denied", session, outcome="denied", command=command.full_name, reason=reason)
    if reason == "command":
        node.counters.denied_commands += 1
        raise CommandError(f"NOPERM this user has no permissions to run the '{command.full_name}' command")
    node.counters.denied_keys += 1
    raise CommandError("NOPERM this user has no permissions to access one of the keys used as arguments")
