"""Executes commands: look up, check, call.

Each command is a row of the table in ``_table.py``. Its handler raises :class:`~storage_kv.reply.CommandError` to
answer an error; it has changed nothing then.
"""

from functools import partial
from typing import Any, Final

from shadowserve.pool.volume.tickets import BusyError
from shadowserve.resp import encode_error
from storage_kv.commands import _transactions
from storage_kv.commands._command import Command
from storage_kv.commands._connection import describe_client
from storage_kv.commands._table import TABLE
from storage_kv.counters import SAMPLE_EVERY
from storage_kv.node import Node
from storage_kv.reply import CommandError, Continuation, Reply
from storage_kv.session import Argument, Session

BY_FULL_NAME: Final = TABLE.by_full_name
"""Commands and subcommands by full name: ``client|list``."""

_FAST: Final = TABLE.fast

find = TABLE.find


def execute(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """Execute one command and return its reply; an error is a reply too.

    Raises:
        BusyError: Nothing has been done; the command must be executed again later.
    """
    counters = node.counters
    counters.commands += 1
    try:
        command = _FAST.get(bytes(arguments[0])) or TABLE.look_up(arguments)
    except CommandError as error:
        counters.unknown_commands += 1
        if session.transaction is not None:
            session.transaction.fail()
        return _error_reply(node, error)
    statistics = counters.by_command.get(command.full_name) or counters.of(command.full_name)
    try:
        arity = command.arity
        if len(arguments) != arity and (arity > 0 or len(arguments) < -arity):
            command.check_arity(arguments)
        if not session.authenticated and not command.open_to_all:
            raise CommandError("NOAUTH Authentication required.")
        if not session.user.unrestricted:
            _check_permission(node, session, command, arguments)
        if session.transaction is not None and command.name not in _transactions.EXECUTED_AT_ONCE:
            return _transactions.queue(node, session, arguments)
        if command.is_audited:
            each = "admin" in command.flags
            node.audit.write("command", session, outcome="allowed", each=each, command=command.full_name)
    except CommandError as error:
        statistics.rejected += 1
        return _error_reply(node, _transactions.rejected(node, session, command, error))
    session.info.last_command = command.full_name
    calls = statistics.calls = statistics.calls + 1
    try:
        if calls % SAMPLE_EVERY == 1:
            reply = statistics.timed(command.handler, node, session, arguments)
        else:
            reply = command.handler(node, session, arguments)
    except CommandError as error:
        statistics.failed += 1
        return _error_reply(node, error)
    except BusyError:  # it is executed again
        counters.commands -= 1
        statistics.calls -= 1
        counters.busy_refusals += 1
        raise
    if node.watchers or isinstance(reply, Continuation):
        return _followed(node, session, command, arguments, reply)
    return reply


def _followed(node: Node, session: Session, command: Command, arguments: list[Argument], reply: Reply) -> Reply:
    """Fail transactions that watch a changed key; prepare the rest of a reply that is made in steps."""
    if node.watchers:
        _transactions.fail_watchers(node, session, command, arguments, reply)
    if isinstance(reply, Continuation):
        reply.rest = partial(_continue, node, session, command, arguments, reply.rest)
    return reply


def _check_permission(node: Node, session: Session, command: Command, arguments: list[Argument]) -> None:
    """Raise CommandError for a denial. No key is looked up, so the answer does not depend on its existence."""
    denial = command.denial_of(session.user, arguments)
    if denial is None:
        return
    reason, what = denial
    node.deny(session, reason, what, describe_client(session).strip())
    node.audit.write("denied", session, outcome="denied", command=command.full_name, reason=reason)
    if reason == "command":
        node.counters.commands_denied += 1
        raise CommandError(f"NOPERM this user has no permissions to run the '{command.full_name}' command")
    node.counters.keys_denied += 1
    raise CommandError("NOPERM this user has no permissions to access one of the keys used as arguments")


def _continue(
    node: Node, session: Session, command: Command, arguments: list[Argument], rest: Any, result: Any
) -> Reply:
    try:
        reply: Reply = rest(result)
    except CommandError as error:
        node.counters.of(command.full_name).failed += 1
        return _error_reply(node, error)
    return _followed(node, session, command, arguments, reply)


def _error_reply(node: Node, error: CommandError) -> bytes:
    node.counters.command_errors += 1
    return encode_error(str(error))
