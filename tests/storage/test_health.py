"""Health checks, draining and systemd notifications."""

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

from machine import NEVER_S, wait_for
from storage_support import Start, make_node

from shadowserve.pool.statistics import DeviceStatistics, Statistics
from storage_kv.operations import Operations


class DeviceEngine:
    """A store with devices only, some of them healthy."""

    def __init__(self, *healthy: bool) -> None:
        self.healthy = healthy

    def statistics(self) -> Statistics:
        states = ["ok" if each else "gone" for each in self.healthy]
        return Statistics(devices=tuple(DeviceStatistics(name=f"d{n}", state=state) for n, state in enumerate(states)))


def operations(store: Any) -> Operations:
    found = Operations(make_node(store))
    found.recovered, found.listening = True, "127.0.0.1:1"
    return found


def failed(found: Operations) -> list[str]:
    return [check.name for check in found.readiness() if check.failed]


def test_a_running_server_is_healthy_and_ready(start: Start) -> None:
    child = start("--metrics-port", "0")
    status, text = child.http("/healthz")
    assert status == 200
    assert re.search(
        r"^ok io thread 0: answered in .*\n(.*\n)*ok main loop: .*\n(.*\n)*ok lock: .*\nok\n\Z", text, re.M
    )
    status, text = child.http("/readyz")
    assert status == 200 and f"ok listening: on 127.0.0.1:{child.port}\n" in text and "ok recovery: done\n" in text


def test_before_recovery_and_while_draining_a_node_is_not_ready() -> None:
    found = operations(DeviceEngine(True))
    assert failed(found) == []
    found.recovered = False
    assert failed(found) == ["recovery"]
    found.recovered, found.draining, found.listening = True, True, ""
    assert failed(found) == ["listening", "draining"]


def test_one_healthy_device_is_enough_and_a_lost_one_is_a_warning() -> None:
    assert failed(operations(DeviceEngine())) == failed(operations(DeviceEngine(False, True))) == []
    assert "warning device d0: out of use" in map(str, operations(DeviceEngine(False, True)).readiness())
    assert failed(operations(DeviceEngine(False, False))) == ["devices"]


def test_a_blocked_loop_or_lock_is_detected_within_the_timeout() -> None:
    found = operations(DeviceEngine())
    found.loops = {"good": lambda call: call(), "stuck": lambda call: None}
    assert [check.name for check in found.health(timeout_s=0.01) if check.failed] == ["stuck"]
    with found.node.lock:
        assert [check.name for check in found.health(timeout_s=0.01) if check.failed] == ["stuck", "lock"]


def test_draining_serves_clients_and_fails_readiness(start: Start) -> None:
    child = start("--metrics-port", "0", "--drain-delay-s", str(NEVER_S))
    assert child.http("/readyz")[0] == 200
    child.process.send_signal(signal.SIGTERM)
    wait_for(lambda: child.http("/readyz")[0] == 503)
    assert "failed draining: yes" in child.http("/readyz")[1] and child.http("/healthz")[0] == 200
    with child.client() as late:
        assert late.call("SET", "a", "1") == b"OK"
        assert child.samples()["shadowserve_storage_draining"] == 1
        child.process.send_signal(signal.SIGTERM)  # ends the wait early
        assert late.receive_to_end() == b""
    assert child.wait() == 0 and any(" draining delay_s=" in line for line in child.log)


def test_recovered_keys_are_logged(start: Start, tmp_path: Path) -> None:
    device = json.dumps([{"path": str(tmp_path / "device"), "size": "16 MiB"}])
    flags = ("--devices", device, "--memory-budget-bytes", "8 MiB", "--metrics-port", "0")
    first = start(*flags)
    with first.client() as client:
        assert client.call("SET", "a", "1") == b"OK"
    assert first.stop() == 0
    second = start(*flags)
    samples = second.samples()
    assert samples["shadowserve_storage_recovered_keys"] == 1 and samples["shadowserve_storage_recovery_seconds"] > 0
    assert any(" volume_recovered " in line and " objects=1 " in line for line in second.log)


def test_the_drain_delay_ends(start: Start) -> None:
    assert start("--drain-delay-s", "0.05").stop() == 0


def notified(manager: socket.socket, what: str) -> str:
    """Return the first message that contains ``what``."""
    while True:
        message = manager.recv(4096).decode()
        if what in message.split("\n"):
            return message


def test_systemd_is_notified_of_readiness_watchdog_reloads_and_the_end(start: Start, manager: socket.socket) -> None:
    child = start(environment={"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "100000"})
    assert notified(manager, "READY=1") == f"READY=1\nSTATUS=serving on 127.0.0.1:{child.port}"
    notified(manager, "WATCHDOG=1")
    child.process.send_signal(signal.SIGHUP)
    assert "MONOTONIC_USEC=" in notified(manager, "RELOADING=1")
    notified(manager, "READY=1")
    child.process.send_signal(signal.SIGTERM)
    notified(manager, "STOPPING=1")
    assert child.wait() == 0
