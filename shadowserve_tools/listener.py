"""Finds out which protocol a program speaks that listens on an address."""

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from shadowserve.addresses import split_address
from shadowserve.resp import NEED_DATA, ErrorReply, Limits, ReplyReader, encode_command

TIMEOUT_S: Final = 2.0
_ANSWER_BYTES_MAX: Final = 1 << 20
_HTTP2_SETTINGS: Final = b"\x04"
"""Type of the first frame of an HTTP/2 server; three bytes of length come before it."""
_TLS_ALERT: Final = b"\x15\x03"


@dataclass(frozen=True)
class Listener:
    """A program that listens.

    Attributes:
        protocol: ``resp``: Redis' protocol, as of storage nodes; ``http2``: HTTP/2, as of gRPC; ``http1``: HTTP/1;
            ``tls``: TLS with something other than HTTP/2; ``silent``: no answer to PING; ``other``: another answer.
        encrypted: True if it speaks TLS.
    """

    protocol: Literal["resp", "http2", "http1", "tls", "silent", "other"]
    encrypted: bool = False

    def __str__(self) -> str:
        words = {
            "resp": "a server that speaks Redis' protocol, such as a storage node,",
            "http2": "a gRPC server, such as a data plane,",
            "http1": "an HTTP server, such as an endpoint of metrics,",
            "tls": "a server that speaks TLS",
            "silent": "a server that does not answer",
            "other": "a server of an unknown protocol",
        }
        return words[self.protocol]


def identify(address: str, *, encrypted: bool = False, certificate: str = "", key: str = "") -> Listener:
    """Return the program that listens on ``host:port`` or ``unix:/path``.

    Args:
        encrypted: It is known to speak TLS.
        certificate: File of the client's certificate, and ``key`` that of its private key, for a server that logs
            clients without one as failures.

    Raises:
        ValueError: The address is malformed.
    """
    if encrypted:
        return _behind_tls(address, certificate, key)
    with _connected(address) as plain:
        plain.sendall(b"PING\r\n\r\n")  # the empty line ends an HTTP request; RESP ignores it
        first = _first_bytes(plain)
    if first.startswith((b"+", b"-")):
        return Listener("resp", encrypted=b"speaks TLS" in first)
    if first[3:4] == _HTTP2_SETTINGS:
        return Listener("http2")
    if first.startswith((b"HTTP/1", b"<")):  # some answer malformed requests with HTML alone
        return Listener("http1")
    if not first or first.startswith(_TLS_ALERT):
        return _behind_tls(address)
    return Listener("other")


def query(
    address: str, commands: Sequence[Sequence[bytes]], context: ssl.SSLContext | None = None, name: str = ""
) -> list[str]:
    """Return the answers of a RESP server as text; errors begin with ``-``. ProtocolError: an answer is not RESP.

    Each command waits for the answer to the one before. ``name``: in the server's certificate; empty for the host.
    """
    answers: list[str] = []
    limits = Limits(bulk_bytes_max=_ANSWER_BYTES_MAX, total_bytes_max=_ANSWER_BYTES_MAX, large_bulk_bytes=1 << 62)
    reader = ReplyReader(limits)
    with _connected(address) as plain:
        host = name or split_address(address)[0]
        wrapped = plain if context is None else context.wrap_socket(plain, server_hostname=host)
        with wrapped:
            for command in commands:
                wrapped.sendall(encode_command(*command))
                while (value := reader.next_value()) is NEED_DATA:
                    data = wrapped.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError("it closed the connection")
                    reader.feed(data)
                text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
                answers.append(f"-{text}" if isinstance(value, ErrorReply) else text)
    return answers


@contextlib.contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as local:
            local.settimeout(TIMEOUT_S)
            local.connect(address.removeprefix("unix:"))
            yield local
        return
    with socket.create_connection(split_address(address), timeout=TIMEOUT_S) as remote:
        yield remote


def _first_bytes(connection: socket.socket) -> bytes:
    """Return the start of a server's answer, up to 9 bytes or a line; empty if it closes or stays silent."""
    found = b""
    with contextlib.suppress(OSError):  # no answer, or reset
        while len(found) < 9 and b"\n" not in found and (data := connection.recv(256)):
            found += data
    return found


def _behind_tls(address: str, certificate: str = "", key: str = "") -> Listener:
    """Return the kind of a server that does not answer a plain PING. Its certificate is not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        if certificate:
            context.load_cert_chain(certificate, key or None)
        with _connected(address) as plain, context.wrap_socket(plain) as wrapped:
            return Listener("http2" if wrapped.selected_alpn_protocol() == "h2" else "tls", encrypted=True)
    except OSError:
        return Listener("silent")
