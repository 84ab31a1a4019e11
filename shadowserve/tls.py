"""TLS: reading and checking certificates and keys, and finding the cause of a failed handshake.

gRPC reports little about a failed handshake: a rejected client sees a broken connection or a timeout. So
:func:`read_key_pair` checks the files at start, and :func:`diagnose` repeats a failed handshake with OpenSSL to get the
cause.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from shadowserve.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_T = TypeVar("_T")

FileState = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and modification time of each file; ``None`` if it is not accessible."""


@dataclass(frozen=True)
class KeyPair:
    """A certificate with its private key."""

    chain: bytes  # the certificate and its intermediate certificates, PEM
    key: bytes  # the private key, PEM
    expires: datetime  # expiry of the certificate, UTC


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Files and name for a client's TLS connection.

    Attributes:
        certificate, key: Files of the client's certificate and key; empty if it has none.
    """

    authorities: str  # file of authorities that sign server certificates
    certificate: str = ""
    key: str = ""
    server_name: str = ""  # expected name in the server's certificate; empty: the name or IP in the address

    @property
    def files(self) -> tuple[str, ...]:
        """All configured files."""
        return tuple(path for path in (self.authorities, self.certificate, self.key) if path)


def check_pair(certificate: str, key: str, *, prefix: str = "") -> None:
    """Raise ValueError if only one of certificate and private key is configured; ``prefix``: of their keys."""
    if bool(certificate) != bool(key):
        given, missing = ("tls_cert", "tls_key") if certificate else ("tls_key", "tls_cert")
        raise ValueError(f"{prefix}{given} is given without {prefix}{missing}; set both or none")


def check_served(certificate: str, key: str, client_authorities: str) -> None:
    """Raise ValueError if a server's TLS settings contradict each other."""
    check_pair(certificate, key)
    if client_authorities and not certificate:
        raise ValueError("tls_client_ca is given without tls_cert and tls_key: TLS needs them")


