"""Changing the configuration of a node that runs: CONFIG SET, and the file read again on SIGHUP.

Of the keys of :class:`StorageConfig`, those in :data:`LIVE` can change. A change is all or nothing: the values are
checked together, as at the start, and where a part of the node cannot follow, what has changed is changed back.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from shadowserve.config_errors import explain
from shadowserve.errors import ConfigurationError
from shadowserve.logs import configure_logging
from shadowserve.memory_limit import check_memory
from storage_kv.config import LIVE, StorageConfig

_log = logging.getLogger(__name__)

_BUDGETS: Final = ("bytes_max", "objects_max", "write_bytes_per_day")

Hook = Callable[[StorageConfig], None]


@dataclass(frozen=True, slots=True)
class Reload:
    """What reading the configuration again has led to.

    Attributes:
        applied: keys that have changed.
        kept: keys that differ and can change only by a restart.
    """

    applied: list[str]
    kept: list[str]


class Reconfiguration:
    """Changes a node's configuration and tells those parts that do not look at it each time.

    Attributes:
        config: as it is now.
    """

    def __init__(self, config: StorageConfig, load: Callable[[], StorageConfig] | None = None) -> None:
        """Begin with ``config``; ``load`` reads it again, as at the start."""
        self.config = config
        self._load = load
        self._hooks: dict[str, Hook] = {"log_level": _follow_log, "log_format": _follow_log}

    def follow(self, key: str, hook: Hook) -> None:
        """Have ``hook`` called, with the node's lock held, with the new configuration whenever ``key`` has changed.

        A hook that cannot follow raises ConfigurationError or ValueError and has changed nothing.
        """
        self._hooks[key] = hook

    def change(self, values: Mapping[str, Any]) -> None:
        """Change keys, all or none; with the node's lock held.

        Raises:
            ConfigurationError: a key cannot be changed, or not to this value.
        """
        fixed = [key for key in values if key not in LIVE]
        if fixed:
            raise ConfigurationError(f"{fixed[0]} cannot change while the server runs")
        old = self.config
        try:
            new = type(old).model_validate({**old.model_dump(), **values})
        except ValidationError as error:
            raise ConfigurationError(explain(type(old), error.errors())) from None
        if not _same_devices(old, new):
            raise ConfigurationError(f"devices: of these, only {', '.join(_BUDGETS)} can change while the server runs")
        self._adopt(new, [key for key in values if getattr(new, key) != getattr(old, key)])

    def reload(self, lock: threading.Lock) -> Reload:
        """Read the configuration again and apply what can be; without ``lock``, the node's, which this takes.

        Raises:
            ConfigurationError: the configuration cannot be read, or not be applied; nothing has changed.
        """
        if self._load is None:
            raise ConfigurationError("there is no configuration to read again: this server was started without one")
        wanted = self._load()
        with lock:
            old = self.config
            differing = [key for key in type(old).model_fields if getattr(wanted, key) != getattr(old, key)]
            applied = [key for key in differing if key in LIVE and (key != "devices" or _same_devices(old, wanted))]
            self._adopt(old.model_copy(update={key: getattr(wanted, key) for key in applied}), applied)
        return Reload(applied, [key for key in differing if key not in applied])

    def _adopt(self, new: StorageConfig, changed: Collection[str]) -> None:
        if "memory_budget_bytes" in changed:
            check_memory({"memory_budget_bytes": int(new.memory_budget_bytes)})
        old, self.config = self.config, new
        hooks = list(dict.fromkeys(self._hooks[key] for key in changed if key in self._hooks))
        done: list[Hook] = []
        try:
            for hook in hooks:
                hook(new)
                done.append(hook)
        except (ConfigurationError, ValueError) as error:
            self.config = old
            for hook in done:
                hook(old)
            raise ConfigurationError(str(error)) from error


def _same_devices(old: StorageConfig, new: StorageConfig) -> bool:
    """Return whether two configurations have the same devices, but for their budgets."""
    without = dict.fromkeys(_BUDGETS)
    return [each.model_copy(update=without) for each in old.devices] == [
        each.model_copy(update=without) for each in new.devices
    ]


def _follow_log(config: StorageConfig) -> None:
    configure_logging(config.log_level, config.log_format)
