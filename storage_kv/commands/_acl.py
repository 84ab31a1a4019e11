"""ACL: users and their permissions, with the replies and errors of Redis."""

import logging
import secrets
import time
from typing import Any, Final, NoReturn

from shadowserve.errors import ConfigurationError
from shadowserve.resp import Map, SetReply, Value, encode, encode_bulk, encode_null
from storage_kv.access.rules import RuleError
from storage_kv.access.users import DEFAULT_USER, Denial
from storage_kv.commands._arguments import OK, as_integer, quote
from storage_kv.node import Node
from storage_kv.reply import CommandError, Continuation, Reply
from storage_kv.session import Argument, Session

_log = logging.getLogger(__name__)

_PASSWORD_BITS: Final = 256
_PASSWORD_BITS_MAX: Final = 4096
_LOG_ENTRIES: Final = 10
_NO_FILE: Final = (
    "ERR this server has no users file: set users_file in its configuration and restart it. Users that ACL SETUSER "
    "creates without one are lost at the next restart"
)


def wrong_arguments(arguments: list[Argument]) -> NoReturn:
    """Raise Redis' error for a subcommand with too many arguments."""
    name = quote(arguments[1])
    raise CommandError(f"ERR unknown subcommand or wrong number of arguments for '{name}'. Try ACL HELP.")


def whoami(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return encode_bulk(session.user.name)


def list_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL LIST: users as lines of a users file."""
    return encode(list(node.users.describe()), session.protocol)


def users(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return encode(list[Value](sorted(node.users.by_name)), session.protocol)


def getuser(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    user = node.users.by_name.get(bytes(arguments[2]))
    if user is None:
        return encode_null(session.protocol)
    fields: list[Value] = [
        *(b"flags", SetReply([flag.encode() for flag in user.flags])),
        *(b"passwords", list[Value](user.passwords)),
        *(b"commands", user.commands_text),
        *(b"keys", user.keys_text),
        *(b"channels", user.channels_text),
        *(b"selectors", []),
    ]
    fields += [b"tenant", user.tenant.encode()] if user.tenant else []
    return encode(Map(fields), session.protocol)


def setuser(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL SETUSER name [rule ...]: applies all rules, or none and answers an error."""
    name = bytes(arguments[2])
    try:
        moved = node.users.set_user(name, map(bytes, arguments[3:]))
    except RuleError as error:
        if len(error.args) == 1:  # of the name
            raise CommandError(f"ERR {error}") from None
        reason, rule = error.args
        raise CommandError(f"ERR Error in ACL SETUSER modifier '{quote(rule)}': {reason}") from None
    if moved:
        node.end_sessions([node.users.by_name[name]])
    return OK


def deluser(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL DELUSER name [name ...]: their connections end."""
    names = [bytes(name) for name in arguments[2:]]
    removed = []
    for name in names:
        if name == DEFAULT_USER:
            raise CommandError("ERR The 'default' user cannot be removed")
        user = node.users.remove(name)
        removed += [user] if user is not None else []
    node.end_sessions(removed)
    return b":%d\r\n" % len(removed)


def genpass(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    if len(arguments) > 3:
        wrong_arguments(arguments)
    bits = as_integer(arguments[2]) if len(arguments) == 3 else _PASSWORD_BITS
    if not 0 < bits <= _PASSWORD_BITS_MAX:
        raise CommandError(
            "ERR ACL GENPASS argument must be the number of bits for the output password, a positive number up to 4096"
        )
    digits = (bits + 3) // 4
    return encode_bulk(secrets.token_hex((digits + 1) // 2)[:digits].encode())


def log(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL LOG [count | RESET]: the last denials."""
    if len(arguments) > 3:
        wrong_arguments(arguments)
    count = _LOG_ENTRIES
    if len(arguments) == 3:
        if bytes(arguments[2]).upper() == b"RESET":
            node.users.denials.clear()
            return OK
        count = max(0, as_integer(arguments[2]))
    return encode([_describe(entry) for entry in list(node.users.denials)[:count]], session.protocol)


def _describe(entry: Denial) -> Value:
    return Map([
        *(b"count", entry.count),
        *(b"reason", entry.reason.encode()),
        *(b"context", entry.context.encode()),
        *(b"object", entry.object),
        *(b"username", entry.user),
        *(b"age-seconds", round(time.monotonic() - entry.at_s, 3)),
        *(b"client-info", entry.client),
    ])  # fmt: skip


def load(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL LOAD: reads the users file again; applies all of it, or nothing and answers an error."""
    if not node.users.file:
        raise CommandError(_NO_FILE)
    try:
        ended = node.users.load()
    except ConfigurationError as error:
        text = "WARNING: ACL errors detected, no change to the previously active ACL rules was performed"
        raise CommandError(f"ERR {error}. {text}") from None
    node.end_sessions(ended)
    return OK


def save(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL SAVE: writes the users file, in another thread because a disk may be slow."""
    if not node.users.file:
        raise CommandError(_NO_FILE)
    write = node.users.saving()

    def work() -> str:
        try:
            write()
        except OSError as error:
            return str(error)
        return ""

    def finish(error: Any) -> bytes:
        if error:
            _log.error("users_not_saved file=%s error=%r", node.users.file, error)
            raise CommandError(
                "ERR There was an error trying to save the ACLs. Please check the server logs for more information"
            )
        return OK

    return Continuation([], finish, work)
