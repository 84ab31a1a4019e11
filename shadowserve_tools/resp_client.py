"""A plain client of a storage server, for commands of people: one question at a time, each with a deadline."""

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from shadowserve.errors import (
    ConfigurationError,
    ProtocolError,
    StorageError,
    StorageRefusedError,
    StorageUnavailableError,
)
from shadowserve.resp import NEED_DATA, ErrorReply, LargeBulk, ReplyReader, Value, encode_command

__all__ = ["Login", "RespClient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Where a server is and who asks.

    Attributes:
        host: name or address.
        port: TCP port.
        user: empty for the default user.
        password: empty for none.
        tls_ca: file of authorities of the server's certificate; with it, TLS is spoken. ``system`` for the system's.
        tls_cert: file of our own certificate, if the server wants one.
        tls_key: file of its private key.
    """

    host: str
    port: int
    user: str = ""
    password: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def context(self) -> ssl.SSLContext | None:
        """Return what TLS needs, None without it.

        Raises:
            ConfigurationError: a file cannot be used.
        """
        if not self.tls_ca:
            if self.tls_cert:
                raise ConfigurationError("a certificate is given without the authorities of the server's: --tls-ca")
            return None
        try:
            context = ssl.create_default_context(cafile=None if self.tls_ca == "system" else self.tls_ca)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"TLS: the certificates cannot be used: {error}") from error
        return context


_HINTS: Final = {
    b"NOAUTH": "; give --user, and --password or SHADOWSERVE_STORAGE_PASSWORD",
    b"ERR this server speaks TLS": "; give --tls-ca",
}
"""What helps against an error, by its beginning."""


class RespClient:
    """A connection; ``with RespClient(login, timeout_s) as client``."""

    def __init__(self, login: Login, timeout_s: float = 5.0) -> None:
        """Connect and log in.

        Raises:
            StorageUnavailableError: the server cannot be reached.
            StorageRefusedError: it does not let us in.
            ConfigurationError: the certificates cannot be used.
        """
        self._where = f"{login.host}:{login.port}"
        self._timeout_s = timeout_s
        context = login.context()
        try:
            self._socket = socket.create_connection((login.host, login.port), timeout_s)
        except OSError as error:
            raise StorageUnavailableError(
                f"cannot reach the storage server at {self._where}: {error}; is it running there?"
            ) from error
        try:
            if context is not None:
                self._socket = context.wrap_socket(self._socket, server_hostname=login.host)
            self._reader = ReplyReader()
            if login.password:
                user = [login.user] if login.user else []
                self.call("AUTH", *user, login.password)
        except OSError as error:
            self.close()
            raise StorageUnavailableError(f"no TLS with the storage server at {self._where}: {error}") from error
        except StorageError:
            self.close()
            raise

    def call(self, *arguments: str | bytes) -> Value:
        """Return the reply to a command.

        Raises:
            StorageRefusedError: the reply is an error.
            StorageUnavailableError: the connection broke, or the deadline passed.
        """
        ends = time.monotonic() + self._timeout_s
        name = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode("utf-8", "replace")
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(encode_command(*arguments))
            reply = self._receive(ends)
        except (OSError, ProtocolError) as error:
            hint = "; give --tls-cert and --tls-key" if "CERTIFICATE_REQUIRED" in str(error) else ""
            raise StorageUnavailableError(f"{name} at {self._where} failed: {error}{hint}") from error
        if isinstance(reply, ErrorReply):
            hint = next((hint for begin, hint in _HINTS.items() if reply.startswith(begin)), "")
            raise StorageRefusedError(f"{self._where} refused {name}: {reply.decode('utf-8', 'replace')}{hint}")
        return reply

    def _receive(self, ends: float) -> Value:
        while True:
            event = self._reader.next_value()
            if isinstance(event, memoryview):
                return bytes(event)
            if event is not NEED_DATA and not isinstance(event, LargeBulk):
                return event
            remaining = ends - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(remaining)
            view = self._reader.get_buffer()
            if view is not None:
                size = self._socket.recv_into(view)
                self._reader.advance(size)
            else:
                data = self._socket.recv(1 << 16)
                size = len(data)
                self._reader.feed(data)
            if size == 0:
                raise ConnectionResetError("the server closed the connection")

    def info(self, sections: Sequence[str] = ("everything",)) -> dict[str, str]:
        """Return INFO's fields.

        Raises:
            StorageError: as call().
        """
        reply = self.call("INFO", *sections)
        if not isinstance(reply, bytes):
            raise StorageUnavailableError(f"{self._where} answers INFO with no text; is it a storage server?")
        lines = reply.decode("utf-8", "replace").split("\r\n")
        return dict(line.split(":", 1) for line in lines if ":" in line and line[0] != "#")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
