"""The rows of the command table. See :class:`~storage_kv.commands._command.Command`."""

from typing import Final

from storage_kv.commands import _acl, _config, _connection, _introspection, _keys, _kv, _server, _strings, _transactions
from storage_kv.commands._command import TABLE as TABLE
from storage_kv.commands._command import Command

_PLAIN: Final = "noscript loading stale"
_ADMIN: Final = f"admin {_PLAIN}"
_ANY_TIME: Final = f"{_PLAIN} fast allow_busy"
_BEFORE_LOGIN: Final = f"{_PLAIN} fast no_auth allow_busy"
_ONE_KEY: Final = (1, 1, 1)
_ALL_KEYS: Final = (1, -1, 1)
_PAIRS: Final = (1, -1, 2)
_SECOND: Final = (2, 2, 1)
_THIRD: Final = (3, 3, 1)
_VALUES: Final = (2, -1, 2)
_KEYSPACE: Final = ("keyspace",)
_ALL_AT_ONCE: Final = ("keyspace", "dangerous")


def _container(command: Command, *subcommands: Command) -> Command:
    """Add subcommands, and HELP, to a command; return it."""
    since = max(command.since, "5.0.0")
    help_ = Command("help", 2, "loading stale", _introspection.help, since, "Returns this text.")
    command.subcommands = [*subcommands, help_]
    return command


def _add(group: str, *commands: Command) -> None:
    """Add commands. Subcommands have the categories of the command or, if it has none, those of the group."""
    for command in commands:
        for subcommand in command.subcommands:
            subcommand.own_categories = command.own_categories or None
            subcommand.enter(group, command.name)
        command.enter(group)
        TABLE.commands.append(command)


_row: Final = Command

