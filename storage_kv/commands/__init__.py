"""The command table, and how a command is executed: look up, check, call.

Each command is one row of :data:`TABLE`, which also answers COMMAND. A handler raises
:class:`~storage_kv.node.CommandError` to answer an error; nothing has changed then.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from shadowserve.pool.volume.changes import BusyError
from shadowserve.resp import (
    SetReply,
    SimpleString,
    encode,
    encode_array_header,
    encode_bulk,
    encode_error,
    encode_map_header,
    encode_null,
)
from storage_kv.access.rules import CATEGORIES
from storage_kv.commands import (
    _acl,
    _config,
    _connection,
    _keys,
    _kv,
    _permissions,
    _server,
    _strings,
    _transactions,
)
from storage_kv.commands._arguments import OK, quote, syntax_error
from storage_kv.commands._table import Command
from storage_kv.glob import Glob
from storage_kv.node import CommandError, More, Node, Reply
from storage_kv.operate.command_statistics import SAMPLE_EVERY
from storage_kv.session import Argument, Session

_ASKED_MAX: Final = 1024
"""Names in one question about commands; the table has a tenth of that."""


def _command(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND: every row."""
    return encode([command.describe() for command in TABLE], session.protocol)


def _command_count(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND COUNT."""
    return b":%d\r\n" % len(TABLE)


def _command_info(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND INFO [name ...]."""
    if len(arguments) == 2:
        return _command(node, session, arguments)
    null = encode_null(session.protocol)
    found = [_find(bytes(name)) for name in _few(arguments[2:])]
    described = [null if command is None else _described(command, session.protocol) for command in found]
    return encode_array_header(len(found)) + b"".join(described)


def _command_docs(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND DOCS [name ...]: a map that leaves unknown names out."""
    chosen = TABLE if len(arguments) == 2 else [_find(bytes(name)) for name in _few(arguments[2:])]
    documents = [_documented(command, session.protocol) for command in chosen if command is not None]
    return encode_map_header(len(documents), session.protocol) + b"".join(documents)


@cache
def _described(command: Command, protocol: int) -> bytes:
    return encode(command.describe(), protocol)


@cache
def _documented(command: Command, protocol: int) -> bytes:
    return encode_bulk(command.full_name.encode()) + encode(command.document(), protocol)


def _few(arguments: list[Argument]) -> list[Argument]:
    """Return them if they are few enough to be answered in one hold of the node's lock, and in one reply."""
    if len(arguments) > _ASKED_MAX:
        raise CommandError(f"ERR {len(arguments)} are too many to ask for at once: at most {_ASKED_MAX}")
    return arguments


def _command_list(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND LIST [FILTERBY MODULE name | ACLCAT category | PATTERN pattern]: names, subcommands' included."""
    found = list(BY_FULL_NAME.values())
    if len(arguments) > 2:
        kind = bytes(arguments[3]).upper() if len(arguments) == 5 else b""
        if bytes(arguments[2]).upper() != b"FILTERBY" or kind not in (b"MODULE", b"ACLCAT", b"PATTERN"):
            syntax_error()
        wanted = bytes(arguments[4])
        if kind == b"PATTERN":
            glob = Glob(wanted, ignore_case=True)
            found = [command for command in found if glob.matches(command.full_name.encode())]
        else:  # no command is a module's
            category = quote(wanted).lower() if kind == b"ACLCAT" else ""
            found = [command for command in found if category in (command.categories or ())]
    return encode([command.full_name.encode() for command in found], session.protocol)


def _command_getkeys(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND GETKEYS command [argument ...]: the arguments that are keys."""
    _, keys = _keys_in(arguments[2:])
    return More.of([encode_array_header(len(keys))], iter(keys), encode_bulk)


def _command_getkeysandflags(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """COMMAND GETKEYSANDFLAGS command [argument ...]: each key, and what is done to it."""
    command, keys = _keys_in(arguments[2:])
    flags = SetReply([SimpleString(flag.encode()) for flag in command.flags_of_keys(arguments[2:]).split()])
    behind = encode(flags, session.protocol)
    return More.of([encode_array_header(len(keys))], iter(keys), lambda key: b"*2\r\n" + encode_bulk(key) + behind)


def _keys_in(arguments: list[Argument]) -> tuple[Command, Sequence[Argument]]:
    try:
        command = _look_up(arguments)
    except CommandError:
        raise CommandError("ERR Invalid command specified") from None
    if not command.key_flags:
        raise CommandError("ERR The command has no key arguments")
    try:
        _check_arity(command, arguments)
    except CommandError:
        raise CommandError("ERR Invalid number of arguments specified for command") from None
    return command, command.keys_of(arguments)


def _help(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """HELP of any command with subcommands."""
    command = _BY_NAME[bytes(arguments[0]).lower()]
    lines = [f"{command.name.upper()} <subcommand> [<arg> ...]. Subcommands are:"]
    for subcommand in command.subcommands:
        lines += [subcommand.name.upper(), f"    {subcommand.summary}"]
    return encode([SimpleString(line.encode()) for line in lines], session.protocol)


def _acl_cat(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL CAT [category]: all categories, or the commands of one."""
    if len(arguments) > 3:
        _acl.wrong_arguments(arguments)
    if len(arguments) == 2:
        return _acl.categories(session)
    category = bytes(arguments[2]).decode("utf-8", "replace").lower()
    if category not in CATEGORIES:
        raise CommandError(f"ERR Unknown category '{quote(arguments[2])}'")
    found = [name.encode() for name, command in BY_FULL_NAME.items() if category in (command.categories or ())]
    return encode(list(found), session.protocol)


def _acl_dryrun(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """ACL DRYRUN user command [argument ...]: whether the user could execute it."""
    user = node.users.by_name.get(bytes(arguments[2]))
    if user is None:
        raise CommandError(f"ERR User '{quote(arguments[2])}' not found")
    tried = arguments[3:]
    try:
        command = _look_up(tried)
    except CommandError:
        raise CommandError(f"ERR Command '{quote(arguments[3])}' not found") from None
    _check_arity(command, tried)
    found = _permissions.forbidden(user, command, tried)
    if found is None:
        return OK
    reason, what = found
    if reason == "command":
        return encode_bulk(f"This user has no permissions to run the '{command.full_name}' command".encode())
    return encode_bulk(b"This user has no permissions to access the '" + what + b"' key")


def _container(
    name: str,
    arity: int,
    flags: str,
    summary: str,
    since: str,
    *rows: dict[str, Any],
    group: str,
    handler: Any = _help,
    categories: tuple[str, ...] = (),
    tips: str = "",
) -> Command:
    """Return the row of a command with subcommands; HELP is added to them.

    ``categories`` are the command's own; its subcommands have them, too, or those of the group.
    """
    help_since = max(since, "5.0.0")
    rows = (*rows, _row("help", 2, "loading stale", _help, help_since, "Returns helpful text about the subcommands."))
    return Command(
        name=name,
        arity=arity,
        flags=flags,
        summary=summary,
        since=since,
        group=group,
        handler=handler,
        categories=categories,
        tips=tips,
        subcommands=tuple(Command(parent=name, group=group, categories=categories or None, **row) for row in rows),
    )


def _row(
    name: str, arity: int, flags: str, handler: Any, since: str, summary: str, *, tips: str = ""
) -> dict[str, Any]:
    row = {"name": name, "arity": arity, "flags": flags, "handler": handler, "since": since, "summary": summary}
    return row | {"tips": tips}


_PLAIN: Final = "noscript loading stale"
_ADMIN: Final = f"admin {_PLAIN}"
_CONNECTION: Final = "noscript loading stale fast"
_ONE_KEY: Final = (1, 1, 1)
_ALL_KEYS: Final = (1, -1, 1)
_PAIRS: Final = (1, -1, 2)

_SUMMED: Final = "request_policy:multi_shard response_policy:agg_sum"
_UNORDERED: Final = "nondeterministic_output_order"
_VARYING: Final = "nondeterministic_output"

# fmt: off
TABLE: Final[tuple[Command, ...]] = (
    _container("acl", -2, "", "A container for access control commands.", "6.0.0",
               _row("cat", -2, _PLAIN, _acl_cat, "6.0.0", "Lists the categories, or the commands of one."),
               _row("deluser", -3, _ADMIN, _acl.deluser, "6.0.0", "Deletes users, and ends their connections."),
               _row("dryrun", -4, _ADMIN, _acl_dryrun, "7.0.0", "Says whether a user could execute a command."),
               _row("genpass", -2, _PLAIN, _acl.genpass, "6.0.0", "Makes a password of random hexadecimal digits."),
               _row("getuser", 3, _ADMIN, _acl.getuser, "6.0.0", "Returns the rules of a user."),
               _row("list", 2, _ADMIN, _acl.list_, "6.0.0", "Returns the users as lines of a users file."),
               _row("load", 2, _ADMIN, _acl.load, "6.0.0", "Reads the users file anew."),
               _row("log", -2, _ADMIN, _acl.log, "6.0.0", "Returns what was denied last."),
               _row("save", 2, _ADMIN, _acl.save, "6.0.0", "Writes the users file."),
               _row("setuser", -3, _ADMIN, _acl.setuser, "6.0.0", "Makes or changes a user."),
               _row("users", 2, _ADMIN, _acl.users, "6.0.0", "Returns the names of the users."),
               _row("whoami", 2, _PLAIN, _acl.whoami, "6.0.0", "Returns the user of the connection."),
               group="server"),
    Command(name="auth", arity=-2, flags=f"{_CONNECTION} no_auth allow_busy", handler=_connection.auth,
            since="1.0.0", group="connection", summary="Authenticates the connection."),
    _container("client", -2, "", "A container for client connection commands.", "2.4.0",
               _row("getname", 2, "noscript loading stale", _connection.client_getname, "2.6.9",
                    "Returns the name of the connection."),
               _row("id", 2, "noscript loading stale", _connection.client_id, "5.0.0",
                    "Returns the unique client ID of the connection."),
               _row("info", 2, "noscript loading stale", _connection.client_info, "6.2.0",
                    "Returns information about the connection.", tips=_VARYING),
               _row("kill", -3, "admin noscript loading stale", _connection.client_kill, "2.4.0",
                    "Ends connections, by address or by filters."),
               _row("list", -2, "admin noscript loading stale", _connection.client_list, "2.4.0",
                    "Lists open connections.", tips=_VARYING),
               _row("no-evict", 3, "admin noscript loading stale", _connection.client_no_evict, "7.0.0",
                    "Accepted for clients that ask: clients are never evicted here."),
               _row("reply", 3, "noscript loading stale", _connection.client_reply, "3.2.0",
                    "Switches the replies of the connection on, off, or off for the next command."),
               _row("setinfo", 4, "noscript loading stale", _connection.client_setinfo, "7.2.0",
                    "Records the name and version of the client's library."),
               _row("setname", 3, "noscript loading stale", _connection.client_setname, "2.6.9",
                    "Sets the name of the connection."),
               group="connection"),
    _container("command", -1, "loading stale", "Returns information about all commands.", "2.8.13",
               _row("count", 2, "loading stale", _command_count, "2.8.13", "Returns the number of commands."),
               _row("docs", -2, "loading stale", _command_docs, "7.0.0", "Returns documentation of commands.",
                    tips=_UNORDERED),
               _row("getkeys", -4, "loading stale", _command_getkeys, "2.8.13",
                    "Returns the keys among the arguments of a command."),
               _row("getkeysandflags", -4, "loading stale", _command_getkeysandflags, "7.0.0",
                    "Returns the keys among the arguments of a command, and what it does to them."),
               _row("info", -2, "loading stale", _command_info, "2.8.13", "Returns information about commands.",
                    tips=_UNORDERED),
               _row("list", -2, "loading stale", _command_list, "7.0.0", "Returns the names of commands.",
                    tips=_UNORDERED),
               group="server", handler=_command, categories=("connection",), tips=_UNORDERED),
    _container("config", -2, "", "A container for server configuration commands.", "2.0.0",
               _row("get", -3, "admin noscript loading stale", _config.config_get, "2.0.0",
                    "Returns the values of configuration parameters."),
               _row("resetstat", 2, "admin noscript loading stale", _config.config_resetstat, "2.0.0",
                    "Resets the counters of INFO."),
               _row("rewrite", 2, "admin noscript loading stale", _config.config_rewrite, "2.8.0",
                    "Refused: the server does not write its configuration file."),
               _row("set", -4, "admin noscript loading stale", _config.config_set, "2.0.0",
                    "Changes parameters while the server runs: those that can be changed.",
                    tips="request_policy:all_nodes response_policy:all_succeeded"),
               group="server"),
    Command(name="dbsize", arity=1, flags="readonly fast", handler=_keys.dbsize, categories=("keyspace",),
            tips="request_policy:all_shards response_policy:agg_sum",
            since="1.0.0", group="server", summary="Returns the number of keys."),
    Command(name="del", arity=-2, flags="write", handler=_keys.delete, keys=_ALL_KEYS,
            key_flags="RM delete", tips=_SUMMED,
            since="1.0.0", group="generic", summary="Deletes keys."),
    Command(name="discard", arity=1, flags=f"{_CONNECTION} allow_busy", handler=_transactions.discard,
            since="2.0.0", group="transactions", summary="Forgets the commands since MULTI."),
    Command(name="echo", arity=2, flags="loading stale fast", handler=_connection.echo,
            since="1.0.0", group="connection", summary="Returns the given string."),
    Command(name="exec", arity=1, flags=f"{_PLAIN} skip_slowlog", handler=_transactions.exec_,
            since="1.2.0", group="transactions", summary="Executes the commands since MULTI, in order."),
    Command(name="exists", arity=-2, flags="readonly fast", handler=_keys.exists, keys=_ALL_KEYS,
            key_flags="RO", tips=_SUMMED,
            since="1.0.0", group="generic", summary="Counts which of the keys exist."),
    Command(name="expire", arity=-3, flags="write fast", handler=_keys.expire, keys=_ONE_KEY,
            key_flags="RW update",
            since="1.0.0", group="generic", summary="Sets the time to live of a key in seconds."),
    Command(name="expireat", arity=-3, flags="write fast", handler=_keys.expireat, keys=_ONE_KEY,
            key_flags="RW update",
            since="1.2.0", group="generic", summary="Sets when a key expires, in Unix time in seconds."),
    Command(name="expiretime", arity=2, flags="readonly fast", handler=_keys.expiretime, keys=_ONE_KEY,
            key_flags="RO access",
            since="7.0.0", group="generic", summary="Returns when a key expires, in Unix time in seconds."),
    Command(name="flushall", arity=-1, flags="write", handler=_keys.flush, categories=("keyspace", "dangerous"),
            tips="request_policy:all_shards response_policy:all_succeeded",
            since="1.0.0", group="server", summary="Removes all keys."),
    Command(name="flushdb", arity=-1, flags="write", handler=_keys.flush, categories=("keyspace", "dangerous"),
            tips="request_policy:all_shards response_policy:all_succeeded",
            since="1.0.0", group="server", summary="Removes all keys: there is one database."),
    Command(name="get", arity=2, flags="readonly fast", handler=_strings.get, keys=_ONE_KEY,
            key_flags="RO access",
            since="1.0.0", group="string", summary="Returns the value of a key."),
    Command(name="getdel", arity=2, flags="write fast", handler=_strings.getdel, keys=_ONE_KEY,
            key_flags="RW access delete",
            since="6.2.0", group="string", summary="Returns the value of a key, and deletes the key."),
    Command(name="getex", arity=-2, flags="write fast", handler=_strings.getex, keys=_ONE_KEY,
            key_flags="RW access update",
            since="6.2.0", group="string", summary="Returns the value of a key, and changes its time to live."),
    Command(name="getrange", arity=4, flags="readonly", handler=_strings.getrange, keys=_ONE_KEY,
            key_flags="RO access",
            since="2.4.0", group="string", summary="Returns a part of the value of a key."),
    Command(name="getset", arity=3, flags="write denyoom fast", handler=_strings.getset, keys=_ONE_KEY,
            values=(2, 2, 1), key_flags="RW access update",
            since="1.0.0", group="string", summary="Sets the value of a key, and returns the one before."),
    Command(name="hello", arity=-1, flags=f"{_CONNECTION} no_auth allow_busy", handler=_connection.hello,
            since="6.0.0", group="connection", summary="Shakes hands: chooses the protocol, authenticates, names."),
    Command(name="info", arity=-1, flags="loading stale", handler=_server.info, categories=("dangerous",),
            tips="nondeterministic_output request_policy:all_shards response_policy:special",
            since="1.0.0", group="server", summary="Returns information about the server, by sections."),
    Command(name="keys", arity=2, flags="readonly", handler=_keys.keys, categories=("keyspace", "dangerous"),
            tips=f"request_policy:all_shards {_UNORDERED}",
            since="1.0.0", group="generic", summary="Returns the keys that match a pattern."),
    Command(name="kv.publish", arity=-3, flags="write fast", handler=_kv.publish, keys=(2, -1, 1),
            key_flags="OW insert",
            since="0.1.0", group="string", summary="Says for so many milliseconds that keys will be stored."),
    Command(name="kv.published", arity=-2, flags="readonly fast", handler=_kv.published, keys=_ALL_KEYS,
            key_flags="RO",
            since="0.1.0", group="string", summary="Returns for how many milliseconds more absent keys are published."),
    Command(name="kv.layers", arity=-5, flags="readonly", handler=_kv.layers, keys=(4, -1, 1),
            key_flags="RO access",
            since="0.2.0", group="string", summary="Returns layer after layer of a whole prefix's records."),
    Command(name="kv.meta", arity=-2, flags="readonly", handler=_kv.meta, keys=_ALL_KEYS,
            key_flags="RO access",
            since="0.1.0", group="string", summary="Returns the length and the head of each record; nil without one."),
    Command(name="kv.pin", arity=-3, flags="write fast", handler=_kv.pin, keys=(2, -1, 1),
            key_flags="RW update",
            since="0.1.0", group="string", summary="Keeps keys from eviction for so many seconds; 0 lets them go."),
    Command(name="kv.pins", arity=-1, flags="readonly", handler=_kv.pins, categories=("keyspace",),
            since="0.2.0", group="server", summary="Returns how much is pinned, and may be."),
    Command(name="kv.prefetch", arity=-2, flags="readonly", handler=_kv.prefetch, keys=_ALL_KEYS,
            key_flags="RO access",
            since="0.2.0", group="string", summary="Begins to bring records from the bucket into the node."),
    Command(name="kv.unpin", arity=-1, flags="write", handler=_kv.unpin, categories=("keyspace",),
            since="0.2.0", group="server", summary="Ends all pins of the tenant, or of others."),
    Command(name="mget", arity=-2, flags="readonly fast", handler=_strings.mget, keys=_ALL_KEYS,
            key_flags="RO access", tips="request_policy:multi_shard",
            since="1.0.0", group="string", summary="Returns the values of keys."),
    Command(name="mset", arity=-3, flags="write denyoom", handler=_strings.mset, keys=_PAIRS,
            values=(2, -1, 2), key_flags="OW update", tips="request_policy:multi_shard response_policy:all_succeeded",
            since="1.0.1", group="string", summary="Sets the values of keys."),
    Command(name="msetnx", arity=-3, flags="write denyoom", handler=_strings.msetnx, keys=_PAIRS,
            values=(2, -1, 2), key_flags="OW insert", tips="request_policy:multi_shard response_policy:agg_min",
            since="1.0.1", group="string", summary="Sets the values of keys if none of them is there."),
    Command(name="multi", arity=1, flags=f"{_CONNECTION} allow_busy", handler=_transactions.multi,
            since="1.2.0", group="transactions", summary="Keeps the commands that follow until EXEC."),
    Command(name="persist", arity=2, flags="write fast", handler=_keys.persist, keys=_ONE_KEY,
            key_flags="RW update",
            since="2.2.0", group="generic", summary="Removes the time to live of a key."),
    Command(name="pexpire", arity=-3, flags="write fast", handler=_keys.pexpire, keys=_ONE_KEY,
            key_flags="RW update",
            since="2.6.0", group="generic", summary="Sets the time to live of a key in milliseconds."),
    Command(name="pexpireat", arity=-3, flags="write fast", handler=_keys.pexpireat, keys=_ONE_KEY,
            key_flags="RW update",
            since="2.6.0", group="generic", summary="Sets when a key expires, in Unix time in milliseconds."),
    Command(name="pexpiretime", arity=2, flags="readonly fast", handler=_keys.pexpiretime, keys=_ONE_KEY,
            key_flags="RO access",
            since="7.0.0", group="generic", summary="Returns when a key expires, in Unix time in milliseconds."),
    Command(name="ping", arity=-1, flags="fast", handler=_connection.ping,
            tips="request_policy:all_shards response_policy:all_succeeded",
            since="1.0.0", group="connection", summary="Returns PONG, or the given string."),
    Command(name="psetex", arity=4, flags="write denyoom", handler=_strings.psetex, keys=_ONE_KEY,
            values=(3, 3, 1), key_flags="OW update",
            since="2.6.0", group="string", summary="Sets the value of a key, and its time to live in milliseconds."),
    Command(name="pttl", arity=2, flags="readonly fast", handler=_keys.pttl, keys=_ONE_KEY,
            key_flags="RO access", tips=_VARYING,
            since="2.6.0", group="generic", summary="Returns the time to live of a key in milliseconds."),
    Command(name="quit", arity=-1, flags=f"{_CONNECTION} no_auth allow_busy", handler=_connection.quit_,
            since="1.0.0", group="connection", summary="Closes the connection."),
    Command(name="reset", arity=1, flags=f"{_CONNECTION} no_auth allow_busy", handler=_connection.reset,
            since="6.2.0", group="connection", summary="Makes the connection as new."),
    Command(name="scan", arity=-2, flags="readonly", handler=_keys.scan,
            tips="nondeterministic_output request_policy:special",
            since="2.8.0", group="generic", summary="Iterates over the keys."),
    Command(name="select", arity=2, flags="loading stale fast", handler=_connection.select,
            since="1.0.0", group="connection", summary="Chooses the database: there is one, 0."),
    Command(name="set", arity=-3, flags="write denyoom", handler=_strings.set_, keys=_ONE_KEY,
            values=(2, 2, 1), key_flags="RW access update variable_flags",
            since="1.0.0", group="string", summary="Sets the value of a key; a record never changes once it is set."),
    Command(name="setex", arity=4, flags="write denyoom", handler=_strings.setex, keys=_ONE_KEY,
            values=(3, 3, 1), key_flags="OW update",
            since="2.0.0", group="string", summary="Sets the value of a key, and its time to live in seconds."),
    Command(name="setnx", arity=3, flags="write denyoom fast", handler=_strings.setnx, keys=_ONE_KEY,
            values=(2, 2, 1), key_flags="OW insert",
            since="1.0.0", group="string", summary="Sets the value of a key if it is not there."),
    Command(name="strlen", arity=2, flags="readonly fast", handler=_strings.strlen, keys=_ONE_KEY,
            key_flags="RO",
            since="2.2.0", group="string", summary="Returns the length of the value of a key."),
    Command(name="substr", arity=4, flags="readonly", handler=_strings.getrange, keys=_ONE_KEY,
            key_flags="RO access",
            since="1.0.0", group="string", summary="Returns a part of the value of a key: the old name of GETRANGE."),
    Command(name="touch", arity=-2, flags="readonly fast", handler=_keys.touch, keys=_ALL_KEYS,
            key_flags="RO", tips=_SUMMED,
            since="3.2.1", group="generic", summary="Uses keys, and counts which of them exist."),
    Command(name="ttl", arity=2, flags="readonly fast", handler=_keys.ttl, keys=_ONE_KEY,
            key_flags="RO access", tips=_VARYING,
            since="1.0.0", group="generic", summary="Returns the time to live of a key in seconds."),
    Command(name="type", arity=2, flags="readonly fast", handler=_keys.type_, keys=_ONE_KEY,
            key_flags="RO",
            since="1.0.0", group="generic", summary="Returns the type of the value of a key: string, or none."),
    Command(name="unlink", arity=-2, flags="write fast", handler=_keys.delete, keys=_ALL_KEYS,
            key_flags="RM delete", tips=_SUMMED,
            since="4.0.0", group="generic", summary="Deletes keys; the same as DEL here."),
    Command(name="unwatch", arity=1, flags=f"{_CONNECTION} allow_busy", handler=_transactions.unwatch,
            since="2.2.0", group="transactions", summary="Forgets the keys of WATCH."),
    Command(name="watch", arity=-2, flags=f"{_CONNECTION} allow_busy", handler=_transactions.watch, keys=_ALL_KEYS,
            key_flags="RO",
            since="2.2.0", group="transactions", summary="Has EXEC execute nothing if one of the keys changes."),
)
# fmt: on

BY_FULL_NAME: Final = {command.full_name: command for parent in TABLE for command in (parent, *parent.subcommands)}
"""Every command and subcommand, ``client|list``."""

_BY_NAME: Final = {command.name.encode(): command for command in TABLE}
_SUBCOMMANDS: Final = {
    command.name: {subcommand.name.encode(): subcommand for subcommand in command.subcommands} for command in TABLE
}


def _spellings() -> Iterator[tuple[bytes, Command]]:
    for name, command in _BY_NAME.items():
        yield name, command
        yield name.upper(), command


# Clients write names in one case or the other: both are found without converting.
_FAST: Final = {name: command for name, command in _spellings() if not command.subcommands}


def _find(name: bytes) -> Command | None:
    """Return the command of a name such as ``get`` or ``client|list``."""
    head, _, tail = name.lower().partition(b"|")
    command = _BY_NAME.get(head)
    return _SUBCOMMANDS[command.name].get(tail) if command is not None and tail else command


def find(name: Argument) -> Command | None:
    """Return the command of a name, in any case; not of a subcommand."""
    return _FAST.get(bytes(name[:64])) or _BY_NAME.get(bytes(name[:64]).lower())


def execute(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """Execute one command and return its reply; errors are replies too.

    Raises:
        BusyError: nothing has been done, and the command is to be executed again later.
    """
    counters = node.counters
    counters.commands += 1
    try:
        command = _FAST.get(bytes(arguments[0])) or _look_up(arguments)
    except CommandError as error:
        counters.unknown_commands += 1
        if session.transaction is not None:
            session.transaction.fail()
        return _refuse(node, error)
    statistics = counters.by_command.get(command.full_name) or counters.of(command.full_name)
    try:
        arity = command.arity
        if len(arguments) != arity and (arity > 0 or len(arguments) < -arity):
            _check_arity(command, arguments)
        if not session.authenticated and not command.open_to_all:
            raise CommandError("NOAUTH Authentication required.")
        if not session.user.unrestricted:
            _permissions.check(node, session, command, arguments)
        if session.transaction is not None and command.name not in _transactions.EXECUTED_AT_ONCE:
            return _transactions.queue(node, session, arguments)
        if command.is_audited:
            each = "admin" in command.flags
            node.audit.write("command", session, outcome="allowed", each=each, command=command.full_name)
    except CommandError as error:
        statistics.rejected += 1
        return _refuse(node, _transactions.rejected(node, session, command, error))
    session.last_command = command.full_name
    calls = statistics.calls = statistics.calls + 1
    try:
        if calls % SAMPLE_EVERY == 1:
            reply = statistics.timed(command.handler, node, session, arguments)
        else:
            reply = command.handler(node, session, arguments)
    except CommandError as error:
        statistics.failed += 1
        return _refuse(node, error)
    except BusyError:  # it will be tried again
        counters.commands -= 1
        statistics.calls -= 1
        counters.busy += 1
        raise
    if node.watchers:
        _transactions.note_change(node, session, command, arguments, reply)
    if isinstance(reply, More):
        return _guarded(node, session, command, arguments, reply)
    return reply


def _check_arity(command: Command, arguments: list[Argument]) -> None:
    arity = command.arity
    if len(arguments) != arity and (arity > 0 or len(arguments) < -arity):
        raise CommandError(f"ERR wrong number of arguments for '{command.full_name}' command")


def _guarded(node: Node, session: Session, command: Command, arguments: list[Argument], more: More) -> More:
    """Return ``more`` with its errors as replies."""
    rest = more.rest

    def guarded(result: Any) -> Reply:
        try:
            reply = rest(result)
        except CommandError as error:
            node.counters.of(command.full_name).failed += 1
            return _refuse(node, error)
        if node.watchers:
            _transactions.note_change(node, session, command, arguments, reply)
        return _guarded(node, session, command, arguments, reply) if isinstance(reply, More) else reply

    more.rest = guarded
    return more


def _refuse(node: Node, error: CommandError) -> bytes:
    node.counters.errors += 1
    return encode_error(str(error))


def _look_up(arguments: list[Argument]) -> Command:
    """Return the row of a command or subcommand, in any case; raise CommandError if there is none."""
    command = _BY_NAME.get(bytes(arguments[0][:64]).lower())
    if command is None:
        shown = ""
        for argument in arguments[1:]:
            if len(shown) >= 128:
                break
            shown += f"'{quote(argument, 128 - len(shown))}' "
        raise CommandError(f"ERR unknown command '{quote(arguments[0], 128)}', with args beginning with: {shown}")
    if not command.subcommands or len(arguments) == 1:
        return command  # a command that has subcommands only is refused for its arity
    subcommand = _SUBCOMMANDS[command.name].get(bytes(arguments[1][:64]).lower())
    if subcommand is None:
        raise CommandError(f"ERR unknown subcommand '{quote(arguments[1], 128)}'. Try {command.name.upper()} HELP.")
    return subcommand
