"""A client of a storage node for commands: one request at a time, each with a deadline."""

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from shadowserve.addresses import split_address
from shadowserve.errors import ConfigurationError, ProtocolError, StorageRefusedError, StorageUnavailableError
from shadowserve.resp import ErrorReply
from shadowserve.resp_client import RespClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Address and credentials of a server; empty for the default user, and for no password.

    Attributes:
        tls_ca: File of the authorities of the server's certificate, or ``system``; enables TLS.
        tls_cert, tls_key: Files of the client's certificate, if the server requires one.
        server_name: Name in the server's certificate; empty for ``host``.
    """

    host: str
    port: int
    user: str = ""
    password: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    server_name: str = ""

    @classmethod
    def at(cls, address: str, **more: str) -> Self:
        """Return the login at ``host:port``; ConfigurationError: that is malformed."""
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return cls(host=host, port=port, **more)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context, None without TLS; ConfigurationError: a file is unusable."""
        if not self.tls_ca:
            if self.tls_cert:
                needed = "--tls-ca, the authorities of the server's certificate"
                raise ConfigurationError(f"a client certificate needs {needed}")
            return None
        try:
            context = ssl.create_default_context(cafile=None if self.tls_ca == "system" else self.tls_ca)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"TLS: the certificates are unusable: {error}") from error
        return context


_HINTS: Final = {
    "NOAUTH": "; give --user, and --password or SHADOWSERVE_STORAGE_PASSWORD",
    "ERR this server speaks TLS": "; give --tls-ca",
}
"""Advice by the start of an error."""


class StorageClient:
    """A connection; ``with StorageClient(login, timeout_s) as client``."""

    def __init__(self, login: Login, timeout_s: float = 5.0) -> None:
        """Connect and log in.

        Raises:
            StorageUnavailableError: The server cannot be reached.
            StorageRefusedError: The server refuses the login.
            ConfigurationError: The certificates are unusable.
        """
        self._where = f"{login.host}:{login.port}"
        self._timeout_s = timeout_s
        context = login.context()
        user = [login.user.encode()] if login.user else []
        greeting = [[b"AUTH", *user, login.password.encode()]] if login.password else []
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(self._open(login, greeting, context))
        except (OSError, UnicodeError, ProtocolError, StorageUnavailableError) as error:  # UnicodeError: of a name
            self._runner.close()
            if isinstance(error, ssl.SSLError) or context is not None and not isinstance(error, ConnectionRefusedError):
                raise StorageUnavailableError(f"no TLS with the storage node at {self._where}: {error}") from error
            number = getattr(error, "errno", None)
            if isinstance(error, socket.gaierror):  # its numbers are not the system's
                reason = str(error.strerror)
            else:
                reason = os.strerror(number) if number else str(error) or f"no answer for {timeout_s:g} s"
            raise StorageUnavailableError(
                f"cannot reach the storage node at {self._where}: {reason}; is it running there?"
            ) from error
        except StorageRefusedError as error:
            self._runner.close()
            raise StorageRefusedError(f"{self._where}: {error}{_hint(str(error))}") from error

    async def _open(self, login: Login, greeting: list[list[bytes]], context: ssl.SSLContext | None) -> RespClient:
        async with asyncio.timeout(self._timeout_s):
            client = RespClient(self._where, self._timeout_s)
            name = (login.server_name or login.host) if context else None
            return await client.open(login.host, login.port, greeting, context, name)

    def call(self, *arguments: str | bytes) -> Any:
        """Return the reply to a command.

        Raises:
            StorageRefusedError: The reply is an error.
            StorageUnavailableError: The connection broke, or the deadline passed.
        """
        name = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode("utf-8", "replace")
        try:
            [reply] = self._runner.run(self._client.ask([arguments]))
        except StorageUnavailableError as error:
            hint = "; give --tls-cert and --tls-key" if "CERTIFICATE_REQUIRED" in str(error).upper() else ""
            raise StorageUnavailableError(f"{name} at {self._where} failed: {error}{hint}") from error
        if isinstance(reply, ErrorReply):
            text = reply.decode("utf-8", "replace")
            raise StorageRefusedError(f"{self._where} refused {name}: {text}{_hint(text)}")
        return reply

    def info(self, sections: Sequence[str] = ("everything",)) -> dict[str, str]:
        """Return the fields of INFO."""
        reply = self.call("INFO", *sections)
        if not isinstance(reply, bytes):
            raise StorageUnavailableError(f"{self._where} does not answer INFO with text; is it a storage node?")
        lines = reply.decode("utf-8", "replace").split("\r\n")
        return dict(line.split(":", 1) for line in lines if ":" in line and line[0] != "#")

    def close(self) -> None:
        self._client.abort("closed")
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hint(text: str) -> str:
    return next((hint for begin, hint in _HINTS.items() if begin in text), "")
