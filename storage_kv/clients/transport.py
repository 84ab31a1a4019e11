"""Bytes to and from a client's socket, in the clear or through TLS, behind one interface.

Python's ``SSLSocket`` encrypts at most one record of 16 KiB in each call and has no gathering send. It holds decrypted
bytes that the kernel does not report. A read may have to wait until the socket is writable, and the reverse: TLS 1.3
changes its keys in the middle of a connection.

So the plain transport is the socket's own methods. The TLS transport repeats calls until a buffer is full, an iovec is
sent, or it must wait. It joins only small parts into one record, and encrypts large parts from where they are stored.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

_Socket: TypeAlias = socket.socket

_RECORD_BYTES: Final = 16 << 10
"""Limit of the plaintext in a TLS record."""
_JOINED_PART_BYTES_MAX: Final = 4 << 10
"""Smaller parts are joined into one record; larger ones are sent from where they are."""
_BYTES_PER_CALL_MAX: Final = 512 << 10
"""Limit of one call, so that a client with a fast network does not block the other clients of its thread."""
_HANDSHAKE_RECORD: Final = 0x16


class PlainClientError(ConnectionError):
    """A client does not begin with TLS, and this server requires it."""


class Transport(Protocol):
    """A non-blocking socket. Calls raise BlockingIOError where they would have to wait.

    Attributes:
        is_secure: It uses TLS.
        read_wants_write: A read continues when the socket is writable.
        write_wants_read: A write continues when the socket is readable.
    """

    is_secure: bool
    read_wants_write: bool
    write_wants_read: bool

    def recv_into(self, view: memoryview, /) -> int:
        """Read into ``view``; return the number of bytes, 0 at the end of the stream."""

    def recv(self, size_max: int, /) -> bytes:
        """Return at most ``size_max`` received bytes; empty at the end of the stream."""

    def send(self, data: bytes, /) -> int:
        """Send what the kernel takes; return the number of bytes."""

    def sendmsg(self, parts: Sequence[bytes | memoryview], /) -> int:
        """Send buffers in order, as far as the kernel takes them; return the number of bytes."""

    @property
    def socket(self) -> _Socket:
        """The socket to close at the end."""

    def pending(self) -> int:
        """Return the number of readable bytes that the kernel does not report."""

    def shake_hands(self) -> bool:
        """Continue the handshake; return True when it is done. Raises OSError if it has failed."""

    def end(self) -> None:
        """Close the sending side. Further input is read in the clear, to be dropped."""

    def user_name(self) -> str:
        """Return the user named by the client's certificate: its common name or first DNS name; empty for none."""


class PlainTransport:
    """The socket itself."""

    __slots__ = ("is_secure", "read_wants_write", "recv", "recv_into", "send", "sendmsg", "socket", "write_wants_read")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.recv: Callable[[int], bytes] = sock.recv
        self.send: Callable[[bytes], int] = sock.send
        self.sendmsg: Callable[[Sequence[bytes | memoryview]], int] = sock.sendmsg
        self.is_secure = self.read_wants_write = self.write_wants_read = False

    def pending(self) -> int:
        return 0

    def shake_hands(self) -> bool:
        return True

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def user_name(self) -> str:
        return ""


class TlsTransport:
    """A socket under TLS."""

    __slots__ = ("_is_tls", "is_secure", "read_wants_write", "socket", "write_wants_read")

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Wrap a non-blocking socket, before its handshake. The wrapper owns the descriptor.

        Raises:
            OSError: The client has disconnected; the socket is closed.
        """
        self.socket = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._is_tls = False
        self.is_secure = True
        self.read_wants_write = self.write_wants_read = False

    def shake_hands(self) -> bool:
        """Continue the handshake; return True when it is done.

        Raises:
            PlainClientError: The client does not speak TLS.
            OSError: The handshake has failed, or the client has disconnected.
        """
        self.read_wants_write = False
        if not self._is_tls:
            with contextlib.suppress(BlockingIOError):
                first = socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
                if first and first[0] != _HANDSHAKE_RECORD:
                    raise PlainClientError
                self._is_tls = True
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.read_wants_write = True
            return False
        return True

    def pending(self) -> int:
        return self.socket.pending()

    def recv_into(self, view: memoryview, /) -> int:
        """Fill ``view`` from the records that have arrived."""
        self.read_wants_write = False
        size = 0
        limit = min(len(view), _BYTES_PER_CALL_MAX)
        try:
            while size < limit:
                read = self.socket.recv_into(view[size:limit])
                if not read:
                    break
                size += read
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            if not size:
                self.read_wants_write = isinstance(error, ssl.SSLWantWriteError)
                raise BlockingIOError from None
        return size

    def recv(self, size_max: int, /) -> bytes:
        self.read_wants_write = False
        pieces: list[bytes] = []
        size = 0
        try:
            while size < size_max:
                piece = self.socket.recv(size_max - size)
                if not piece:
                    break
                pieces.append(piece)
                size += len(piece)
                if len(piece) < _RECORD_BYTES and not self.socket.pending():
                    break  # a short record is mostly the last one: save the system call
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            if not pieces:
                self.read_wants_write = isinstance(error, ssl.SSLWantWriteError)
                raise BlockingIOError from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def send(self, data: bytes, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, parts: Sequence[bytes | memoryview], /) -> int:
        """Encrypt and send buffers in order.

        After a wait, OpenSSL requires the same bytes again, or the same and more. Replies are only appended, and parts
        are joined from the front, so the bytes are the same.
        """
        self.write_wants_read = False
        total = 0
        number = 0
        try:
            while number < len(parts) and total < _BYTES_PER_CALL_MAX:
                data, count = _next_record(parts, number)
                size = len(data)
                offset = 0
                view = memoryview(data)
                while offset < size:
                    sent = self.socket.send(view[offset:])
                    offset += sent
                    total += sent
                    if total >= _BYTES_PER_CALL_MAX:
                        return total
                number += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            if not total:
                self.write_wants_read = isinstance(error, ssl.SSLWantReadError)
                raise BlockingIOError from None
        return total

    def end(self) -> None:
        with contextlib.suppress(OSError):  # the client's close_notify is not awaited
            self.socket.unwrap()
        self.socket.shutdown(socket.SHUT_WR)

    def user_name(self) -> str:
        certificate: dict[str, Any] = dict(self.socket.getpeercert() or {})
        for relative in certificate.get("subject", ()):
            for field, value in relative:
                if field == "commonName":
                    return str(value)
        return next((str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"), "")


def _next_record(parts: Sequence[bytes | memoryview], number: int) -> tuple[bytes | memoryview, int]:
    """Return the bytes to encrypt together, from part ``number`` on, and the number of parts in them."""
    first = parts[number]
    if len(first) >= _JOINED_PART_BYTES_MAX or number + 1 == len(parts):
        return first, 1
    joined = [first]
    size = len(first)
    for part in parts[number + 1 :]:
        if len(part) >= _JOINED_PART_BYTES_MAX or size + len(part) > _RECORD_BYTES:
            break
        joined.append(part)
        size += len(part)
    return (first, 1) if len(joined) == 1 else (b"".join(joined), len(joined))
