"""Health and readiness of the storage node."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shadowserve.health import HEALTH_TIMEOUT_S, Check, answers, check
from storage_kv.node import Node


@dataclass(eq=False)
class Condition:
    """State of the node for health checks, which run in threads of their own.

    ``loops``: loops and threads that must answer, by name: a function that makes them call a function soon.
    """

    node: Node
    loops: dict[str, Callable[[Callable[[], None]], Any]] = field(default_factory=dict)
    recovered: bool = False
    recovery_s: float = 0.0
    recovered_keys: int = 0
    listening: str = ""
    draining: bool = False

    def health(self, timeout_s: float = HEALTH_TIMEOUT_S) -> list[Check]:
        """Check within ``timeout_s`` that every loop answers and the node's lock becomes free."""
        found: dict[str, Check] = {}

        def check_loop(name: str, hand: Callable[[Callable[[], None]], Any]) -> None:
            found[name] = answers(name, hand, timeout_s)

        # In parallel, so that several blocked loops do not exceed a probe's timeout.
        threads = [threading.Thread(target=check_loop, args=each, daemon=True) for each in list(self.loops.items())]
        for thread in threads:
            thread.start()
        free = self.node.lock.acquire(timeout=timeout_s)
        if free:
            self.node.lock.release()
        for thread in threads:
            thread.join()
        lock = check("lock", free, "comes free", f"held for more than {timeout_s:g} s")
        return [*(found[name] for name in sorted(found)), lock]

    def readiness(self) -> list[Check]:
        """Check that clients are served: healthy, recovered, listening, not draining, with a healthy device."""
        healthy = self.health()
        store = self.node.store.statistics() if self.recovered else None
        devices = () if store is None else store.devices
        bucket = None if store is None else store.cold
        healthy_devices = [device.name for device in devices if device.healthy]
        return [
            *healthy,
            check("recovery", self.recovered, "done", "in progress"),
            check("listening", bool(self.listening), f"on {self.listening}", "no"),
            check("draining", not self.draining, "no", "yes: the server is stopping"),
            check(
                "devices",
                bool(healthy_devices) or not devices,
                f"{len(healthy_devices)} of {len(devices)} healthy"
                if devices
                else "none configured: values are in memory",
                f"none of {len(devices)} is healthy",
            ),
            *(Check(f"device {each.name}", False, "out of use", fatal=False) for each in devices if not each.healthy),
            *([] if bucket is None else [Check("bucket", bucket.up, str(bucket), fatal=False)]),
        ]
