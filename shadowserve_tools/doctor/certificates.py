"""Certificates that a configuration names: there, readable, matching, and not about to expire."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from shadowserve.errors import ConfigurationError
from shadowserve_tools.doctor.finding import Finding, Machine

DAYS_LEFT_MIN: Final = 30
"""Time enough to make new ones."""
_MAKE: Final = "make certificates: scripts/make-certificates, or your own authority"


def certificates(machine: Machine, files: Mapping[str, str]) -> Iterator[Finding]:
    """Look at the files that a program's TLS keys name.

    Args:
        machine: whose files they are.
        files: key of the configuration to path; empty ones are left out.
    """
    from shadowserve.tls import read_authorities

    paths = {key: str(machine.path(name)) for key, name in files.items() if name}
    for key in ("tls_ca", "tls_client_ca"):
        if key in paths:
            try:
                read_authorities(key, paths[key])
                yield Finding(key, "ok", paths[key])
            except ConfigurationError as error:
                yield Finding(key, "failed", str(error), _MAKE)
    if "tls_cert" in paths and "tls_key" in paths:
        yield _pair(paths["tls_cert"], paths["tls_key"])
        yield from _open_key(machine, files["tls_key"])


def _pair(certificate: str, key: str) -> Finding:
    from shadowserve.tls import read_key_pair

    try:
        expires = read_key_pair(certificate, key).expires
    except ConfigurationError as error:
        return Finding("tls_cert", "failed", str(error), _MAKE)
    days = (expires - datetime.now(UTC)).days
    found = f"{certificate}, with its key, for another {days} days"
    return Finding.of("tls_cert", days >= DAYS_LEFT_MIN, found, _MAKE)


def _open_key(machine: Machine, name: str) -> Iterator[Finding]:
    """Yield a warning for a key that others can read. An unreadable key has its own finding."""
    path = machine.path(name)
    if path.exists() and path.stat().st_mode & 0o007:
        yield Finding("tls_key", "warning", f"{name} can be read by everyone", f"chmod o= {name}")
