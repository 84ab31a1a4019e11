"""What probes are told of the storage node: whether its threads work, and whether it should be sent clients."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shadowserve.health import HEALTH_TIMEOUT_S, Check, answers, check
from storage_kv.node import Node


@dataclass(eq=False)
class Condition:
    """How the node is. The server keeps it; probes read it from threads of their own, never from one of its loops.

    Attributes:
        node: the node.
        loops: name of each loop or thread that must answer, and how to hand it a function.
        recovered: the store has found again what it kept; nothing is asked of it before.
        recovery_s: how long that took.
        recovered_keys: how many keys there were.
        listening: the addresses, empty before and after.
        draining: it has been told to stop.
    """

    node: Node
    loops: dict[str, Callable[[Callable[[], None]], Any]] = field(default_factory=dict)
    recovered: bool = False
    recovery_s: float = 0.0
    recovered_keys: int = 0
    listening: str = ""
    draining: bool = False

    def health(self, timeout_s: float = HEALTH_TIMEOUT_S) -> list[Check]:
        """Check that every loop answers and the node's lock comes free, all within one bound."""
        found: dict[str, Check] = {}

        def ask(name: str, hand: Callable[[Callable[[], None]], Any]) -> None:
            found[name] = answers(name, hand, timeout_s)

        # At the same time: one after the other, those that stand still would add up beyond every probe's patience.
        askers = [threading.Thread(target=ask, args=each, daemon=True) for each in list(self.loops.items())]
        for asker in askers:
            asker.start()
        free = self.node.lock.acquire(timeout=timeout_s)
        if free:
            self.node.lock.release()
        for asker in askers:
            asker.join()
        lock = check("lock", free, "comes free", f"held for more than {timeout_s:g} s")
        return [*(found[name] for name in sorted(found)), lock]

    def readiness(self) -> list[Check]:
        """Check whether clients are served: health, and recovered, listening, not draining, with a healthy device."""
        healthy = self.health()
        store = self.node.store.statistics() if self.recovered else None
        devices = () if store is None else store.devices
        bucket = None if store is None else store.cold
        well = [device.name for device in devices if device.healthy]
        return [
            *healthy,
            check("recovery", self.recovered, "done", "under way"),
            check("listening", bool(self.listening), f"on {self.listening}", "no"),
            check("draining", not self.draining, "no", "yes: it has been told to stop"),
            check(
                "devices",
                bool(well) or not devices,
                f"{len(well)} of {len(devices)} healthy" if devices else "none configured: values are in memory",
                f"none of {len(devices)} is healthy",
            ),
            *(Check(f"device {each.name}", False, "out of use", fatal=False) for each in devices if not each.healthy),
            *([] if bucket is None else [Check("bucket", bucket.up, str(bucket), fatal=False)]),
        ]
