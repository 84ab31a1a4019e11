"""The HTTP endpoint for those who operate a program: /metrics, /healthz and /readyz.

- ``/healthz``: whether the process works: its loops and threads answer within a bound. If not, restart it.
- ``/readyz``: whether it should be sent work: recovered, listening, not draining, storage healthy. If not, wait.

Both answer 200 or 503 with one line for each check, ``ok``, ``failed`` or ``warning``, its name and what was found. A
warning does not fail the whole. Answers are made by threads of their own, so that a program whose loops stand still is
found out and not waited for.

Nothing can be changed here, and yet not everybody may ask. A request has a deadline and a size as a whole; when all
threads are taken, the one that has waited longest for its request makes way, so that nobody who dribbles keeps a probe
out, which would have the program restarted. What comes over the loopback interface must name it, by number or as
localhost: a web page whose name has been made to lead there (DNS rebinding) reads nothing.
"""

import contextlib
import http.server
import io
import ipaddress
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shadowserve import systemd
from shadowserve.addresses import is_loopback

__all__ = ["HEALTH_TIMEOUT_S", "Check", "Endpoint", "Watchdog", "answers", "check"]

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S: Final = 5.0
"""How long a loop may take to answer. Work on it takes milliseconds; on a machine that swaps, longer."""

_REQUEST_TIMEOUT_S: Final = 10.0
_REQUESTS_MAX: Final = 16
_REQUEST_BYTES_MAX: Final = 16 << 10
_MAKING_WAY_S: Final = 1.0
_CONTENT_TYPE: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of what was looked at, such as ``engine thread``.
        ok: whether it is as it should be.
        text: what was found.
        fatal: whether the whole is not well if this is not.
    """

    name: str
    ok: bool
    text: str
    fatal: bool = True

    @property
    def failed(self) -> bool:
        """Whether this fails the whole."""
        return self.fatal and not self.ok

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'failed' if self.fatal else 'warning'} {self.name}: {self.text}"


Checks = Callable[[], Iterable[Check]]


def check(name: str, ok: bool, well: str, ill: str, *, fatal: bool = True) -> Check:
    """Return a check that found ``well`` if ``ok``, else ``ill``."""
    return Check(name, ok, well if ok else ill, fatal)


def answers(name: str, ask: Callable[[Callable[[], None]], Any], timeout_s: float = HEALTH_TIMEOUT_S) -> Check:
    """Check that a loop does what it is handed, within a bound.

    Args:
        name: of the loop.
        ask: hands a function to the loop, to be called there soon, such as ``loop.call_soon_threadsafe``.
        timeout_s: how long that may take.
    """
    answered = threading.Event()
    begin = time.monotonic()
    try:
        ask(answered.set)
    except (RuntimeError, OSError) as error:
        return Check(name, False, f"cannot be asked: {error}")
    if not answered.wait(timeout_s):
        return Check(name, False, f"no answer within {timeout_s:g} s")
    return Check(name, True, f"answered in {1000 * (time.monotonic() - begin):.1f} ms")


class Endpoint:
    """An HTTP server on threads of its own.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, health: Checks, ready: Checks) -> None:
        """Start serving; port 0 takes a free one.

        Raises:
            OSError: the address cannot be listened on.
        """
        self._server = _Server(host, port, registry, {"/healthz": health, "/readyz": ready})
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; requests under way are left to end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Watchdog:
    """Tells systemd's watchdog that the program is alive, as long as its health checks say so."""

    def __init__(self, health: Checks) -> None:
        """Start, if systemd wants to be told."""
        self._health = health
        self._stop = threading.Event()
        self._interval_s = systemd.watchdog_interval_s()
        self._thread: threading.Thread | None = None
        if self._interval_s is not None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            failed = [str(each) for each in self._health() if each.failed]
            if failed:
                _log.error("unhealthy checks=%r", "; ".join(failed))
            else:
                systemd.notify("WATCHDOG=1")

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    allow_reuse_port = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, registry: CollectorRegistry, checks: dict[str, Checks]) -> None:
        self.registry = registry
        self.checks = checks
        self._slots = threading.BoundedSemaphore(_REQUESTS_MAX)
        self._awaited: dict[socket.socket, None] = {}  # whose requests are still to come, the oldest first
        self._lock = threading.Lock()
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        """Bind, without the look-up of the host's name that HTTPServer would do."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; beyond the limit of them, another makes way; if all are being answered, hang up."""
        if not self._slots.acquire(blocking=False):
            self._make_way()
            if not self._slots.acquire(timeout=_MAKING_WAY_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._awaited[request] = None
        super().process_request(request, client_address)

    def _make_way(self) -> None:
        with self._lock:
            for oldest in self._awaited:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread finds the end, and closes it
                del self._awaited[oldest]
                return

    def note_request(self, request: Any) -> None:
        """Take note that a request has come, or that its client is gone."""
        with self._lock:
            self._awaited.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the slot back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.note_request(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong; a client that has gone is nothing."""
        _log.debug("http_failed address=%s", client_address, exc_info=True)


class _Request(io.RawIOBase):
    """What a client sends, until it is too much or too late."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._left = _REQUEST_BYTES_MAX
        self._ends_s = time.monotonic() + _REQUEST_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._left]
        patience_s = self._ends_s - time.monotonic()
        if not view or patience_s <= 0:
            raise TimeoutError("the request is too long, or too slow")
        self._socket.settimeout(patience_s)
        size = self._socket.recv_into(view)
        self._left -= size
        return size


def _names_loopback(host: str) -> bool:
    """Return whether a Host header names an address by number, or this machine as itself does."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower().rstrip(".") in ("localhost", "") or name.lower().endswith(".localhost")
    return True


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT_S
    server_version = "shadowserve"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection), 1024)

    def parse_request(self) -> bool:
        """Read the head of the request; answer it here if it is not to be answered otherwise."""
        well = super().parse_request()
        self.server.note_request(self.request)
        if well:
            self.connection.settimeout(_REQUEST_TIMEOUT_S)
            if is_loopback(str(self.connection.getsockname()[0])):
                hosts = self.headers.get_all("Host", [])
                if len(hosts) > 1 or not all(map(_names_loopback, hosts)):
                    self._answer(421, _CONTENT_TYPE, b"this address is called localhost, 127.0.0.1 or [::1]\n")
                    return False
        return well

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            try:
                body = encode(self.server.registry)
            except Exception:  # a collector's bug must be seen, here and by whoever scrapes
                _log.exception("metrics_failed")
                self._answer(500, _CONTENT_TYPE, b"the metrics cannot be collected; the log says why\n")
                return
            self._answer(200, content_type, body)
        elif path in self.server.checks:
            found = list(self.server.checks[path]())
            failed = any(each.failed for each in found)
            body = "".join(f"{line}\n" for line in (*found, "failed" if failed else "ok"))
            self._answer(503 if failed else 200, _CONTENT_TYPE, body.encode())
        else:
            self._answer(404, _CONTENT_TYPE, b"there are /metrics, /healthz and /readyz\n")

    do_HEAD = do_GET

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: a probe asks every second."""
