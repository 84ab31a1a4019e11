"""Commands on the connection itself."""

import time
from collections.abc import Callable
from typing import Final

from shadowserve.resp import Map, SimpleString, Value, Verbatim, encode, encode_bulk, encode_null
from storage_kv.access.users import Denial
from storage_kv.commands._arguments import OK, as_integer, quote, syntax_error
from storage_kv.node import Node, end_session
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session

REDIS_VERSION: Final = "7.0.15"
"""Version of Redis whose replies this server gives; clients choose their commands by it."""

_NAME_BYTES_MAX: Final = 256  # size limit of a client's name and its library's: they are kept and listed

_NOT_AUTHENTICATED_HELLO = (
    "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO AUTH <user> <pass> "
    "option can be used to authenticate the client and select the RESP protocol version at the same time"
)
_NO_PASSWORD_CONFIGURED = (
    "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration "
    "is correct?"
)
_WRONG_PASSWORD = "WRONGPASS invalid username-password pair or user is disabled."


def ping(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    if len(arguments) > 2:
        raise CommandError("ERR wrong number of arguments for 'ping' command")
    return b"+PONG\r\n" if len(arguments) == 1 else encode_bulk(arguments[1])


def echo(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return encode_bulk(arguments[1])


def hello(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """HELLO [protocol [AUTH user password] [SETNAME name]]: choose RESP2 or RESP3."""
    protocol = session.protocol
    if len(arguments) > 1:
        try:
            protocol = as_integer(arguments[1])
        except CommandError:
            raise CommandError("ERR Protocol version is not an integer or out of range") from None
        if protocol not in (2, 3):
            raise CommandError("NOPROTO unsupported protocol version")
    credentials: tuple[bytes, bytes] | None = None
    position = 2
    while position < len(arguments):
        option = bytes(arguments[position]).upper()
        if option == b"AUTH" and position + 2 < len(arguments):
            credentials = (bytes(arguments[position + 1]), bytes(arguments[position + 2]))
            position += 3
        elif option == b"SETNAME" and position + 1 < len(arguments):
            session.info.name = _checked_name(arguments[position + 1])
            position += 2
        else:
            raise CommandError(f"ERR Syntax error in HELLO option '{quote(arguments[position])}'")
    if credentials is not None:
        _authenticate(node, session, *credentials, bytes(arguments[0]).upper())
    if not session.authenticated:
        raise CommandError(_NOT_AUTHENTICATED_HELLO)
    session.protocol = protocol
    fields: list[Value] = [
        *(b"server", b"redis", b"version", REDIS_VERSION.encode()),
        *(b"proto", protocol, b"id", session.id, b"mode", b"standalone", b"role", b"master"),
        *(b"modules", []),
    ]
    return encode(Map(fields), protocol)


def auth(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    if len(arguments) > 3:
        syntax_error()
    if len(arguments) == 2 and node.users.default.no_password:
        raise CommandError(_NO_PASSWORD_CONFIGURED)
    user = bytes(arguments[1]) if len(arguments) == 3 else b"default"
    _authenticate(node, session, user, bytes(arguments[-1]), b"AUTH")
    return OK


def _authenticate(node: Node, session: Session, name: bytes, password: bytes, command: bytes) -> None:
    """Bind the session to a user and its tenant, or raise CommandError. After failures, the reply is delayed."""
    now_s = time.monotonic()
    if node.auth_throttle.is_refused(session.address, now_s):
        node.counters.authentication_failures += 1
        node.audit.write("authentication", session, outcome="refused", user=name, reason="too many failures")
        session.closing = True
        raise CommandError("ERR too many failed authentications from this address, try again later")
    user = node.users.authenticate(name, password)
    until_s = node.auth_throttle.answer_at(session.address, now_s, accepted=user is not None)
    session.pause_until_s, session.pause_holds_replies = until_s, until_s > 0
    if user is None:
        node.counters.authentication_failures += 1
        node.users.deny(Denial("auth", command, name[:_NAME_BYTES_MAX], describe_client(session).strip()))
        node.audit.write("authentication", session, outcome="failed", user=name)
        node.warn_limited("authentication_failed", session.address, f"wrong password of user {quote(name, 64)}")
        raise CommandError(_WRONG_PASSWORD)
    if user.tenant != session.slot_tenant and not node.slots.has_free(user.tenant):
        node.counters.connections_rejected += 1
        node.audit.write(
            "authentication", session, outcome="refused", user=name, reason="no connection slot for its tenant"
        )
        session.closing = True
        raise CommandError("ERR max number of clients of this tenant reached")
    node.bind(session, user)
    node.audit.write("authentication", session, outcome="ok")


def quit_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    session.closing = True
    return OK


def reset(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """RESET: return to the state of a new connection."""
    node.leave(session)
    session.reset()
    node.begin(session)
    return b"+RESET\r\n"


def select(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """SELECT index: there is one database, 0."""
    if as_integer(arguments[1]) != 0:
        raise CommandError("ERR DB index is out of range")
    return OK


def _is_printable(text: bytes) -> bool:
    return all(0x21 <= character <= 0x7E for character in text)


def _checked_name(argument: Argument) -> bytes:
    name = bytes(argument[: _NAME_BYTES_MAX + 1])
    if len(name) > _NAME_BYTES_MAX:
        raise CommandError(f"ERR Client names have at most {_NAME_BYTES_MAX} bytes.")
    if not _is_printable(name):
        raise CommandError("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


def client_id(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return b":%d\r\n" % session.id


def client_setname(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    session.info.name = _checked_name(arguments[2])
    return OK


def client_getname(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return encode_bulk(session.info.name) if session.info.name else encode_null(session.protocol)


def client_setinfo(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CLIENT SETINFO LIB-NAME | LIB-VER text, as Redis 7.2 has it: new clients send it to every server."""
    option, text = bytes(arguments[2]).lower(), bytes(arguments[3][:_NAME_BYTES_MAX])
    if option not in (b"lib-name", b"lib-ver"):
        raise CommandError(f"ERR Unrecognized option '{quote(arguments[2])}'")
    if not _is_printable(text):
        raise CommandError(f"ERR {option.decode()} cannot contain spaces, newlines or special characters.")
    if option == b"lib-name":
        session.info.library_name = text
    else:
        session.info.library_version = text
    return OK


def describe_client(session: Session) -> bytes:
    """Return the line of CLIENT INFO."""
    now, info = time.monotonic(), session.info
    user = session.user.name.decode(errors="replace")
    transaction = session.transaction
    flags = ("x" if transaction is not None else "") + ("e" if info.no_evict else "")
    queued, queued_bytes = -1 if transaction is None else len(transaction.commands), session.queued_bytes
    text = (
        f"id={session.id} addr={session.address} laddr={info.local_address} fd={info.file_descriptor} "
        f"name={info.name.decode()} age={int(now - info.created_s)} idle={int(now - info.last_active_s)} "
        f"flags={flags or 'N'} db=0 sub=0 psub=0 ssub=0 multi={queued} qbuf=0 qbuf-free=0 argv-mem=0 "
        f"multi-mem={queued_bytes} rbs=0 rbp=0 obl=0 oll=0 omem={info.pending_output_bytes} "
        f"tot-mem={info.pending_output_bytes + queued_bytes} events=r cmd={info.last_command} user={user} "
        f"redir=-1 resp={session.protocol} lib-name={info.library_name.decode()} "
        f"lib-ver={info.library_version.decode()}\n"
    )
    return text.encode()


def _visible_sessions(node: Node, session: Session) -> list[Session]:
    """Return the open sessions of the own tenant; operators see all."""
    found = node.open_sessions()
    if session.user.is_operator:
        return found
    return [other for other in found if other.authenticated and other.tenant == session.tenant]


def _is_normal(kind: Argument) -> bool:
    """Return True for the only type of clients that exists here; raise CommandError for an unknown one."""
    name = bytes(kind).lower()
    if name not in (b"normal", b"master", b"replica", b"slave", b"pubsub"):
        raise CommandError(f"ERR Unknown client type '{quote(kind)}'")
    return name == b"normal"


def client_list(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CLIENT LIST [TYPE type | ID id [id ...]]: of the own tenant; operators see all."""
    chosen = _visible_sessions(node, session)
    if len(arguments) > 2:
        option = bytes(arguments[2]).upper()
        if option == b"TYPE" and len(arguments) == 4:
            chosen = chosen if _is_normal(arguments[3]) else []
        elif option == b"ID" and len(arguments) > 3:
            ids = _client_ids(arguments[3:])
            chosen = [other for other in chosen if other.id in ids]
        else:
            syntax_error()
    return encode(Verbatim(b"".join(map(describe_client, chosen))), session.protocol)


def _client_ids(arguments: list[Argument]) -> set[int]:
    try:
        return {as_integer(argument) for argument in arguments}
    except CommandError:
        raise CommandError("ERR Invalid client ID") from None


def client_kill(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CLIENT KILL address, or CLIENT KILL filter value [filter value ...]: of the clients that CLIENT LIST shows.

    The filters are ID, TYPE, ADDR, LADDR and USER; SKIPME no includes the client itself.
    """
    chosen = _visible_sessions(node, session)
    if len(arguments) == 3:
        address = quote(arguments[2])
        chosen = [other for other in chosen if other.address == address]
        if not chosen:
            raise CommandError("ERR No such client")
    else:
        chosen = _filtered(node, session, chosen, arguments[2:])
    for other in chosen:
        end_session(other)
    return OK if len(arguments) == 3 else b":%d\r\n" % len(chosen)


def _filtered(node: Node, session: Session, chosen: list[Session], filters: list[Argument]) -> list[Session]:
    """Return the sessions that match all filters of CLIENT KILL."""
    skips_own = True
    for position in range(0, len(filters), 2):
        if position + 1 == len(filters):
            syntax_error()
        name, value = bytes(filters[position]).upper(), filters[position + 1]
        if name == b"SKIPME" and bytes(value).lower() in (b"yes", b"no"):
            skips_own = bytes(value).lower() == b"yes"
        else:
            matches = _filter(node, session, name, value)
            chosen = [other for other in chosen if matches(other)]
    return [other for other in chosen if other is not session or not skips_own]


def _filter(node: Node, session: Session, name: bytes, value: Argument) -> Callable[[Session], bool]:
    """Return the predicate of one filter of CLIENT KILL."""
    text = quote(value)
    if name == b"ID":
        wanted = _client_id(value)
        return lambda other: other.id == wanted
    if name == b"TYPE":
        is_normal = _is_normal(value)
        return lambda other: is_normal
    if name in (b"ADDR", b"LADDR"):
        return lambda other: text == (other.address if name == b"ADDR" else other.info.local_address)
    if name == b"USER":
        user = node.users.by_name.get(bytes(value))
        if user is None or not (session.user.is_operator or user.tenant == session.user.tenant):
            raise CommandError(f"ERR No such user '{text}'")
        return lambda other: other.user is user
    syntax_error()


def _client_id(argument: Argument) -> int:
    try:
        number = as_integer(argument)
    except CommandError:
        number = 0
    if number <= 0:
        raise CommandError("ERR client-id should be greater than 0")
    return number


def client_info(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return encode(Verbatim(describe_client(session)), session.protocol)


def client_no_evict(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CLIENT NO-EVICT ON | OFF: recorded, without effect."""
    option = bytes(arguments[2]).upper()
    if option not in (b"ON", b"OFF"):
        syntax_error()
    session.info.no_evict = option == b"ON"
    return OK


def client_reply(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    option = bytes(arguments[2]).upper()
    modes = {b"ON": (True, 0), b"OFF": (False, session.skip), b"SKIP": (session.replies, 2)}
    if option not in modes:
        syntax_error()
    session.replies, session.skip = modes[option]
    return encode(SimpleString(b"OK"))
