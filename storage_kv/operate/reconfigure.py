"""Changing the configuration of a node that runs: CONFIG SET, and the file read again on SIGHUP.

Of the keys of :class:`StorageConfig`, those in :data:`LIVE` can change. A change is all or nothing: the values are
checked together, as at the start, and where a part of the node cannot follow, what has changed is changed back.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from shadowserve.errors import ConfigurationError
from shadowserve.logs import configure_logging
from shadowserve.pool.terms import DEFAULT_TENANT
from storage_kv.access.limits import RateLimiter
from storage_kv.config import LIVE, StorageConfig, TenantLimits
from storage_kv.node import Node

__all__ = ["Reconfiguration", "Reload"]

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
    """Changes a node's configuration and tells those parts that do not look at it each time."""

    def __init__(self, node: Node, load: Callable[[], StorageConfig] | None = None) -> None:
        """Make the one of ``node``; ``load`` reads the configuration again, as at the start."""
        self._node = node
        self._load = load
        self._hooks: dict[str, Hook] = {
            "log_level": _follow_log,
            "log_format": _follow_log,
            "memory_budget_bytes": self._follow_pool,
            "tenants": self._follow_tenants,
            "devices": self._follow_pool,
            "scrub_bytes_per_s": self._follow_pool,
            "pin_share": self._follow_pins,
            "pin_share_of_tenant": self._follow_pins,
        }
        self._tenants = node.config.tenants
        node.change_configuration = self.change

    def follow(self, key: str, hook: Hook) -> None:
        """Have ``hook`` called, with the node's lock held, with the new configuration whenever ``key`` has changed.

        A hook that cannot follow raises ConfigurationError or ValueError and has changed nothing.
        """
        self._hooks[key] = hook

    def _follow_pool(self, config: StorageConfig) -> None:
        self._node.store.follow(config.pool)

    def _follow_tenants(self, config: StorageConfig) -> None:
        """Give tenants their new limits; those that are named no more have none."""
        node, now_s = self._node, time.monotonic()
        for name in {**self._tenants, **config.tenants}:
            limits = config.tenants.get(name, TenantLimits())
            tenant = node.store.tenant(name) if name else DEFAULT_TENANT
            node.store.set_quota(tenant, limits.bytes_max, limits.keys_max)
        node.limiters = {
            # What a tenant has used up stays used up unless its limits have changed.
            name: node.limiters[name] if self._tenants.get(name) == limits else RateLimiter(limits, now_s)
            for name, limits in config.tenants.items()
        }
        self._tenants = config.tenants
        for session in node.sessions.values():
            node.limit(session)

    def _follow_pins(self, config: StorageConfig) -> None:
        self._node.store.set_pin_shares(config.pin_share_of_tenant, config.pin_share)

    def change(self, values: Mapping[str, Any]) -> None:
        """Change keys, all or none; with the node's lock held.

        Raises:
            ConfigurationError: a key cannot be changed, or not to this value.
        """
        fixed = [key for key in values if key not in LIVE]
        if fixed:
            raise ConfigurationError(f"{fixed[0]} cannot change while the server runs")
        old = self._node.config
        try:
            new = type(old).model_validate({**old.model_dump(), **values})
        except ValidationError as error:
            raise ConfigurationError("; ".join(_explain(detail) for detail in error.errors())) from None
        if not _same_devices(old, new):
            raise ConfigurationError(f"devices: of these, only {', '.join(_BUDGETS)} can change while the server runs")
        self._adopt(new, [key for key in values if getattr(new, key) != getattr(old, key)])

    def reload(self) -> Reload:
        """Read the configuration again and apply what can be; without the node's lock, which this takes.

        Raises:
            ConfigurationError: the configuration cannot be read, or not be applied; nothing has changed.
        """
        if self._load is None:
            raise ConfigurationError("there is no configuration to read again: this server was started without one")
        wanted = self._load()
        with self._node.lock:
            old = self._node.config
            differing = [key for key in type(old).model_fields if getattr(wanted, key) != getattr(old, key)]
            applied = [key for key in differing if key in LIVE and (key != "devices" or _same_devices(old, wanted))]
            self._adopt(old.model_copy(update={key: getattr(wanted, key) for key in applied}), applied)
        return Reload(applied, [key for key in differing if key not in applied])

    def _adopt(self, new: StorageConfig, changed: Iterable[str]) -> None:
        old = self._node.config
        self._node.config = new
        hooks = list(dict.fromkeys(self._hooks[key] for key in changed if key in self._hooks))
        done: list[Hook] = []
        try:
            for hook in hooks:
                hook(new)
                done.append(hook)
        except (ConfigurationError, ValueError) as error:
            self._node.config = old
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


def _explain(detail: Any) -> str:
    return ": ".join((*map(str, detail["loc"]), str(detail["msg"])))
