"""HTTP endpoint for operators: /metrics, /healthz and /readyz, and the page / for people (web_page.py).

- ``/healthz``: the process works: its loops and threads answer in time. If it fails, restart the process.
- ``/readyz``: the process can take work: recovered, listening, not draining, storage healthy. If it fails, wait.

Both answer 200 or 503, with one line per check: ``ok``, ``failed`` or ``warning``, the name, and the finding.

No client can delay a probe, which would cause a restart: one thread reads the requests of all connections
(http_front.py), another answers only /healthz and /readyz, and its answers fit the socket's buffer. Other threads
answer /metrics and the page, and others POST requests with a token. Requests over the loopback interface must name it
by IP address or as localhost, against web pages that use DNS rebinding.
"""

import contextlib
import functools
import hmac
import http.server
import io
import ipaddress
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shadowserve import systemd
from shadowserve.addresses import is_loopback
from shadowserve.http_front import Front, Request
from shadowserve.web_page import HEADERS, Page, Summaries, own_summaries

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S: Final = 5.0
"""Time for a loop to answer. It needs milliseconds, and more on a machine that swaps."""

_PROBES: Final = ("/healthz", "/readyz")
_PROBES_MAX: Final = 64
"""Waiting probes; further ones get 503."""
_OTHERS_THREADS: Final = 4
_OTHERS_MAX: Final = 16
"""Waiting requests for metrics; further ones get 503."""
_POSTS_THREADS: Final = 2
_POSTS_MAX: Final = 16
"""POST requests that are received, wait or run at a time; further ones get 503. It bounds the memory of bodies."""
_BODY_BYTES_MAX: Final = 2 << 20
_ANSWER_TIMEOUT_S: Final = 10.0
_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\ntoo many requests\n"
_CONTENT_TYPE: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str  # name of the checked part, such as ``engine thread``
    ok: bool  # true if the part is healthy
    text: str  # the finding
    fatal: bool = True  # true if a failure fails the whole answer; else it is a warning

    @property
    def failed(self) -> bool:
        """True if the check fails the whole answer."""
        return self.fatal and not self.ok

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'failed' if self.fatal else 'warning'} {self.name}: {self.text}"


Checks = Callable[[], Iterable[Check]]


@dataclass(frozen=True, slots=True)
class Posts:
    """POST requests that a program answers to clients that have the token.

    ``answer`` gets the path and the body, in a thread that it may block for some seconds, and returns status and JSON.
    """

    token: str
    paths: Collection[str]
    answer: Callable[[str, bytes], tuple[int, Any]]

    def allow(self, request: Request) -> bool:
        given = request.header("authorization")
        return hmac.compare_digest(given, b"Bearer " + self.token.encode())


def check(name: str, ok: bool, well: str, ill: str, *, fatal: bool = True) -> Check:
    """Return a check with the text ``well`` if ``ok``, else ``ill``."""
    return Check(name, ok, well if ok else ill, fatal)


def answers(name: str, ask: Callable[[Callable[[], None]], Any], timeout_s: float = HEALTH_TIMEOUT_S) -> Check:
    """Check that a loop runs a function in time; ``ask`` schedules it, such as ``loop.call_soon_threadsafe``."""
    answered = threading.Event()
    begin = time.monotonic()
    try:
        ask(answered.set)
    except (RuntimeError, OSError) as error:
        return Check(name, False, f"cannot be called: {error}")
    if not answered.wait(timeout_s):
        return Check(name, False, f"no answer within {timeout_s:g} s")
    return Check(name, True, f"answered in {1000 * (time.monotonic() - begin):.1f} ms")


