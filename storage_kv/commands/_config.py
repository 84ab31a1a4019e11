"""CONFIG: shows and changes the configuration of a running node.

Parameters are the keys of ``configs/storage.yaml`` and, for Redis clients, Redis' names of the same. Secrets are
neither shown nor changed.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

from pydantic import SecretStr

from shadowserve.errors import ConfigurationError
from shadowserve.resp import Map, Value, encode
from storage_kv.commands._arguments import OK, quote, syntax_error
from storage_kv.config import LIVE, StorageConfig
from storage_kv.counters import Counters
from storage_kv.glob import Glob
from storage_kv.node import Node
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session

_MEMORY: Final = re.compile(r"(\d+)(b|kb?|mb?|gb?)?", re.IGNORECASE)
_FACTORS: Final = {"k": 1000, "kb": 1 << 10, "m": 1000**2, "mb": 1 << 20, "g": 1000**3, "gb": 1 << 30}
_LEVELS: Final = {"debug": "debug", "verbose": "info", "notice": "info", "warning": "warning"}


def _memory(text: str) -> int:
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ConfigurationError("argument must be a memory value")
    return int(match[1]) * _FACTORS.get((match[2] or "").lower(), 1)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError("argument couldn't be parsed into an integer") from None


def _level(text: str) -> str:
    if text.lower() not in _LEVELS:
        raise ConfigurationError(f"argument(s) must be one of the following: {', '.join(_LEVELS)}")
    return _LEVELS[text.lower()]


_REDIS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "loglevel": ("log_level", _level),
    "maxclients": ("connections_max", _number),
    "maxmemory": ("memory_budget_bytes", _memory),
    "timeout": ("idle_timeout_s", _number),
}
"""Redis' names of changeable parameters: the key here, and the parser of its value."""


def _parameters(node: Node) -> dict[bytes, object]:
    """Return all parameters of CONFIG GET."""
    config = node.config
    own = {
        key.encode(): _shown(getattr(config, key))
        for key, field in type(config).model_fields.items()
        if field.repr and field.annotation is not SecretStr
    }
    written = config.log_level.replace("error", "warning")
    level = next(name for name, ours in reversed(_LEVELS.items()) if ours == written)
    return own | {
        b"appendonly": "no",
        b"bind": config.host,
        b"databases": 1,
        b"loglevel": level,
        b"maxclients": config.connections_max,
        b"maxmemory": int(config.memory_budget_bytes),
        b"maxmemory-policy": "allkeys-lru",
        b"port": node.server.port,
        b"proto-max-bulk-len": int(config.bulk_bytes_max),
        b"protected-mode": "yes" if config.protected_mode else "no",
        b"save": "",
        b"tcp-keepalive": 300,
        b"timeout": int(config.idle_timeout_s),
    }


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return str(value)


def config_get(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    found: dict[bytes, bytes] = {}  # each parameter once, and its spelling in the reply
    parameters = _parameters(node)
    for pattern in map(bytes, arguments[2:]):
        if pattern.lower() in parameters:  # a name and no pattern: returned as spelled
            found.setdefault(pattern.lower(), pattern)
            continue
        glob = Glob(pattern, ignore_case=True)
        for name in filter(glob.matches, parameters):
            found.setdefault(name, name)
    fields: list[Value] = []
    for name, spelling in found.items():
        fields += [spelling, str(parameters[name]).encode()]
    return encode(Map(fields), session.protocol)


def config_set(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CONFIG SET parameter value [parameter value ...]: changes all of them or none."""
    if len(arguments) % 2:
        syntax_error()
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for argument, text in zip(arguments[2::2], arguments[3::2], strict=True):
        name = bytes(argument).decode("utf-8", "replace").lower()
        key, value = _read(node, name, argument, bytes(text).decode("utf-8", "replace"))
        if key in values:
            raise _refused(name, "duplicate parameter")
        values[key], names[key] = value, name
    try:
        node.reconfiguration.change(values)
    except ConfigurationError as error:
        at_fault = next((names[key] for key in values if key in str(error)), next(iter(names.values())))
        raise _refused(at_fault, str(error)) from error
    return OK


def _read(node: Node, name: str, argument: Argument, text: str) -> tuple[str, Any]:
    """Return the key of a parameter, and the parsed value."""
    if name.encode() not in _parameters(node):
        raise CommandError(f"ERR Unknown option or number of arguments for CONFIG SET - '{quote(argument)}'")
    try:
        if name in _REDIS:
            key, read = _REDIS[name]
            return key, read(text)
        if name in LIVE:
            return name, StorageConfig.read_text(name, text)
    except ConfigurationError as error:
        raise _refused(name, str(error)) from error
    raise _refused(name, "can't set immutable config")


def _refused(name: str, why: str) -> CommandError:
    text = " ".join(f"ERR CONFIG SET failed (possibly related to argument '{name}') - {why}".split())
    return CommandError(text)


def config_rewrite(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CONFIG REWRITE: refused, because a client could misuse a server that can write its configuration."""
    raise CommandError(
        "ERR CONFIG REWRITE is not supported: the server does not write its configuration file. Change the file, then "
        "send the server SIGHUP to read it again"
    )


def config_resetstat(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CONFIG RESETSTAT: resets the node's counters, not those of the store."""
    node.counters = Counters()
    return OK