def file_state(paths: tuple[str, ...]) -> FileState:
    """Return a value that changes when one of the files is replaced or written."""

    def one(path: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    return tuple(one(path) for path in paths)


class Renewed(Generic[_T]):
    """An object made from files, and made again when they change: a renewed certificate needs no restart.

    Invalid files are refused at the start, with make()'s ConfigurationError. If later files are invalid, the earlier
    object stays in use, and ``unusable`` is called once per change.
    """

    def __init__(
        self, paths: Iterable[str], make: Callable[[], _T], unusable: Callable[[ConfigurationError], None]
    ) -> None:
        self._paths = tuple(filter(None, paths))
        self._make = make
        self._unusable = unusable
        self._lock = threading.Lock()
        self._state = file_state(self._paths)
        self._made = make()

    def current(self) -> _T:
        """Return the current object. Thread-safe."""
        with self._lock:
            state = file_state(self._paths)
            if state != self._state:
                self._state = state
                try:
                    self._made = self._make()
                except ConfigurationError as error:
                    self._unusable(error)
            return self._made


def read_key_pair(certificate: str, key: str, *, prefix: str = "") -> KeyPair:
    """Read a certificate (``tls_cert``) and its private key (``tls_key``), and check that they are valid now.

    Raises:
        ConfigurationError: A file cannot be read or is not PEM, the key has a passphrase or belongs to another
            certificate, or the certificate has expired or is not valid yet.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain, private = _read(f"{prefix}tls_cert", certificate), _read(f"{prefix}tls_key", key)
    leaf = _certificates(f"{prefix}tls_cert", certificate, chain)[0]
    try:
        loaded = load_pem_private_key(private, password=None)
    except TypeError:
        raise ConfigurationError(
            f"{prefix}tls_key: {key} has a passphrase; a server cannot enter it: remove the passphrase"
        ) from None
    except Exception as error:  # ValueError, or the library's error for an unknown type of key
        raise ConfigurationError(f"{prefix}tls_key: {key} holds no private key in PEM{_cause(error)}") from None
    if loaded.public_key() != leaf.public_key():
        raise ConfigurationError(f"{prefix}tls_key: {key} is not the key of the certificate {certificate}")
    now = datetime.now(UTC)
    begins, expires = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if expires <= now:
        raise ConfigurationError(
            f"{prefix}tls_cert: the certificate {certificate} has expired on {expires:%Y-%m-%d %H:%M} UTC; renew it"
        )
    if begins > now:
        raise ConfigurationError(
            f"{prefix}tls_cert: the certificate {certificate} is not valid before {begins:%Y-%m-%d %H:%M} UTC; is this "
            "machine's clock right?"
        )
    return KeyPair(chain, private, expires)


def read_authorities(key: str, path: str) -> bytes:
    """Return the content of a file of authorities, PEM, checked; ``key``: configuration key, for messages."""
    content = _read(key, path)
    _certificates(key, path, content)
    return content


def _read(key: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"{key}: cannot read {path}: {error.strerror}") from error


def _certificates(key: str, path: str, content: bytes) -> "list[Certificate]":
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(content)
    except ValueError as error:
        raise ConfigurationError(f"{key}: {path} holds no certificate in PEM{_cause(error)}") from None


def _cause(error: Exception) -> str:
    """Return a library's error text without its advice for programmers."""
    text = str(error).partition(" See https:")[0].rstrip(".")
    return f": {text}" if text else ""


def diagnose(host: str, port: int, credentials: Credentials | None, timeout: float) -> str:
    """Return the cause of a failed TLS handshake as a sentence; empty if TLS is not the cause."""
    try:
        context = _context(credentials)
    except (ssl.SSLError, OSError, ValueError) as error:
        return f"TLS: this host's certificates cannot be used: {error}"
    name = (credentials.server_name if credentials else "") or host
    ends_s = time.monotonic() + timeout

    def left_s() -> float:
        return max(ends_s - time.monotonic(), 0.01)

    try:
        with socket.create_connection((host, port), timeout=left_s()) as plain:
            family, address = plain.family, plain.getpeername()
        # Python leaks a socket that the server resets before it is wrapped: so this one connects after.
        with context.wrap_socket(socket.socket(family), server_hostname=name, do_handshake_on_connect=False) as wrapped:
            wrapped.settimeout(left_s())
            wrapped.connect(address)
            wrapped.settimeout(left_s())
            wrapped.do_handshake()
            wrapped.settimeout(left_s())
            if credentials is None:
                return "TLS: the data plane uses TLS and this host does not: set tls_ca"
            # The server checks the client's certificate after the handshake. An HTTP/2 server sends first; gRPC closes
            # the connection if it rejects the client.
            return "" if wrapped.recv(1) else _rejected(credentials)
    except ssl.SSLCertVerificationError as error:
        return rejection(error.verify_message or str(error.reason), name, "the data plane")
    except ssl.SSLError as error:
        if credentials is None:  # the server does not use TLS either
            return ""
        reason = error.reason or str(error)
        if "WRONG_VERSION_NUMBER" in reason:
            return "TLS: the server does not use TLS: set its tls_cert and tls_key, or unset tls_ca here"
        return f"TLS: the handshake failed ({reason})"
    except (OSError, ValueError):  # no server, or no answer: TLS is not the cause
        return ""


def _context(credentials: Credentials | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if credentials is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context.load_verify_locations(cafile=credentials.authorities)
    if credentials.certificate:
        context.load_cert_chain(credentials.certificate, credentials.key)
    return context


def _rejected(credentials: Credentials) -> str:
    if not credentials.certificate:
        return "TLS: the data plane requires a client certificate: set tls_cert and tls_key"
    try:
        read_key_pair(credentials.certificate, credentials.key)
    except ConfigurationError as error:
        return f"TLS: the data plane rejects this host's certificate: {error}"
    return (
        f"TLS: the data plane rejects this host's certificate {credentials.certificate}: its tls_client_ca did not "
        "sign it, or its clock is wrong; see its log"
    )


def rejection(reason: str, name: str, whose: str, *, prefix: str = "") -> str:
    """Return why a server's certificate was rejected, and what to do; ``reason``: OpenSSL's."""
    reason = reason.rstrip(".")
    text = reason.lower()
    if "expired" in text:
        return f"TLS: {whose}'s certificate (its tls_cert) has expired: renew it"
    if "mismatch" in text or "not valid for" in text:
        return (
            f"TLS: {whose}'s certificate is not for '{name}' ({reason}): set {prefix or 'tls_'}server_name to a name "
            "in it, or issue a certificate with this name"
        )
    return f"TLS: {whose}'s certificate is not signed by an authority in {prefix}tls_ca ({reason})"
