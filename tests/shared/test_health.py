"""The HTTP endpoint for operators and their programs, and the notifications to systemd."""

import contextlib
import http.client
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from machine import WAIT_MAX_S, wait_for
from prometheus_client import CollectorRegistry, Gauge

from shadowserve import systemd
from shadowserve.health import Check, Endpoint, Watchdog, answers, check

Get = Callable[..., tuple[int, str, str]]


def request(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Return status, content type and body; without a header that is not given, not even ``Host``."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_MAX_S)) as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read().decode()


@pytest.fixture
def checks() -> list[Check]:
    return [Check("loop", True, "answers")]


@pytest.fixture
def endpoint(checks: list[Check]) -> Iterator[Endpoint]:
    registry = CollectorRegistry()
    Gauge("things", "How many.", registry=registry).set(3)
    endpoint = Endpoint("127.0.0.1", 0, registry, health=lambda: checks, ready=lambda: [check("a", False, "", "no")])
    yield endpoint
    endpoint.close()


def test_health_and_readiness_are_lines_and_a_status(endpoint: Endpoint, checks: list[Check]) -> None:
    assert request(endpoint.port, "/healthz")[::2] == (200, "ok loop: answers\nok\n")
    checks.append(Check("disk", False, "slow", fatal=False))
    assert request(endpoint.port, "/healthz?x=1")[::2] == (200, "ok loop: answers\nwarning disk: slow\nok\n")
    checks.append(Check("thread", False, "gone"))
    assert request(endpoint.port, "/healthz")[0] == 503
    assert request(endpoint.port, "/readyz")[::2] == (503, "failed a: no\nfailed\n")
    assert request(endpoint.port, "/readyz", method="HEAD")[::2] == (503, "")


def test_metrics_come_in_the_format_that_was_asked_for(endpoint: Endpoint) -> None:
    status, kind, body = request(endpoint.port, "/metrics")
    assert status == 200 and kind.startswith("text/plain") and "things 3.0" in body and "# EOF" not in body
    status, kind, body = request(endpoint.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200 and kind.startswith("application/openmetrics-text") and body.endswith("# EOF\n")


def test_other_paths_and_methods_are_refused(endpoint: Endpoint) -> None:
    assert request(endpoint.port, "/../health.py")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "FLUSHALL"):
        assert request(endpoint.port, "/metrics", method, Host="localhost")[0] == 501, method


def test_only_names_of_this_machine_are_served(endpoint: Endpoint) -> None:
    """A web page reads nothing by DNS rebinding."""
    for host in ("evil.example", "evil.example:9100", "127.0.0.1.evil.example", "localhost.evil", "["):
        assert request(endpoint.port, "/metrics", Host=host)[0] == 421, host
    for host in ("localhost", "LOCALHOST:9100", "127.0.0.1:9100", "127.0.0.1", "[::1]:9100", "[::1]"):
        assert request(endpoint.port, "/metrics", Host=host)[0] == 200, host
    assert request(endpoint.port, "/metrics")[0] == 200, "a request without the header, as in HTTP/1.0"


def test_a_collector_that_fails_is_an_error_and_not_the_end(endpoint: Endpoint) -> None:
    class Broken:
        def collect(self) -> list[object]:
            raise ValueError("broken")

    registry = CollectorRegistry()
    registry.register(Broken())
    broken = Endpoint("127.0.0.1", 0, registry, health=list, ready=list)
    assert request(broken.port, "/metrics")[0] == 500 and request(broken.port, "/healthz")[0] == 200
    broken.close()


def test_connections_that_ask_nothing_neither_block_nor_pile_up(endpoint: Endpoint) -> None:
    held = [socket.create_connection(("127.0.0.1", endpoint.port), WAIT_MAX_S) for _ in range(140)]
    try:
        assert held[0].recv(1) == b""  # beyond the limit of one address: the oldest is closed
    finally:
        for each in held:
            each.close()

    def works() -> bool:
        try:
            return request(endpoint.port, "/healthz")[0] == 200
        except (ConnectionError, http.client.HTTPException):
            return False

    wait_for(works)


def test_300_slow_connections_that_come_back_delay_no_answer(endpoint: Endpoint, checks: list[Check]) -> None:
    """Symptom: slow clients delayed /healthz by 8 s. Probes from other addresses are answered while they reconnect."""
    stopped, rounds = threading.Event(), [0]

    def slow() -> None:
        held: list[socket.socket] = []
        while not stopped.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", endpoint.port), WAIT_MAX_S, ("127.0.0.2", 0)))
                held[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
            if len(held) > 100:
                held.pop(0).close()
            rounds[0] += 1
        for each in held:
            each.close()

    threads = [threading.Thread(target=slow) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: rounds[0] > 300)
        answered, asked = 0, rounds[0]
        while answered < 20 or rounds[0] < asked + 1000:  # meanwhile many clients connect repeatedly
            assert request(endpoint.port, "/healthz")[0] == 200
            answered += 1
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def test_metrics_that_nobody_reads_and_checks_that_take_long_keep_no_probe_waiting() -> None:
    registry, go_on, looked = CollectorRegistry(), threading.Event(), threading.Semaphore(0)

    class Large:
        def collect(self) -> Iterator[Gauge]:
            looked.release()
            go_on.wait(WAIT_MAX_S)
            return iter(())

    registry.register(Large())
    endpoint = Endpoint("127.0.0.1", 0, registry, health=lambda: [Check("loop", True, "answers")], ready=list)
    held = []
    try:
        go_on.clear()
        for _ in range(30):
            held.append(socket.create_connection(("127.0.0.1", endpoint.port), WAIT_MAX_S))
            held[-1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert request(endpoint.port, "/healthz")[0] == 200
        answered = select.select(held, [], [], WAIT_MAX_S)[0]  # requests may be read in another order
        assert b" 503 " in answered[0].recv(1 << 12), "a client beyond the limit must get a status"
    finally:
        go_on.set()
        for each in held:
            each.close()
        endpoint.close()


def test_a_taken_port_is_an_error(endpoint: Endpoint) -> None:
    with pytest.raises(OSError, match="in use"):
        Endpoint("127.0.0.1", endpoint.port, CollectorRegistry(), health=list, ready=list)


def test_a_loop_that_does_not_answer_is_found_out() -> None:
    assert answers("loop", lambda call: call()).ok
    silent = answers("loop", lambda call: None, timeout_s=0.01)
    assert silent.failed and silent.text == "no answer within 0.01 s"

    def closed(call: Callable[[], None]) -> None:
        raise RuntimeError("Event loop is closed")

    assert answers("loop", closed).text == "cannot be called: Event loop is closed"


def test_systemd_is_notified_at_its_socket(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert systemd.notify("READY=1", "STATUS=serving")
    assert manager.recv(1024) == b"READY=1\nSTATUS=serving"
    for nobody in ("", "relative", f"{os.environ['NOTIFY_SOCKET']}.gone"):
        monkeypatch.setenv("NOTIFY_SOCKET", nobody)
        assert not systemd.notify("READY=1")


def test_the_watchdog_is_fed_while_all_is_well(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    well = threading.Event()
    well.set()
    asked = threading.Event()

    def health() -> list[Check]:
        asked.set()
        return [check("loop", well.is_set(), "answers", "silent")]

    watchdog = Watchdog(health)
    try:
        assert manager.recv(1024) == b"WATCHDOG=1"
        well.clear()
        asked.clear()
        assert asked.wait(WAIT_MAX_S)
        watchdog.close()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:  # earlier messages
                assert manager.recv(1024) == b"WATCHDOG=1"
    finally:
        watchdog.close()


@pytest.mark.parametrize(("name", "value"), [("WATCHDOG_PID", "1"), ("WATCHDOG_USEC", "many"), ("WATCHDOG_USEC", "0")])
def test_nobody_else_s_watchdog_is_fed(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    monkeypatch.setenv(name, value)
    assert systemd.watchdog_interval_s() is None
    Watchdog(list).close()


def test_a_request_has_a_size_and_a_deadline(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_connection(("127.0.0.1", endpoint.port), WAIT_MAX_S) as large,
        contextlib.suppress(ConnectionError),
    ):
        large.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * (17 << 10))
        assert large.recv(1) == b""
    monkeypatch.setattr("shadowserve.http_front._REQUEST_TIMEOUT_S", 0.1)
    with socket.create_connection(("127.0.0.1", endpoint.port), WAIT_MAX_S) as slow:
        slow.sendall(b"GET")
        assert slow.recv(1) == b""