class Endpoint:
    """HTTP server on its own threads."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        health: Checks = tuple,
        ready: Checks = tuple,
        summaries: Summaries | None = None,
        posts: Posts | None = None,
    ) -> None:
        """Start the server; port 0 selects a free port. OSError: it cannot listen on the address.

        ``summaries``: what the page shows; None: the program that has the registry.
        """
        self._registry = registry
        self._page = Page(summaries or own_summaries(registry))
        self._checks = dict(zip(_PROBES, (health, ready), strict=True))
        self._probes: queue.Queue[Request | None] = queue.Queue(_PROBES_MAX)
        self._others: queue.Queue[Request | None] = queue.Queue(_OTHERS_MAX)
        self._posted: queue.Queue[Request | None] = queue.Queue(_POSTS_MAX)
        self._posts = posts
        self._posts_open = threading.Semaphore(_POSTS_MAX)
        self._front = Front(host, port, self._take, self._admit)
        self.port = self._front.port  # TCP port of the server
        self._threads = [threading.Thread(target=self._answer_probes, name="health", daemon=True)]
        self._threads += [
            threading.Thread(target=self._answer_others, args=(self._others,), name=f"metrics-{number}", daemon=True)
            for number in range(_OTHERS_THREADS)
        ]
        self._threads += [
            threading.Thread(target=self._answer_others, args=(self._posted,), name=f"posts-{number}", daemon=True)
            for number in range(_POSTS_THREADS if posts is not None else 0)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the server; running requests complete."""
        self._front.close()
        with contextlib.suppress(queue.Full):
            self._probes.put(None, timeout=HEALTH_TIMEOUT_S)
        with contextlib.suppress(queue.Full):
            for _ in range(_OTHERS_THREADS):
                self._others.put_nowait(None)
        with contextlib.suppress(queue.Full):
            for _ in range(_POSTS_THREADS):
                self._posted.put_nowait(None)
        self._threads[0].join(HEALTH_TIMEOUT_S)

    def _admit(self, request: Request) -> int:
        """Return the length of the body to read: none without the token, or while too many others are received."""
        posts, length = self._posts, request.header("content-length")
        if posts is None or not request.data.startswith(b"POST ") or not posts.allow(request):
            return 0
        if not length.isdigit() or len(length) > 9 or int(length) > _BODY_BYTES_MAX:
            return 0
        if not self._posts_open.acquire(blocking=False):
            return 0
        request.on_close = self._posts_open.release
        return int(length)

    def _take(self, request: Request) -> None:
        takes = self._others
        if request.on_close is not None:
            takes = self._posted
        elif request.path in self._checks:
            takes = self._probes
        try:
            takes.put_nowait(request)
        except queue.Full:
            _send(request, _BUSY)

    def _answer_probes(self) -> None:
        while True:
            requests = [self._probes.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    requests.append(self._probes.get_nowait())
            for path, checks in self._checks.items():
                asked = [request for request in requests if request is not None and request.path == path]
                if not asked:
                    continue
                try:
                    found = list(checks())
                except Exception as error:  # a bug in a check must not end the thread
                    _log.exception("checks_failed")
                    found = [Check("checks", False, f"failed with an error: {error}")]
                for request in asked:
                    _send(request, self._answer(request, functools.partial(list, found)))
            if None in requests:
                return

    def _answer_others(self, requests: "queue.Queue[Request | None]") -> None:
        while (request := requests.get()) is not None:
            try:
                answer = self._answer(request, list)
            except Exception:
                _log.exception("http_failed")
                request.close()
                continue
            _send(request, answer, _ANSWER_TIMEOUT_S)

    def _answer(self, request: Request, checks: Checks) -> bytes:
        """Return the HTTP answer to a complete request."""
        return _Handler(request, checks, self._registry, self._page, self._posts).wfile.getvalue()


class Watchdog:
    """Notifies systemd's watchdog while the health checks succeed."""

    def __init__(self, health: Checks) -> None:
        """Start, if systemd has a watchdog for this process."""
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


def _send(request: Request, answer: bytes, timeout_s: float = 0.0) -> None:
    """Send an answer and close the connection; bytes not sent within the timeout are dropped."""
    with contextlib.suppress(OSError):
        request.socket.settimeout(timeout_s)
        request.socket.sendall(answer)
    request.close()


def _names_loopback(host: str) -> bool:
    """Return True if a Host header is an IP address or a name of localhost."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower().rstrip(".") in ("localhost", "") or name.lower().endswith(".localhost")
    return True


class _Handler(http.server.BaseHTTPRequestHandler):
    """Parses one complete request and makes the answer in memory."""

    server_version = "shadowserve"
    sys_version = ""
    wfile: io.BytesIO

    def __init__(
        self, request: Request, checks: Checks, registry: CollectorRegistry, page: Page, posts: Posts | None
    ) -> None:
        self._checks, self._registry, self._page = checks, registry, page
        self._request, self._posts = request, posts
        self._is_loopback = False
        with contextlib.suppress(OSError):
            self._is_loopback = is_loopback(str(request.socket.getsockname()[0]))
        self.rfile, self.wfile = io.BufferedReader(io.BytesIO(request.data)), io.BytesIO()
        self.client_address = (request.address, 0)
        self.close_connection = True
        self.handle_one_request()

    def parse_request(self) -> bool:
        """Parse the request's header; refuse a request over loopback with another host name."""
        well = super().parse_request()
        if well and self._is_loopback:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) > 1 or not all(map(_names_loopback, hosts)):
                self._reply(421, _CONTENT_TYPE, b"use localhost, 127.0.0.1 or [::1] as the host name\n")
                return False
        return well

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            try:
                body = encode(self._registry)
            except Exception:  # a collector's bug must be visible in the log and to the scraper
                _log.exception("metrics_failed")
                self._reply(500, _CONTENT_TYPE, b"the metrics cannot be collected; see the log\n")
                return
            self._reply(200, content_type, body)
        elif path in _PROBES:
            checked = list(self._checks())
            failed = any(each.failed for each in checked)
            body = "".join(f"{line}\n" for line in (*checked, "failed" if failed else "ok"))
            self._reply(503 if failed else 200, _CONTENT_TYPE, body.encode())
        elif (found := self._page.answer(path)) is not None:
            self._reply(200, *found)
        else:
            self._reply(404, _CONTENT_TYPE, b"known paths: /, /metrics, /healthz and /readyz\n")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        posts, path = self._posts, self.path.partition("?")[0]
        if posts is None:
            self.send_error(501, "Unsupported method ('POST')")
            return
        status, answer = 404, {"error": f"known paths: {', '.join(posts.paths)}"}
        if path not in posts.paths:
            pass
        elif not posts.allow(self._request):
            status, answer = 401, {"error": "send the header 'Authorization: Bearer TOKEN' with the configured token"}
        elif not self._request.header("content-length").isdigit():
            status, answer = 411, {"error": "send a Content-Length"}
        elif int(self._request.header("content-length")[:20]) > _BODY_BYTES_MAX:
            status, answer = 413, {"error": f"a body has at most {_BODY_BYTES_MAX} bytes"}
        elif self._request.on_close is None:
            status, answer = 503, {"error": "too many requests"}
        else:
            try:
                status, answer = posts.answer(path, self._request.body)
            except Exception:  # a bug must be visible in the log and to the caller
                _log.exception("post_failed path=%s", path)
                status, answer = 500, {"error": "this failed; see the log"}
        self._reply(status, "application/json", json.dumps(answer).encode())

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: probes come every second."""
