"""The HTTP endpoint, systemd notifications, recovery at the start, and reloading the configuration."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from shadowserve import systemd
from shadowserve.errors import ConfigurationError
from shadowserve.health import Endpoint, Watchdog
from storage_kv.node import Node
from storage_kv.operate.health import Condition
from storage_kv.operate.metrics import NodeCollector

_log = logging.getLogger(__name__)


class Operations:
    """Operation of a server; ``condition`` is its state for health checks."""

    def __init__(self, node: Node) -> None:
        self.condition = Condition(node)
        self._node = node
        self._endpoint: Endpoint | None = None
        self._watchdog: Watchdog | None = None

    @property
    def metrics_port(self) -> int | None:
        return self._endpoint.port if self._endpoint else None

    def start(self) -> None:
        """Serve the HTTP endpoint, if configured. Call it before recovery."""
        config = self._node.config
        if config.metrics_port is None:
            return
        registry = CollectorRegistry()
        registry.register(NodeCollector(self._node, self.condition))
        try:
            self._endpoint = Endpoint(
                config.metrics_host,
                config.metrics_port,
                registry,
                health=self.condition.health,
                ready=self.condition.readiness,
            )
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics on {config.metrics_host} port {config.metrics_port}: {error}; choose "
                "another metrics_port, or none"
            ) from error

    def watch(self, name: str, hand: Callable[[Callable[[], None]], Any]) -> None:
        """Add a loop or thread to the health checks; ``hand`` makes it call a function soon."""
        self.condition.loops[name] = hand

    def recover(self) -> None:
        """Start the store, which recovers its keys: seconds for millions of objects."""
        systemd.notify("STATUS=recovering")
        node, condition = self._node, self.condition
        begin_s = time.monotonic()
        node.store.start(node.lock)
        condition.recovery_s = time.monotonic() - begin_s
        with node.lock:
            condition.recovered_keys = node.store.statistics().keys
        condition.recovered = True
        if condition.recovered_keys:
            _log.info("recovered keys=%d seconds=%.3f", condition.recovered_keys, condition.recovery_s)

    def serving(self, where: str) -> None:
        """Report that clients can connect."""
        self.condition.listening = where
        self._watchdog = Watchdog(self.condition.health)
        systemd.notify("READY=1", f"STATUS=serving on {where}")

    def draining(self) -> None:
        """Report that the server is stopping."""
        self.condition.draining = True
        systemd.notify("STOPPING=1", "STATUS=draining")

    def reload(self) -> None:
        """Read the configuration again in another thread, and log the result."""
        threading.Thread(target=self._reload, name="reload", daemon=True).start()

    def _reload(self) -> None:
        systemd.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            if not self.condition.recovered:
                raise ConfigurationError("the store is recovering; send the signal again when the server is ready")
            done = self._node.reconfiguration.reload(self._node.lock)
        except ConfigurationError as error:
            _log.error("configuration_refused error=%r hint='nothing has changed'", str(error))
        else:
            _log.info("configuration_reloaded applied=%r needs_restart=%r", ",".join(done.applied), ",".join(done.kept))
        systemd.notify("READY=1")

    def close(self) -> None:
        """Stop the endpoint. Must not run in a loop that health checks wait for."""
        self.condition.listening = ""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._endpoint is not None:
            self._endpoint.close()
