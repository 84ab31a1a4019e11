"""An HTTP client for untrusted servers: each answer has a deadline and a size limit, and redirects are not followed."""

import http.client
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shadowserve.errors import ConfigurationError, ShadowServeError

_CONNECT_S: Final = 2.0
_ERROR_BYTES_MAX: Final = 16 << 10
_PIECE_BYTES: Final = 64 << 10
_IDLE_MAX: Final = 64
_IDLE_S: Final = 20.0
"""Time that an idle connection is kept: servers close theirs after a minute or less."""


class OversizeError(ShadowServeError):
    """A body is larger than allowed, or does not have the required length."""


class Answer(NamedTuple):
    """A complete answer. ``body``: of an error, its beginning."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


class _Timed(socket.socket):
    """A socket whose operations end at a deadline, however slowly bytes arrive."""

    deadline_s = 0.0

    def set_timeout(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left_s)

    def recv_into(self, *arguments: Any) -> int:
        self.set_timeout()
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self.set_timeout()  # without TLS it covers the whole call; with TLS, sendall() calls send() for each part
        super().sendall(*arguments)

    def send(self, *arguments: Any) -> int:
        self.set_timeout()
        return super().send(*arguments)


class _TimedTls(_Timed, ssl.SSLSocket):
    """The same with TLS."""


class _Connection(http.client.HTTPConnection):
    """One connection: to the server, or to it through a proxy."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None, tunnel: tuple[str, int] | None) -> None:
        super().__init__(*address)
        self._address = address
        self._tls = tls
        self._through = tunnel
        self.idle_since_s = 0.0

    def open(self, deadline_s: float) -> None:
        """Connect; OSError, and TimeoutError among these, if that fails."""
        plain = socket.create_connection(self._address, min(_CONNECT_S, max(0.01, deadline_s - time.monotonic())))
        sock = _Timed(fileno=plain.detach())
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.deadline_s, name = deadline_s, self._address[0]
            if self._through is not None:
                name = self._through[0]
                _open_tunnel(sock, *self._through)
            if self._tls is not None:
                sock.set_timeout()
                wrapped = self._tls.wrap_socket(sock, server_hostname=name)
                assert isinstance(wrapped, _Timed), "the context is not of tls_context()"
                sock = wrapped
        except BaseException:
            sock.close()
            raise
        self.sock = sock

    @property
    def timed(self) -> _Timed:
        assert isinstance(self.sock, _Timed)
        return self.sock


