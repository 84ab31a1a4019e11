"""A small S3 server for tests: real HTTP on loopback, with faults on request.

It keeps one bucket in memory and serves the storage node's requests: PUT with ``If-None-Match: *``, GET of ranges,
lists, DELETE, all by path. It checks no signatures; Ceph RGW does (``tests/storage/test_object_storage.py``). Run as a
program it serves until SIGTERM.
"""

import hashlib
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "kv-test"
PIECE = 64 << 10  # bytes per step of a slow link
PAGE = 3  # objects per list: small, so that lists have pages


@dataclass
class Asked:
    """One request: ``operation`` is list, get, put or delete; ``range`` is [first, end) or None; the last field is the
    key id of its signature.
    """

    operation: str
    name: str
    range: tuple[int, int] | None = None
    key_id: str = ""


@dataclass
class Answer:
    """A wrong answer.

    Attributes:
        status: HTTP status; 0 for the right one.
        code: S3's error code.
        body: Body; None for the right one.
        truncate: Bytes of the body after which the connection ends.
        after: Event to wait for before the answer.
    """

    status: int = 0
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    truncate: int | None = None
    after: threading.Event | None = None


Fault = Callable[[Asked], Answer | None]


def _to_reads(answer: Answer) -> Fault:
    return lambda asked: answer if asked.operation == "get" else None


def _same_length(asked: Asked) -> Answer | None:
    if asked.operation != "get" or asked.range is None:
        return None
    return Answer(206, body=b"y" * (asked.range[1] - asked.range[0]))


LIES: dict[str, Fault] = {
    "denied": _to_reads(Answer(403, "AccessDenied")),
    "expired": _to_reads(Answer(400, "ExpiredToken")),
    "skewed": _to_reads(Answer(403, "RequestTimeTooSkewed")),
    "absent": _to_reads(Answer(404, "NoSuchKey")),
    "precondition": _to_reads(Answer(412, "PreconditionFailed")),
    "slow_down": _to_reads(Answer(503, "SlowDown")),
    "broken": _to_reads(Answer(500, "InternalError")),
    "moved": _to_reads(Answer(301, "PermanentRedirect")),
    "redirected": _to_reads(Answer(307, "TemporaryRedirect", {"Location": "http://127.0.0.1:1/elsewhere"})),
    "truncated": _to_reads(Answer(206, truncate=1000)),
    "wrong_range": _to_reads(Answer(206, headers={"Content-Range": "bytes 0-99/100000"})),
    "no_range": _to_reads(Answer(200)),
    "another_body": _to_reads(Answer(206, body=b"x" * 4096)),
    "same_length": _same_length,
}
"""Refusals, and bytes that no request contains."""


