"""The HTTP endpoint against hostile requests: slow ones, large ones, and web pages."""

import contextlib
import http.client
import socket
from collections.abc import Callable

import pytest
from storage_support import TIMEOUT_S, Child


@pytest.fixture
def observed(start: Callable[..., Child]) -> Child:
    return start("--metrics-port", "0")


def ask(child: Child, method: str = "GET", path: str = "/healthz", **headers: str) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", child.metrics_port, timeout=TIMEOUT_S)) as asked:
        asked.putrequest(method, path, skip_host=True)
        for name, value in headers.items():
            asked.putheader(name, value)
        asked.endheaders()
        return asked.getresponse().status


def test_unfinished_http_requests_do_not_block_probes(observed: Child) -> None:
    """Symptom: with sixteen of them /healthz did not answer, so an orchestrator would have restarted the node."""
    slow_clients = [socket.create_connection(("127.0.0.1", observed.metrics_port), TIMEOUT_S) for _ in range(40)]
    for slow_client in slow_clients:
        with contextlib.suppress(OSError):
            slow_client.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
    for _ in range(5):
        assert ask(observed, Host="localhost") == 200
    for slow_client in slow_clients:
        slow_client.close()


def test_a_request_has_a_deadline_and_a_size_as_a_whole(observed: Child) -> None:
    with socket.create_connection(("127.0.0.1", observed.metrics_port), TIMEOUT_S) as large:
        large.sendall(b"GET /healthz HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                large.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")
            assert b"200" not in large.recv(1 << 12)
    with socket.create_connection(("127.0.0.1", observed.metrics_port), TIMEOUT_S) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        slow.settimeout(1.0)
        closed = False
        while not closed:
            try:
                slow.sendall(b"X")
                closed = not slow.recv(1)
            except TimeoutError:
                pass
            except ConnectionError:
                closed = True


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9100", "127.0.0.1.evil.example", "localhost.evil", "["])
def test_a_web_page_with_dns_rebinding_reads_nothing(observed: Child, host: str) -> None:
    assert ask(observed, path="/metrics", Host=host) == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9100", "127.0.0.1:9100", "127.0.0.1", "[::1]:9100", "[::1]"])
def test_probes_of_this_machine_are_answered(observed: Child, host: str) -> None:
    assert ask(observed, path="/metrics", Host=host) == 200
    assert ask(observed) == 200, "a request without the header, as in HTTP/1.0"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "FLUSHALL"])
def test_the_http_endpoint_changes_nothing(observed: Child, method: str) -> None:
    assert ask(observed, method, Host="localhost") == 501
