"""Reader of HTTP requests: one thread reads all connections, and no connection can block it.

A connection has a deadline and a size limit for its request; a body is read only if the program admits it. The number
of connections without a complete request is limited, in total and per address; over the limit the oldest one of the
address with most is closed. Other threads answer complete requests, so slow answers do not delay reading.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S: Final = 10.0
_REQUEST_BYTES_MAX: Final = 16 << 10
_AWAITED_MAX: Final = 128
_AWAITED_OF_ADDRESS_MAX: Final = 96
_BACKLOG: Final = 511
_ACCEPTS_PER_TURN: Final = 64
_RECEIVE_BYTES: Final = 4 << 10
_RECEIVE_BODY_BYTES: Final = 64 << 10
_RETRY_S: Final = 0.1
"""Pause of accepting connections when the process has no descriptors left."""


class Request:
    """A connection and its request, complete or not."""

    __slots__ = ("address", "body_bytes", "data", "ends_s", "on_close", "socket")

    def __init__(self, sock: socket.socket, address: str, now_s: float) -> None:
        self.socket = sock  # socket of the connection
        self.address = address  # client's address without port
        self.data = bytearray()  # received bytes
        self.body_bytes: int | None = None  # length of the admitted body; None while the header is incomplete
        self.on_close: Callable[[], None] | None = None  # called once, when the connection closes
        self.ends_s = now_s + _REQUEST_TIMEOUT_S

    @property
    def path(self) -> str:
        """Requested path without query; empty if the first line is not HTTP."""
        words = bytes(self.data[:_REQUEST_BYTES_MAX]).split(b"\n", 1)[0].split()
        return words[1].partition(b"?")[0].decode("latin-1") if len(words) >= 2 else ""

    @property
    def head_bytes(self) -> int:
        """Length of the header with its empty line; 0 while it is incomplete."""
        ends = [at + len(end) for end in (b"\r\n\r\n", b"\n\n") if (at := self.data.find(end)) >= 0]
        return min(ends, default=0)

    def header(self, name: str) -> bytes:
        """Return the value of the first header line with a name (in lower case); empty without one."""
        for line in bytes(self.data[: self.head_bytes]).splitlines()[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.encode():
                return value.strip()
        return b""

    @property
    def body(self) -> bytes:
        begin = self.head_bytes
        return bytes(self.data[begin : begin + (self.body_bytes or 0)])

    @property
    def closed(self) -> bool:
        return self.socket.fileno() < 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


class Front:
    """A listening socket and the thread that reads requests."""

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Request], None],
        admit: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        """Start to listen; ``answer`` gets each complete request in the reading thread, and must not block.

        ``admit`` gets a request whose header is complete, and returns how long a body is read.
        """
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]  # TCP port of the socket
        self._answer, self._admit = answer, admit
        self._awaited: dict[str, dict[socket.socket, Request]] = {}  # by address, the oldest first
        self._count = 0
        self._stopped = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accepts_again_s = 0.0
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for of_address in list(self._awaited.values()):
            for request in list(of_address.values()):
                self._hang_up(request)
        self._selector.close()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._turn()
            except Exception:  # a bug must not leave the program without health answers
                _log.exception("http_failed")
                time.sleep(_RETRY_S)

    def _turn(self) -> None:
        timeout_s = 1.0 if self._count else None
        if self._accepts_again_s:
            timeout_s = _RETRY_S
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Request):
                if not key.data.closed:  # closed by an accept of this turn, which made room for a newer connection
                    self._read(key.data)
            elif key.fileobj is self._listener:
                self._accept()
        now_s = time.monotonic()
        if self._accepts_again_s and now_s >= self._accepts_again_s:
            self._accepts_again_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        for of_address in list(self._awaited.values()):
            for request in list(of_address.values()):
                if request.ends_s > now_s:
                    break
                self._hang_up(request)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # without descriptors the listener stays readable, and the thread would spin
                _log.warning("http_accept_failed error=%r retry_s=%g", str(error), _RETRY_S)
                self._selector.unregister(self._listener)
                self._accepts_again_s = time.monotonic() + _RETRY_S
                return
            sock.setblocking(False)
            request = Request(sock, str(address[0]), time.monotonic())
            of_address = self._awaited.setdefault(request.address, {})
            of_address[sock] = request
            self._count += 1
            self._selector.register(sock, selectors.EVENT_READ, request)
            self._read(request)  # the request usually arrives with the connection
            if len(of_address) > _AWAITED_OF_ADDRESS_MAX or self._count > _AWAITED_MAX:
                most = of_address if len(of_address) > _AWAITED_OF_ADDRESS_MAX else self._largest()
                self._hang_up(next(iter(most.values())))

    def _largest(self) -> dict[socket.socket, Request]:
        return max(self._awaited.values(), key=len)

    def _read(self, request: Request) -> None:
        try:
            data = request.socket.recv(_RECEIVE_BODY_BYTES if request.body_bytes else _RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        request.data += data
        if not data or len(request.data) > _REQUEST_BYTES_MAX + (request.body_bytes or 0):
            self._hang_up(request)
            return
        if request.body_bytes is None and request.head_bytes:
            request.body_bytes = self._admit(request)
        if request.body_bytes is not None and len(request.data) >= request.head_bytes + request.body_bytes:
            self._forget(request)
            self._answer(request)

    def _forget(self, request: Request) -> None:
        self._selector.unregister(request.socket)
        of_address = self._awaited[request.address]
        del of_address[request.socket]
        if not of_address:
            del self._awaited[request.address]
        self._count -= 1

    def _hang_up(self, request: Request) -> None:
        self._forget(request)
        request.close()
