"""What listens on an address: which protocol it speaks, found by asking."""

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
"""Type of the frame that a server of HTTP/2 begins with; it is behind three bytes of length."""
_TLS_ALERT: Final = b"\x15\x03"


@dataclass(frozen=True)
class Listener:
    """A program that listens.

    Attributes:
        protocol: ``resp``: Redis' protocol, as storage nodes speak it; ``http2``: HTTP/2, as gRPC; ``http1``: HTTP of
            version 1; ``tls``: something behind TLS that is not HTTP/2; ``silent``: it does not answer PING; ``other``:
            it answers something else.
        encrypted: it speaks TLS.
    """

    protocol: Literal["resp", "http2", "http1", "tls", "silent", "other"]
    encrypted: bool = False

    def __str__(self) -> str:
        """What it is, in words."""
        words = {
            "resp": "a server that speaks Redis' protocol, such as a storage node,",
            "http2": "a gRPC server, such as a data plane,",
            "http1": "an HTTP server, such as an endpoint of metrics,",
            "tls": "a server that speaks TLS",
            "silent": "a server that does not answer",
            "other": "a server of an unknown protocol",
        }
        return words[self.protocol]


def identify(address: str, *, encrypted: bool = False) -> Listener:
    """Return what listens on ``host:port`` or ``unix:/path``.

    Args:
        address: that is connected to.
        encrypted: it is known to speak TLS.

    Raises:
        OSError: it cannot be connected to.
        ValueError: it is no address.
    """
    if encrypted:
        return _behind_tls(address)
    with _connected(address) as plain:
        plain.sendall(b"PING\r\n")
        first = _first_bytes(plain)
    if first.startswith((b"+", b"-")):
        return Listener("resp", encrypted=b"speaks TLS" in first)
    if first[3:4] == _HTTP2_SETTINGS:
        return Listener("http2")
    if first.startswith((b"HTTP/1", b"<")):  # some answer a request that they cannot read with HTML alone
        return Listener("http1")
    if not first or first.startswith(_TLS_ALERT):
        return _behind_tls(address)
    return Listener("other")


def ask(
    address: str, commands: Sequence[Sequence[bytes]], context: ssl.SSLContext | None = None, name: str = ""
) -> list[str]:
    """Return the answers of a server that speaks RESP, as text; errors begin with ``-``.

    Args:
        address: ``host:port``.
        commands: in order; a command is not sent before the one before it has been answered.
        context: for TLS; None for none.
        name: that the server's certificate must hold; empty for the host.

    Raises:
        OSError: the connection does not come about, or breaks.
        ProtocolError: the answer is no RESP.
    """
    answers: list[str] = []
    limits = Limits(bulk_bytes_max=_ANSWER_BYTES_MAX, total_bytes_max=_ANSWER_BYTES_MAX, large_bulk_bytes=1 << 62)
    reader = ReplyReader(limits)
    with _connected(address) as plain:
        wrapped = plain if context is None else context.wrap_socket(plain, server_hostname=name or _host(address))
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


def _host(address: str) -> str:
    return split_address(address)[0]


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
    """Return what a server answers first, up to 9 bytes of it or a line; empty where it closes or stays silent."""
    found = b""
    try:
        while len(found) < 9 and b"\n" not in found:
            data = connection.recv(256)
            if not data:
                break
            found += data
    except OSError:  # silent, or reset
        pass
    return found


def _behind_tls(address: str) -> Listener:
    """Return what a server is that has not answered a plain PING: its certificate is not checked here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with _connected(address) as plain, context.wrap_socket(plain) as wrapped:
            return Listener("http2" if wrapped.selected_alpn_protocol() == "h2" else "tls", encrypted=True)
    except OSError:
        return Listener("silent")
