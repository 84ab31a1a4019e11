"""Bytes to and from a client's socket, in the clear or through TLS; connections do not tell the two apart.

Some facts. Python's ``SSLSocket`` encrypts at most one record, 16 KiB, in each call (OpenSSL's partial writes, which
CPython switches on), and has no gathering send. It holds decrypted bytes that the kernel no longer publishes. Reading
may have to wait for room to write and the reverse: TLS 1.3 changes its keys in the middle of a connection.

Consequence: the plain transport is the socket's own methods, nothing in between. The TLS transport goes on until it has
filled a buffer, emptied a gather or must wait, joins only small parts into one record, and encrypts large ones from
the memory that they are stored in.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

_Socket: TypeAlias = socket.socket

_RECORD_BYTES: Final = 16 << 10
"""Plaintext of a TLS record at most."""
_JOINED_PART_BYTES_MAX: Final = 4 << 10
"""Parts below this are joined into one record; larger ones are sent from where they are."""
_BYTES_PER_CALL_MAX: Final = 512 << 10
"""Read or sent in one call at most, so that one client of a fast network does not keep the thread to itself."""
_HANDSHAKE_RECORD: Final = 0x16


class PlainClientError(ConnectionError):
    """A client that begins without TLS where TLS is spoken."""


class Transport(Protocol):
    """What a connection does with its socket. All calls raise BlockingIOError where they would have to wait.

    Attributes:
        is_secure: whether this is TLS.
        read_wants_write: reading has stopped until the socket can be written.
        write_wants_read: writing has stopped until the socket can be read.
    """

    is_secure: bool
    read_wants_write: bool
    write_wants_read: bool

    def recv_into(self, view: memoryview, /) -> int:
        """Read into ``view``; return how many bytes, 0 at the client's end."""

    def recv(self, size_max: int, /) -> bytes:
        """Return what has arrived, of ``size_max`` bytes at most; nothing at the client's end."""

    def send(self, data: bytes, /) -> int:
        """Send what the kernel takes; return how many bytes."""

    def sendmsg(self, parts: Sequence[bytes | memoryview], /) -> int:
        """Send parts in order, as far as the kernel takes them; return how many bytes."""

    @property
    def socket(self) -> _Socket:
        """What is to be closed at the end."""

    def pending(self) -> int:
        """Return how many bytes can be read without the kernel publishing any."""

    def shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is over. Raises OSError where it has failed."""

    def end(self) -> None:
        """Send nothing more. What comes is read in the clear from now on, to be dropped."""

    def user_name(self) -> str:
        """Return whom the client's certificate names: its common name or first DNS name; empty for none."""


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
        """Return 0: what is there, the kernel publishes."""
        return 0

    def shake_hands(self) -> bool:
        """Return True: there is nothing to agree on."""
        return True

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def user_name(self) -> str:
        return ""


class TlsTransport:
    """A socket under TLS.

    Attributes:
        socket: the one to close at the end: wrapping has taken the descriptor from the one that was given.
    """

    __slots__ = ("_begun", "is_secure", "read_wants_write", "socket", "write_wants_read")

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Take a non-blocking socket over; its handshake is still to come.

        Raises:
            OSError: the client has gone already; the socket is closed.
        """
        self.socket = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._begun = False
        self.is_secure = True
        self.read_wants_write = self.write_wants_read = False

    def shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is over.

        Raises:
            PlainClientError: the client does not speak TLS.
            OSError: the handshake has failed, or the client is gone.
        """
        self.read_wants_write = False
        if not self._begun:
            with contextlib.suppress(BlockingIOError):
                first = socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
                if first and first[0] != _HANDSHAKE_RECORD:
                    raise PlainClientError
                self._begun = True
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.read_wants_write = True
            return False
        return True

    def pending(self) -> int:
        """Return how many decrypted bytes wait to be read."""
        return self.socket.pending()

    def recv_into(self, view: memoryview, /) -> int:
        """Fill ``view`` as far as records have arrived; 0 at the client's end."""
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
        """Return what has arrived, of ``size_max`` bytes at most; nothing at the client's end."""
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
                    break  # a short record is the last of what the client had to say, mostly: spare the system call
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            if not pieces:
                self.read_wants_write = isinstance(error, ssl.SSLWantWriteError)
                raise BlockingIOError from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def send(self, data: bytes, /) -> int:
        """Encrypt and send, as far as the kernel takes it."""
        return self.sendmsg((data,))

    def sendmsg(self, parts: Sequence[bytes | memoryview], /) -> int:
        """Encrypt and send parts in order, as far as the kernel takes them.

        OpenSSL, once it has had to wait, wants to see the same bytes again, or the same and more. What waits for a
        client is only ever added to at its end, and parts are joined from the front, so it does.
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
        """Say that nothing more comes, in TLS and in TCP."""
        with contextlib.suppress(OSError):  # the client's own end is not waited for
            self.socket.unwrap()
        self.socket.shutdown(socket.SHUT_WR)

    def user_name(self) -> str:
        """Return whom the client's certificate names: its common name or first DNS name; empty for none."""
        certificate: dict[str, Any] = dict(self.socket.getpeercert() or {})
        for relative in certificate.get("subject", ()):
            for field, value in relative:
                if field == "commonName":
                    return str(value)
        return next((str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"), "")


def _next_record(parts: Sequence[bytes | memoryview], number: int) -> tuple[bytes | memoryview, int]:
    """Return what is to be encrypted together, beginning with part ``number``, and of how many parts it is made."""
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
