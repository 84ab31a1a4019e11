"""Certificates and keys, read and checked before a wire uses them, and what is wrong where TLS does not come about.

gRPC says little of a handshake that fails: a server that turns a client away looks like a connection that broke, and a
call that waits for a connection says that time is up. So :func:`read_key_pair` finds at the start what can be found in
the files, and :func:`diagnose` repeats a failed handshake with OpenSSL, which says why.
"""

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from shadowserve.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

__all__ = [
    "Credentials",
    "FileState",
    "KeyPair",
    "Renewed",
    "check_pair",
    "check_served",
    "diagnose",
    "distrust",
    "file_state",
    "read_authorities",
    "read_key_pair",
]

_T = TypeVar("_T")

FileState = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of each of some files; ``None`` for one that cannot be seen."""


@dataclass(frozen=True)
class KeyPair:
    """A certificate with its private key.

    Attributes:
        chain: the certificate and those that signed it, PEM.
        key: PEM.
        expires: of the certificate, in UTC.
    """

    chain: bytes
    key: bytes
    expires: datetime


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client brings to a TLS connection, as files.

    Attributes:
        authorities: that servers' certificates are checked with.
        certificate, key: of the client itself; empty for none.
        server_name: that the server's certificate must hold; empty for the name or IP in the address.
    """

    authorities: str
    certificate: str = ""
    key: str = ""
    server_name: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are named."""
        return tuple(path for path in (self.authorities, self.certificate, self.key) if path)


def check_pair(certificate: str, key: str, *, prefix: str = "") -> None:
    """Raise ValueError where a configuration names a certificate without its private key, or the key alone.

    Args:
        certificate, key: the files; empty for none.
        prefix: of the keys of the configuration, for the message.
    """
    if bool(certificate) != bool(key):
        given, missing = ("tls_cert", "tls_key") if certificate else ("tls_key", "tls_cert")
        raise ValueError(
            f"{prefix}{given} is given without {prefix}{missing}; a certificate and its private key go together"
        )


def check_served(certificate: str, key: str, client_authorities: str) -> None:
    """Raise ValueError where what a server is to show its clients, and to ask of them, does not fit together."""
    check_pair(certificate, key)
    if client_authorities and not certificate:
        raise ValueError("tls_client_ca is given without tls_cert and tls_key: there is no TLS without them")


def file_state(paths: tuple[str, ...]) -> FileState:
    """Return what changes when one of the files is replaced or written."""

    def one(path: str) -> tuple[int, int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    return tuple(one(path) for path in paths)


class Renewed(Generic[_T]):
    """What is made of files, and made anew when they change, so that a renewed certificate needs no restart.

    Files that cannot be used are refused at the start. Later, what was made before stays in use.

    Args:
        paths: of the files; empty ones are left out.
        make: makes it, or raises ConfigurationError.
        unusable: told why what is new cannot be used, once for each change.

    Raises:
        ConfigurationError: a file cannot be used.
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
        """Return what is to be used now; from any thread."""
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
    """Read a certificate (``tls_cert``) and its private key (``tls_key``), and check that they can be used now.

    Args:
        certificate, key: the files.
        prefix: of the keys of the configuration, for messages.

    Raises:
        ConfigurationError: a file that cannot be read or is not PEM, a key with a passphrase or of another certificate,
            a certificate that has expired or is not valid yet.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    chain, private = _read(f"{prefix}tls_cert", certificate), _read(f"{prefix}tls_key", key)
    leaf = _certificates(f"{prefix}tls_cert", certificate, chain)[0]
    try:
        loaded = load_pem_private_key(private, password=None)
    except TypeError:
        raise ConfigurationError(
            f"{prefix}tls_key: {key} is protected by a passphrase, which nobody is there to type; give it without one"
        ) from None
    except Exception as error:  # ValueError, or what the library makes of a kind of key that it does not know
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
    """Return the certificates (PEM) of a file of authorities.

    Args:
        key: of the configuration, for messages.
        path: of the file.

    Raises:
        ConfigurationError: it cannot be read, or holds none.
    """
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
    """Return what a library says of a file, without its advice to those who program with it."""
    text = str(error).partition(" See https:")[0].rstrip(".")
    return f": {text}" if text else ""


def diagnose(host: str, port: int, credentials: Credentials | None, timeout: float) -> str:
    """Return why TLS does not come about with a server, in one sentence; empty where that is not the reason.

    Args:
        host, port: of the server.
        credentials: of the client; ``None`` for one that does not speak TLS.
        timeout: seconds for all of it.
    """
    try:
        context = _context(credentials)
    except (ssl.SSLError, OSError, ValueError) as error:
        return f"TLS: our own certificates cannot be used: {error}"
    name = (credentials.server_name if credentials else "") or host
    try:
        with socket.create_connection((host, port), timeout=max(timeout / 2, 0.01)) as plain:
            family, address = plain.family, plain.getpeername()
        # Python leaks a socket that the server resets before it is wrapped: so this one connects after.
        with context.wrap_socket(socket.socket(family), server_hostname=name) as wrapped:
            wrapped.settimeout(max(timeout / 2, 0.01))
            wrapped.connect(address)
            if credentials is None:
                return "TLS: the data plane speaks it, and this host is not configured to: set tls_ca"
            # A server checks its client after the handshake. One that speaks HTTP/2 then speaks first; gRPC's just
            # closes where it does not like what it has seen.
            return "" if wrapped.recv(1) else _turned_away(credentials)
    except ssl.SSLCertVerificationError as error:
        return distrust(error.verify_message or str(error.reason), name, "the data plane")
    except ssl.SSLError as error:
        if credentials is None:  # no TLS there either
            return ""
        reason = error.reason or str(error)
        if "WRONG_VERSION_NUMBER" in reason:
            return "TLS: what answers there does not speak TLS: give it tls_cert and tls_key, or unset tls_ca here"
        return f"TLS: the handshake failed ({reason})"
    except (OSError, ValueError):  # nobody there, or silent: another reason
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


def _turned_away(credentials: Credentials) -> str:
    if not credentials.certificate:
        return "TLS: the data plane wants a certificate of its clients: set tls_cert and tls_key"
    try:
        read_key_pair(credentials.certificate, credentials.key)
    except ConfigurationError as error:
        return f"TLS: the data plane does not take our certificate: {error}"
    return (
        f"TLS: the data plane does not take our certificate {credentials.certificate}: its tls_client_ca did not sign "
        "it, or its clock is wrong; its log says why"
    )


def distrust(reason: str, name: str, whose: str, *, prefix: str = "") -> str:
    """Return why a server's certificate is not taken, and what to do about it.

    Args:
        reason: as OpenSSL says it.
        name: that the certificate was to hold.
        whose: such as ``the data plane``.
        prefix: of our keys of the configuration.
    """
    text = reason.lower()
    if "expired" in text:
        return f"TLS: {whose}'s certificate (its tls_cert) has expired: renew it"
    if "mismatch" in text or "not valid for" in text:
        return (
            f"TLS: {whose}'s certificate is not for '{name}' ({reason}): set {prefix or 'tls_'}server_name to a name "
            "that it holds, or make one that holds this one"
        )
    return f"TLS: {whose}'s certificate is not signed by an authority in {prefix}tls_ca ({reason})"
