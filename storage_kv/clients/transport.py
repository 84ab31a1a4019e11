"""Bytes to and from a client's socket, in the clear or through TLS.

Python's ``SSLSocket`` encrypts at most one record of 16 KiB in each call and has no gathering send. It holds decrypted
bytes that the kernel does not report. A read may have to wait until the socket is writable, and the reverse. So the TLS
transport repeats calls until a buffer is full, an iovec is sent, or it must wait. It joins only small parts into one
record, and encrypts large parts from where they are stored.
"""

import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from shadowserve.errors import ConfigurationError
from shadowserve.tls import Renewed, read_authorities, read_key_pair
from storage_kv.config import StorageConfig

_log = logging.getLogger(__name__)

_RECORD_BYTES: Final = 16 << 10  # limit of the plaintext in a TLS record
_JOINED_PART_BYTES_MAX: Final = 4 << 10
"""Smaller parts are joined into one record; larger ones are sent from where they are."""
_BYTES_PER_CALL_MAX: Final = 512 << 10
"""Limit of one call, so that a client with a fast network does not block the other clients of its thread."""
_HANDSHAKE_RECORD: Final = 0x16
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secret and authenticated. TLS 1.3 has no others."""


_UNSENT_BYTES: Final = 1 << 20
_INFO_BYTES: Final = 184
_WINDOW_LIMITED: Final = 176
"""Of Linux's struct tcp_info: time in which bytes to send waited for the peer's window, in microseconds."""


def limit_unsent(sock: socket.socket) -> None:
    """Let the kernel take only few bytes before it can send them: the others count in the node's load."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def window_limited_s(sock: socket.socket) -> float:
    """Return for how long the kernel has waited for a client to read, in all; 0.0 if it does not tell."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0.0
    return 1e-6 * int(struct.unpack_from("=Q", info, _WINDOW_LIMITED)[0]) if len(info) == _INFO_BYTES else 0.0


class PlainClientError(ConnectionError):
    """A client does not begin with TLS, and this server requires it."""


class PlainTransport:
    """The socket itself, non-blocking: calls raise BlockingIOError where they would have to wait."""

    is_secure = read_wants_write = write_wants_read = False

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.recv_into: Callable[[memoryview], int] = sock.recv_into
        self.recv: Callable[[int], bytes] = sock.recv
        self.send: Callable[[bytes], int] = sock.send
        self.sendmsg: Callable[[Sequence[bytes | memoryview]], int] = sock.sendmsg

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)


class TlsTransport:
    """A socket under TLS.

    Attributes:
        read_wants_write: A read continues when the socket is writable.
        write_wants_read: A write continues when the socket is readable.
    """

    is_secure = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Wrap a non-blocking socket, before its handshake; if the client is gone, close it and raise OSError."""
        self.socket = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._is_tls = False
        self.read_wants_write = self.write_wants_read = False

    def shake_hands(self) -> bool:
        """Continue the handshake; return True when it is done. Raises PlainClientError, or OSError if it has failed."""
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
        """Return the number of readable bytes that the kernel does not report."""
        return self.socket.pending()

    def recv_into(self, view: memoryview, /) -> int:
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
        """Close the sending side. Further input is read in the clear, to be dropped."""
        with contextlib.suppress(OSError):  # the client's close_notify is not awaited
            self.socket.unwrap()
        self.socket.shutdown(socket.SHUT_WR)

    def user_name(self) -> str:
        """Return the common name or first DNS name of the client's certificate; empty for none."""
        certificate: dict[str, Any] = dict(self.socket.getpeercert() or {})
        for relative in certificate.get("subject", ()):
            for field, value in relative:
                if field == "commonName":
                    return str(value)
        return next((str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"), "")


Transport: TypeAlias = PlainTransport | TlsTransport


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


class Certificates:
    """The server's TLS context, made of the configured files and again when they change; connections keep theirs.

    ``expires_s`` is the expiry of the certificate in use, Unix time.
    """

    def __init__(self, config: StorageConfig) -> None:
        """Read the files; the message of a ConfigurationError names key, file and reason."""
        self._config = config
        self.expires_s = 0.0
        self._files = Renewed((config.tls_cert, config.tls_key, config.tls_client_ca), self._make, _unusable)

    def context(self) -> ssl.SSLContext:
        return self._files.current()

    def _make(self) -> ssl.SSLContext:
        config = self._config
        pair = read_key_pair(config.tls_cert, config.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
        try:
            context.set_ciphers(_CIPHERS)
            context.load_cert_chain(config.tls_cert, config.tls_key)
            if config.tls_client_ca:
                authorities = read_authorities("tls_client_ca", config.tls_client_ca)
                context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigurationError(
                f"tls_cert, tls_key, tls_client_ca: OpenSSL cannot use these files: {error}"
            ) from None
        self.expires_s = pair.expires.timestamp()
        _log.info("certificate_read file=%s expires=%s", config.tls_cert, f"{pair.expires:%Y-%m-%dT%H:%MZ}")
        return context


def _unusable(error: ConfigurationError) -> None:
    _log.error("certificates_unusable in_use='the previous ones' reason=%r", str(error))
