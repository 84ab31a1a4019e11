"""Changes the configuration of a running node: CONFIG SET, and the file read again on SIGHUP.

A change is all or nothing: the values are checked together, as at the start, and if a part of the node cannot apply
them, all parts return to the old values.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pydantic import ValidationError

from shadowserve.config_errors import explain
from shadowserve.errors import ConfigurationError
from shadowserve.logs import configure_logging
from shadowserve.memory_limit import check_memory
from storage_kv.config import LIVE, StorageConfig

_log = logging.getLogger(__name__)

_BUDGETS: Final = ("bytes_max", "objects_max", "write_bytes_per_day")

Hook = Callable[[StorageConfig, StorageConfig], None]


class Reconfiguration:
    """Changes a node's configuration and applies it to the parts that keep copies of it."""

    def __init__(self, config: StorageConfig, load: Callable[[], StorageConfig] | None = None) -> None:
        """Start with ``config``; ``load`` reads it again from its file and the environment."""
        self.config = config
        self._load = load
        self._hooks: dict[str, Hook] = {"log_level": _follow_log, "log_format": _follow_log}

    def follow(self, key: str, hook: Hook) -> None:
        """Call ``hook`` with the old and the new configuration, with the node's lock held, when ``key`` has changed.

        A hook that cannot apply it raises ConfigurationError or ValueError and has changed nothing.
        """
        self._hooks[key] = hook

    def change(self, values: Mapping[str, Any]) -> None:
        """Change all of some keys or, with a ConfigurationError, none. Needs the node's lock."""
        fixed = [key for key in values if key not in LIVE]
        if fixed:
            raise ConfigurationError(f"{fixed[0]} cannot change while the server runs")
        old = self.config
        try:
            new = type(old).model_validate({**old.model_dump(), **values})
        except ValidationError as error:
            raise ConfigurationError(explain(type(old), error.errors())) from None
        if not _same_devices(old, new):
            raise ConfigurationError(f"devices: only {', '.join(_BUDGETS)} can change while the server runs")
        self._adopt(new, [key for key in values if getattr(new, key) != getattr(old, key)])

    def reload(self, lock: threading.Lock) -> tuple[list[str], list[str]]:
        """Read the configuration again; return the applied keys, and those that need a restart. Takes ``lock``."""
        if self._load is None:
            raise ConfigurationError("this server was started without a configuration that it could read again")
        wanted = self._load()
        with lock:
            old = self.config
            differing = [key for key in type(old).model_fields if getattr(wanted, key) != getattr(old, key)]
            applied = [key for key in differing if key in LIVE and (key != "devices" or _same_devices(old, wanted))]
            self._adopt(old.model_copy(update={key: getattr(wanted, key) for key in applied}), applied)
        return applied, [key for key in differing if key not in applied]

    def _adopt(self, new: StorageConfig, changed: Collection[str]) -> None:
        if "memory_budget_bytes" in changed:
            check_memory({"memory_budget_bytes": int(new.memory_budget_bytes)})
        old, self.config = self.config, new
        hooks = list(dict.fromkeys(self._hooks[key] for key in changed if key in self._hooks))
        done: list[Hook] = []
        try:
            for hook in hooks:
                hook(old, new)
                done.append(hook)
        except (ConfigurationError, ValueError) as error:
            self.config = old
            for hook in done:
                hook(new, old)
            raise ConfigurationError(str(error)) from error


def _same_devices(old: StorageConfig, new: StorageConfig) -> bool:
    """Return True if two configurations have the same devices; their budgets may differ."""
    without = dict.fromkeys(_BUDGETS)
    return [each.model_copy(update=without) for each in old.devices] == [
        each.model_copy(update=without) for each in new.devices
    ]


def _follow_log(old: StorageConfig, new: StorageConfig) -> None:
    configure_logging(new.log_level, new.log_format)