# fmt: off
_add(
    "string",
    _row("get", 2, "readonly fast", _strings.get, "1.0.0", "Returns the value of a key.", _ONE_KEY, "R"),
    _row("getdel", 2, "write fast", _strings.getdel, "6.2.0",
         "Returns the value of a key, and deletes the key.", _ONE_KEY, "RD"),
    _row("getex", -2, "write fast", _strings.getex, "6.2.0",
         "Returns the value of a key, and changes its time to live.", _ONE_KEY, "RW"),
    _row("getrange", 4, "readonly", _strings.getrange, "2.4.0", "Returns a part of the value of a key.", _ONE_KEY, "R"),
    _row("getset", 3, "write denyoom fast", _strings.getset, "1.0.0",
         "Sets the value of a key, and returns the one before.", _ONE_KEY, "RW", _SECOND),
    _row("kv.publish", -3, "write fast", _kv.publish, "0.1.0",
         "Marks keys as pending: they will be stored within some milliseconds.", (2, -1, 1), "W"),
    _row("kv.pending", -2, "readonly fast", _kv.pending, "0.1.0",
         "Returns for how many milliseconds more absent keys are pending.", _ALL_KEYS),
    _row("kv.layers", -5, "readonly", _kv.layers, "0.2.0",
         "Returns the records of a prefix layer by layer.", (4, -1, 1), "R"),
    _row("kv.load", 1, "readonly fast", _kv.load, "0.1.0",
         "Returns how many microseconds the bytes that wait for clients need on the link."),
    _row("kv.meta", -2, "readonly", _kv.meta, "0.1.0",
         "Returns the length and the header of each record; nil without one.", _ALL_KEYS, "R"),
    _row("kv.pin", -3, "write fast", _kv.pin, "0.1.0",
         "Protects keys from eviction for some seconds; 0 ends it.", (2, -1, 1), "W"),
    _row("kv.prefetch", -2, "readonly", _kv.prefetch, "0.2.0",
         "Begins to bring records from the bucket into the node.", _ALL_KEYS, "R"),
    _row("mget", -2, "readonly fast", _strings.mget, "1.0.0", "Returns the values of keys.", _ALL_KEYS, "R"),
    _row("mset", -3, "write denyoom", _strings.mset, "1.0.1", "Sets the values of keys.", _PAIRS, "W", _VALUES),
    _row("msetnx", -3, "write denyoom", _strings.msetnx, "1.0.1",
         "Sets the values of keys if none of them exists.", _PAIRS, "W", _VALUES),
    _row("psetex", 4, "write denyoom", _strings.setex, "2.6.0",
         "Sets the value of a key, and its time to live in milliseconds.", _ONE_KEY, "W", _THIRD),
    _row("set", -3, "write denyoom", _strings.set_, "1.0.0",
         "Sets the value of a key; a record never changes once it is set.", _ONE_KEY, "RW", _SECOND),
    _row("setex", 4, "write denyoom", _strings.setex, "2.0.0",
         "Sets the value of a key, and its time to live in seconds.", _ONE_KEY, "W", _THIRD),
    _row("setnx", 3, "write denyoom fast", _strings.setnx, "1.0.0",
         "Sets the value of a key if it does not exist.", _ONE_KEY, "W", _SECOND),
    _row("strlen", 2, "readonly fast", _strings.strlen, "2.2.0", "Returns the length of the value of a key.", _ONE_KEY),
    _row("substr", 4, "readonly", _strings.getrange, "1.0.0",
         "Returns a part of the value of a key: an old name of GETRANGE.", _ONE_KEY, "R"),
)
_add(
    "generic",
    _row("del", -2, "write", _keys.delete, "1.0.0", "Deletes keys.", _ALL_KEYS, "D"),
    _row("exists", -2, "readonly fast", _keys.exists, "1.0.0", "Counts which of the keys exist.", _ALL_KEYS),
    _row("expire", -3, "write fast", _keys.expire, "1.0.0",
         "Sets the time to live of a key in seconds.", _ONE_KEY, "W"),
    _row("expireat", -3, "write fast", _keys.expire, "1.2.0",
         "Sets when a key expires, in Unix time in seconds.", _ONE_KEY, "W"),
    _row("expiretime", 2, "readonly fast", _keys.expiry, "7.0.0",
         "Returns when a key expires, in Unix time in seconds.", _ONE_KEY, "R"),
    _row("keys", 2, "readonly", _keys.keys, "1.0.0",
         "Returns the keys that match a pattern.", own_categories=_ALL_AT_ONCE),
    _row("persist", 2, "write fast", _keys.persist, "2.2.0", "Removes the time to live of a key.", _ONE_KEY, "W"),
    _row("pexpire", -3, "write fast", _keys.expire, "2.6.0",
         "Sets the time to live of a key in milliseconds.", _ONE_KEY, "W"),
    _row("pexpireat", -3, "write fast", _keys.expire, "2.6.0",
         "Sets when a key expires, in Unix time in milliseconds.", _ONE_KEY, "W"),
    _row("pexpiretime", 2, "readonly fast", _keys.expiry, "7.0.0",
         "Returns when a key expires, in Unix time in milliseconds.", _ONE_KEY, "R"),
    _row("pttl", 2, "readonly fast", _keys.expiry, "2.6.0",
         "Returns the time to live of a key in milliseconds.", _ONE_KEY, "R"),
    _row("scan", -2, "readonly", _keys.scan, "2.8.0", "Iterates over the keys."),
    _row("touch", -2, "readonly fast", _keys.touch, "3.2.1",
         "Marks keys as used, and counts which of them exist.", _ALL_KEYS),
    _row("ttl", 2, "readonly fast", _keys.expiry, "1.0.0",
         "Returns the time to live of a key in seconds.", _ONE_KEY, "R"),
    _row("type", 2, "readonly fast", _keys.type_, "1.0.0",
         "Returns the type of the value of a key: string, or none.", _ONE_KEY),
    _row("unlink", -2, "write fast", _keys.delete, "4.0.0", "Deletes keys; the same as DEL here.", _ALL_KEYS, "D"),
)
_add(
    "transactions",
    _row("discard", 1, _ANY_TIME, _transactions.discard, "2.0.0", "Discards the commands since MULTI."),
    _row("exec", 1, "noscript loading stale skip_slowlog", _transactions.exec_, "1.2.0",
         "Executes the commands since MULTI, in order."),
    _row("multi", 1, _ANY_TIME, _transactions.multi, "1.2.0", "Queues the commands that follow until EXEC."),
    _row("unwatch", 1, _ANY_TIME, _transactions.unwatch, "2.2.0", "Ends all WATCH of the connection."),
    _row("watch", -2, _ANY_TIME, _transactions.watch, "2.2.0",
         "Makes EXEC execute nothing if one of the keys changes.", _ALL_KEYS),
)
_add(
    "connection",
    _row("auth", -2, _BEFORE_LOGIN, _connection.auth, "1.0.0", "Authenticates the connection."),
    _container(
        _row("client", -2, "", _introspection.help, "2.4.0",
             "A container for client connection commands.", own_categories=()),
        _row("getname", 2, _PLAIN, _connection.client_getname, "2.6.9", "Returns the name of the connection."),
        _row("id", 2, _PLAIN, _connection.client_id, "5.0.0", "Returns the unique client ID of the connection."),
        _row("info", 2, _PLAIN, _connection.client_info, "6.2.0", "Returns information about the connection."),
        _row("kill", -3, _ADMIN, _connection.client_kill, "2.4.0", "Ends connections, by address or by filters."),
        _row("list", -2, _ADMIN, _connection.client_list, "2.4.0", "Lists open connections."),
        _row("no-evict", 3, _ADMIN, _connection.client_no_evict, "7.0.0",
             "Accepted for compatibility, without effect."),
        _row("reply", 3, _PLAIN, _connection.client_reply, "3.2.0",
             "Switches the replies of the connection on, off, or off for the next command."),
        _row("setinfo", 4, _PLAIN, _connection.client_setinfo, "7.2.0",
             "Records the name and version of the client's library."),
        _row("setname", 3, _PLAIN, _connection.client_setname, "2.6.9", "Sets the name of the connection."),
    ),
    _row("echo", 2, "loading stale fast", _connection.echo, "1.0.0", "Returns the given string."),
    _row("hello", -1, _BEFORE_LOGIN, _connection.hello, "6.0.0",
         "Chooses the protocol, authenticates, and names the connection."),
    _row("kv.trace", -2, _ANY_TIME, _kv.trace, "0.2.0",
         "Names the caller's span that the next commands belong to."),
    _row("ping", -1, "fast", _connection.ping, "1.0.0", "Returns PONG, or the given string."),
    _row("quit", -1, _BEFORE_LOGIN, _connection.quit_, "1.0.0", "Closes the connection."),
    _row("reset", 1, _BEFORE_LOGIN, _connection.reset, "6.2.0", "Resets the connection."),
    _row("select", 2, "loading stale fast", _connection.select, "1.0.0", "Chooses the database: there is one, 0."),
)
_add(
    "server",
    _container(
        _row("acl", -2, "", _introspection.help, "6.0.0",
             "A container for access control commands.", own_categories=()),
        _row("cat", -2, _PLAIN, _introspection.acl_cat, "6.0.0",
             "Lists the categories, or the commands of one category."),
        _row("deluser", -3, _ADMIN, _acl.deluser, "6.0.0", "Deletes users and ends their connections."),
        _row("dryrun", -4, _ADMIN, _introspection.acl_dryrun, "7.0.0",
             "Checks the permission of a user to execute a command."),
        _row("genpass", -2, _PLAIN, _acl.genpass, "6.0.0", "Generates a password of random hexadecimal digits."),
        _row("getuser", 3, _ADMIN, _acl.getuser, "6.0.0", "Returns the rules of a user."),
        _row("list", 2, _ADMIN, _acl.list_, "6.0.0", "Returns the users as lines of a users file."),
        _row("load", 2, _ADMIN, _acl.load, "6.0.0", "Reads the users file again."),
        _row("log", -2, _ADMIN, _acl.log, "6.0.0", "Returns the last denials."),
        _row("save", 2, _ADMIN, _acl.save, "6.0.0", "Writes the users file."),
        _row("setuser", -3, _ADMIN, _acl.setuser, "6.0.0", "Creates or changes a user."),
        _row("users", 2, _ADMIN, _acl.users, "6.0.0", "Returns the names of the users."),
        _row("whoami", 2, _PLAIN, _acl.whoami, "6.0.0", "Returns the user of the connection."),
    ),
    _container(
        _row("command", -1, "loading stale", _introspection.command, "2.8.13",
             "Returns information about all commands.", own_categories=("connection",)),
        _row("count", 2, "loading stale", _introspection.command_count, "2.8.13", "Returns the number of commands."),
        _row("docs", -2, "loading stale", _introspection.command_docs, "7.0.0", "Returns documentation of commands."),
        _row("getkeys", -4, "loading stale", _introspection.command_getkeys, "2.8.13",
             "Returns the keys among the arguments of a command."),
        _row("info", -2, "loading stale", _introspection.command_info, "2.8.13", "Returns information about commands."),
        _row("list", -2, "loading stale", _introspection.command_list, "7.0.0", "Returns the names of commands."),
    ),
    _container(
        _row("config", -2, "", _introspection.help, "2.0.0",
             "A container for server configuration commands.", own_categories=()),
        _row("get", -3, _ADMIN, _config.config_get, "2.0.0", "Returns the values of configuration parameters."),
        _row("resetstat", 2, _ADMIN, _config.config_resetstat, "2.0.0", "Resets the counters of INFO."),
        _row("rewrite", 2, _ADMIN, _config.config_rewrite, "2.8.0",
             "Refused: the server does not write its configuration file."),
        _row("set", -4, _ADMIN, _config.config_set, "2.0.0", "Changes parameters while the server runs."),
    ),
    _row("dbsize", 1, "readonly fast", _keys.dbsize, "1.0.0", "Returns the number of keys.", own_categories=_KEYSPACE),
    _row("flushall", -1, "write", _keys.flush, "1.0.0", "Removes all keys.", own_categories=_ALL_AT_ONCE),
    _row("flushdb", -1, "write", _keys.flush, "1.0.0",
         "Removes all keys: there is one database.", own_categories=_ALL_AT_ONCE),
    _row("info", -1, "loading stale", _server.info, "1.0.0",
         "Returns information about the server by section.", own_categories=("dangerous",)),
    _row("kv.events", 3, "readonly", _kv.events, "0.2.0",
         "Returns which keys came and went since a position in the log of changes.", own_categories=_KEYSPACE),
    _row("kv.pins", -1, "readonly", _kv.pins, "0.2.0",
         "Returns how many keys and bytes are pinned, and may be.", own_categories=_KEYSPACE),
    _row("kv.unpin", -1, "write", _kv.unpin, "0.2.0",
         "Ends all pins of the tenant, or of other tenants.", own_categories=_KEYSPACE),
)
# fmt: on