def _open_tunnel(timed: _Timed, host: str, port: int) -> None:
    timed.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode("ascii"))
    response = http.client.HTTPResponse(timed, method="CONNECT")
    response.begin()
    if response.status != http.HTTPStatus.OK:
        raise OSError(f"the proxy refuses: {response.status}")


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return a context that checks servers' certificates, with ``ca_file`` besides the system's authorities."""
    context = ssl.create_default_context()
    context.sslsocket_class = _TimedTls
    if ca_file is not None:
        try:
            context.load_verify_locations(cadata=ca_file.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(f"s3.ca_file: cannot read {ca_file}: {error}; name a PEM file") from error
    return context


class HttpClient:
    """Connections to one server. request() may be called by any number of threads."""

    def __init__(self, endpoint: str, tls: ssl.SSLContext | None = None) -> None:
        """Make a client for the server of a URL, without connecting; ConfigurationError if the URL cannot be used."""
        try:
            url = urlsplit(endpoint)
            is_tls, host, port = url.scheme == "https", url.hostname or "", url.port
            if not host or url.scheme not in ("http", "https"):
                raise ValueError("it has no host")
        except ValueError as error:
            raise ConfigurationError(f"s3.endpoint: {endpoint!r}: {error}; write https://HOST:PORT") from None
        self.host = f"[{host}]" if ":" in host else host
        if port is not None and port != (443 if is_tls else 80):
            self.host += f":{port}"
        address = host, port or (443 if is_tls else 80)
        self._tls = (tls or tls_context(None)) if is_tls else None
        self._address, self._tunnel, self._absolute = address, None, ""
        proxy = urlsplit(getproxies().get(url.scheme, ""))
        if proxy.hostname and not proxy_bypass(host):
            self._address = proxy.hostname, proxy.port or 80
            self._tunnel = address if is_tls else None
            self._absolute = "" if is_tls else f"http://{self.host}"
        self._idle: deque[_Connection] = deque()
        self._is_closed = False
        self._lock = threading.Lock()

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: "bytes | bytearray" = b"",
        *,
        deadline_s: float,
        bytes_max: int,
        length: int | None = None,
    ) -> Answer:
        """Send a request and return the answer.

        Args:
            target: Path and query, encoded.
            headers: Headers besides ``Host`` and ``Content-Length``.
            deadline_s: Monotonic time at which the call ends, whatever the server does.
            bytes_max: Most bytes of a successful answer's body.
            length: Required length of such a body; None for any.

        Raises:
            OSError: The server cannot be reached, or ends the connection; TimeoutError among these.
            http.client.HTTPException: The answer is not HTTP.
            OversizeError: A body is larger than ``bytes_max``, or not of ``length`` bytes.
        """
        connection = self._take()
        reused = connection is not None
        while True:
            if connection is None:
                connection = _Connection(self._address, self._tls, self._tunnel)
                connection.open(deadline_s)
            try:
                connection.timed.deadline_s = deadline_s
                answer, is_whole = self._exchange(connection, method, target, headers, body, bytes_max, length)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                connection.close()
                if not reused:
                    raise
                connection, reused = None, False  # the server has closed the idle connection
                continue
            except BaseException:
                connection.close()
                raise
            self._give_back(connection, is_whole)
            return answer

    def _exchange(
        self,
        connection: _Connection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: "bytes | bytearray",
        bytes_max: int,
        length: int | None,
    ) -> tuple[Answer, bool]:
        """Return an answer, and whether the connection can be used again."""
        connection.putrequest(method, self._absolute + target, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", self.host)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body or method in ("PUT", "POST"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        if body:
            connection.timed.sendall(body)
        response = connection.getresponse()
        try:
            if response.status >= http.HTTPStatus.MULTIPLE_CHOICES:
                data = _body(response, _ERROR_BYTES_MAX, None, cuts=True)
            else:
                data = _body(response, bytes_max, length)
            is_whole = response.isclosed() and not response.will_close
        finally:
            response.close()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data), is_whole

    def _take(self) -> _Connection | None:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if time.monotonic() - connection.idle_since_s < _IDLE_S:
                    return connection
                connection.close()
        return None

    def _give_back(self, connection: _Connection, is_whole: bool) -> None:
        if not is_whole or connection.sock is None:
            connection.close()
            return
        connection.idle_since_s = time.monotonic()
        with self._lock:
            if len(self._idle) < _IDLE_MAX and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close idle connections; those in use are closed after their answer."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()


def _body(response: http.client.HTTPResponse, bytes_max: int, length: int | None, *, cuts: bool = False) -> bytearray:
    """Return a body of at most ``bytes_max`` bytes; ``cuts``: the beginning of a longer one."""
    wanted = bytes_max if length is None else length
    declared = response.length  # None for a chunked body, or one up to the end of the connection
    if declared is None:
        data = _read_pieces(response, wanted) if length is None else _read_into(response, wanted)
        if len(data) == wanted and not cuts and response.read(1):
            raise OversizeError(f"a body of more than {wanted} bytes")
    else:
        if not cuts and (declared > bytes_max or (length is not None and declared != length)):
            raise OversizeError(f"a body of {declared} bytes instead of {wanted}")
        size = min(bytes_max, declared)
        data = _read_into(response, size)
        if len(data) < size:
            raise http.client.IncompleteRead(b"", size - len(data))
    if length is not None and len(data) != length:
        raise OversizeError(f"a body of {len(data)} bytes instead of {length}")
    return data


def _read_into(response: http.client.HTTPResponse, size: int) -> bytearray:
    data, received = bytearray(size), 0
    with memoryview(data) as view:
        while received < size and (more := response.readinto(view[received:])):
            received += more
    del data[received:]
    return data


def _read_pieces(response: http.client.HTTPResponse, size: int) -> bytearray:
    """Return up to ``size`` bytes, with memory for what comes only."""
    data = bytearray()
    while len(data) < size and (piece := response.read(min(_PIECE_BYTES, size - len(data)))):
        data += piece
    return data
