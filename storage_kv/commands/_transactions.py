"""MULTI and EXEC: a client's commands are queued, then executed in order.

EXEC answers an array header. The connection then executes the queued commands as if the client had sent them again
before all later ones, so every limit on a client's execution, waiting and memory also limits its transactions. A
transaction that fits into one turn is atomic, unless the client does not read its replies or the store has no room. A
longer one releases the lock in between.
"""

from collections import deque
from typing import Final

from shadowserve.resp import encode_array_header
from storage_kv.commands._arguments import OK
from storage_kv.commands._command import Command
from storage_kv.node import Node
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session, Transaction

EXECUTED_AT_ONCE: Final = frozenset({"multi", "exec", "discard", "watch", "quit", "reset"})
"""Commands that a transaction does not queue, as in Redis."""

_QUEUED: Final = b"+QUEUED\r\n"
_WATCHED_KEYS_MAX: Final = 1_000
_WATCHED_BYTES_MAX: Final = 1 << 20
_NULL_ARRAY: Final = {2: b"*-1\r\n", 3: b"_\r\n"}
_NULLS: Final = (b"$-1\r\n", b"_\r\n")
_ZERO: Final = b":0\r\n"


def multi(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    if session.transaction is not None:
        raise CommandError("ERR MULTI calls can not be nested")
    session.transaction = Transaction()
    return OK


def queue(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """Queue a command for EXEC. A transaction has the size limits of a request."""
    transaction = session.transaction
    assert transaction is not None
    if transaction.failed:
        return _QUEUED
    config = node.config
    transaction.arguments += len(arguments)
    transaction.size_bytes += sum(map(len, arguments))
    if transaction.arguments > config.arguments_max or transaction.size_bytes > config.request_bytes_max:
        transaction.fail()
        raise CommandError(
            f"ERR transaction too large: at most {config.arguments_max} arguments of {config.request_bytes_max} bytes "
            "in all; send fewer commands, or send them without MULTI"
        )
    transaction.commands.append(arguments)
    return _QUEUED


def rejected(node: Node, session: Session, command: Command, error: CommandError) -> CommandError:
    """Fail the transaction because of a command that can be neither executed nor queued; return its error."""
    if command.name == "exec" and not command.parent:
        session.transaction = None
        node.unwatch(session)
        return CommandError(f"EXECABORT Transaction discarded because of: {str(error).removeprefix('ERR ')}")
    if session.transaction is not None:
        session.transaction.fail()
    return error


def discard(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    if session.transaction is None:
        raise CommandError("ERR DISCARD without MULTI")
    session.transaction = None
    node.unwatch(session)
    return OK


def exec_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXEC: the array header; the next commands' replies are its elements."""
    transaction, session.transaction = session.transaction, None
    if transaction is None:
        raise CommandError("ERR EXEC without MULTI")
    broken = session.watch.failed or any(
        (node.store.peek(key) is not None) is not existed for key, existed in session.watch.existed.items()
    )
    node.unwatch(session)
    if transaction.failed:
        raise CommandError("EXECABORT Transaction discarded because of previous errors.")
    if broken:
        return _NULL_ARRAY[session.protocol]
    session.executing, session.executing_bytes = deque(transaction.commands), transaction.held_bytes
    return encode_array_header(len(transaction.commands))


def watch(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """WATCH key [key ...]: EXEC executes nothing if one of them has changed."""
    if session.transaction is not None:
        raise CommandError("ERR WATCH inside MULTI is not allowed")
    keys = {session.qualify(key) for key in arguments[1:]}.union(session.watch.existed)
    if len(keys) > _WATCHED_KEYS_MAX or sum(len(key) for _, key in keys) > _WATCHED_BYTES_MAX:
        raise CommandError(
            f"ERR too many watched keys: at most {_WATCHED_KEYS_MAX} keys of {_WATCHED_BYTES_MAX >> 20} MiB in all"
        )
    for key in keys:
        node.watch(session, key)
    return OK


def unwatch(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    node.unwatch(session)
    return OK


def fail_watchers(node: Node, session: Session, command: Command, arguments: list[Argument], reply: Reply) -> None:
    """Fail the transactions that watch keys of a command that has been executed, or has begun.

    EXEC itself checks for removed, expired, evicted and flushed keys.
    """
    if "W" in command.access and not _is_unchanged(command, arguments, reply):
        node.fail_watchers(map(session.qualify, command.keys_of(arguments)))


def _is_unchanged(command: Command, arguments: list[Argument], reply: Reply) -> bool:
    if command.name == "kv.publish":
        return True
    if command.name == "getex" and (len(arguments) == 2 or reply in _NULLS):
        return True
    if reply in _NULLS:  # except for a previous value that did not exist
        return "R" not in command.access_of(arguments)
    return reply == _ZERO