class FaultyS3:
    """The server.

    Attributes:
        objects: Objects by name, prefix included.
        asked: All requests so far.
        fault: Returns the answer to a request; None for the right one.
        skew_s: Time by which its clock is ahead.
        encodes: True if lists have URL-encoded names on request.
        bytes_per_s: Rate of all reads together; 0 for no limit.
    """

    def __init__(self, certificates: Path | None = None) -> None:
        """Serve; with TLS if a folder with the server's certificate is given."""
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, float] = {}
        self.asked: list[Asked] = []
        self.fault: Fault = lambda asked: None
        self.skew_s = 0.0
        self.encodes = True
        self.bytes_per_s = 0.0
        self._gates: list[threading.Event] = []
        self._link_free = 0.0  # time at which the link has sent all bytes
        self.lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            server_of_tests = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "http"
        if certificates is not None:
            self._scheme = "https"
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
            # Not in accept(): a client that refuses the certificate would end the server there.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def hold(self, operation: str) -> threading.Event:
        """Answer no request of an operation before the returned event is set. It is set at the end of the server."""
        self._gates.append(gate := threading.Event())
        self.fault = lambda asked: Answer(after=gate) if asked.operation == operation else None
        return gate

    def count(self, operation: str) -> int:
        """Return the number of requests of an operation."""
        return sum(asked.operation == operation for asked in self.asked)

    def carry(self, size: int) -> None:
        """Wait until the link has sent this number of further bytes."""
        if self.bytes_per_s:
            with self.lock:
                self._link_free = max(self._link_free, time.monotonic()) + size / self.bytes_per_s
                free = self._link_free
            while self.bytes_per_s and (left := free - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def faulty_s3(certificates: Path | None = None) -> Iterator[FaultyS3]:
    server = FaultyS3(certificates)
    try:
        yield server
    finally:
        server.close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """No-op: clients may disconnect at their deadline."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_tests: FaultyS3

    def log_message(self, *_: Any) -> None:
        """No-op."""

    def _do(self) -> None:
        own = self.server_of_tests
        url = urlsplit(self.path)
        name = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        words = {"PUT": "put", "DELETE": "delete"}
        operation = words.get(self.command) or ("get" if name else "list")
        span = None
        if (text := self.headers.get("Range")) is not None:
            first, _, last = text.removeprefix("bytes=").partition("-")
            span = int(first), int(last) + 1
        _, _, signer = self.headers.get("Authorization", "").partition("Credential=")
        asked = Asked(operation, name, span, signer.partition("/")[0])
        own.asked.append(asked)
        fault = own.fault(asked)
        if fault is not None and fault.after is not None:
            fault.after.wait(60)
        if fault is not None and fault.status >= 300:
            self._error(fault.status, fault.code, fault.headers)
            return
        with own.lock:
            status, headers, content = getattr(self, f"_{operation}")(asked, parse_qs(url.query), body)
        if fault is not None:
            status = fault.status or status
            headers |= fault.headers
            content = content if fault.body is None else fault.body
        self._send(status, headers, content, None if fault is None else fault.truncate)

    do_GET = do_PUT = do_DELETE = _do  # noqa: N815

    def _send(self, status: int, headers: dict[str, str], content: bytes, truncate: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        content = content if truncate is None else content[:truncate]
        for begin in range(0, len(content), PIECE):
            if self.command == "GET":
                self.server_of_tests.carry(len(content[begin : begin + PIECE]))
            self.wfile.write(content[begin : begin + PIECE])
        if truncate is not None:
            self.close_connection = True

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as configured</Message></Error>"
        self._send(status, headers or {}, text.encode())

    # ---- Correct answers

    def _put(self, asked: Asked, _: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        own = self.server_of_tests
        if self.headers.get("If-None-Match") == "*" and asked.name in own.objects:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        own.objects[asked.name] = body
        own.written[asked.name] = 1_800_000_000.0 + len(own.written)
        return 200, {"ETag": _etag(body)}, b""

    def _get(self, asked: Asked, _: Any, __: bytes) -> tuple[int, dict[str, str], bytes]:
        found = self.server_of_tests.objects.get(asked.name)
        if found is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        headers = {"ETag": _etag(found), "Last-Modified": formatdate(1_800_000_000, usegmt=True)}
        if asked.range is None:
            return 200, headers, found
        begin, end = asked.range[0], min(asked.range[1], len(found))
        if begin >= end:
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        return 206, headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(found)}"}, found[begin:end]

    def _delete(self, asked: Asked, _: Any, __: bytes) -> tuple[int, dict[str, str], bytes]:
        self.server_of_tests.objects.pop(asked.name, None)
        return 204, {}, b""

    def _list(self, _: Asked, query: dict[str, list[str]], __: bytes) -> tuple[int, dict[str, str], bytes]:
        own = self.server_of_tests
        prefix, behind = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        names = sorted(name for name in own.objects if name.startswith(prefix) and name > behind)
        encodes = own.encodes and query.get("encoding-type") == ["url"]
        found = "<EncodingType>url</EncodingType>" if encodes else ""
        for name in names[:PAGE]:
            size, when = len(own.objects[name]), _iso(own.written.get(name, 1_800_000_000.0) + own.skew_s)
            key = quote(name) if encodes else escape(name)
            found += f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{when}</LastModified>"
            found += f"<ETag>{_etag(own.objects[name])}</ETag></Contents>"
        more = len(names) > PAGE
        token = f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>" if more else ""
        text = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{found}"
        return 200, {"Content-Type": "application/xml"}, f"<ListBucketResult>{text}</ListBucketResult>".encode()


@lru_cache(8)
def _etag(body: bytes) -> str:
    return f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


if __name__ == "__main__":
    with faulty_s3() as forever:
        print(f"ready {forever.endpoint.removeprefix('http://')}", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
