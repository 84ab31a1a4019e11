"""Checks of access: users and protection of a storage node, and the certificates that a configuration names."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from shadowserve.errors import ConfigurationError
from shadowserve.tls import read_authorities, read_key_pair
from shadowserve_tools.doctor.finding import Finding, Machine
from storage_kv.config import StorageConfig

DAYS_LEFT_MIN: Final = 30
"""Time enough to make new ones."""
_MAKE: Final = "make certificates: scripts/make-certificates, or your own authority"


def access(machine: Machine, config: StorageConfig) -> Iterator[Finding]:
    """Check the users file, and the protection of an address that other machines can reach."""
    from storage_kv.access.users import Users
    from storage_kv.commands import BY_FULL_NAME

    path = str(machine.path(config.users_file)) if config.users_file else ""
    try:
        users = Users(config.model_copy(update={"users_file": path}), BY_FULL_NAME)
    except ConfigurationError as error:
        yield Finding("users_file", "failed", str(error), "docs/guides/security.md has the format")
        return
    if path:
        yield Finding("users_file", "ok", f"{path}: {len(users.by_name)} users, the default one included")
        yield from _private(machine, "users_file", config.users_file)
    if not config.listens_beyond_loopback:
        yield Finding("protection", "ok", f"{config.host}: other machines cannot connect")
        return
    if not users.anyone_enters or config.tls_client_ca:
        yield Finding("protection", "ok", f"{config.host}: clients authenticate")
    else:
        refuses, open_to_all = (
            "protected mode refuses all other machines",
            "every client that reaches it can read everything",
        )
        remedy = "set SHADOWSERVE_STORAGE_PASSWORD, users_file or tls_client_ca (docs/guides/security.md)"
        found = f"{config.host}: {refuses if config.protected_mode else open_to_all}"
        yield Finding("protection", "warning", found, remedy)
    if not config.tls_cert:
        found = "passwords and values cross the network in the clear"
        yield Finding("TLS", "warning", found, "set tls_cert and tls_key: scripts/make-certificates")


def certificates(machine: Machine, files: Mapping[str, str]) -> Iterator[Finding]:
    """Check the files that a program's TLS keys name, by key: there, readable, matching, and not about to expire."""
    paths = {key: str(machine.path(name)) for key, name in files.items() if name}
    for key in ("tls_ca", "tls_client_ca"):
        if key in paths:
            try:
                read_authorities(key, paths[key])
                yield Finding(key, "ok", paths[key])
            except ConfigurationError as error:
                yield Finding(key, "failed", str(error), _MAKE)
    if "tls_cert" in paths and "tls_key" in paths:
        try:
            days = (read_key_pair(paths["tls_cert"], paths["tls_key"]).expires - datetime.now(UTC)).days
            found = f"{paths['tls_cert']}, with its key, for another {days} days"
            yield Finding.of("tls_cert", days >= DAYS_LEFT_MIN, found, _MAKE)
        except ConfigurationError as error:
            yield Finding("tls_cert", "failed", str(error), _MAKE)
        yield from _private(machine, "tls_key", files["tls_key"])


def _private(machine: Machine, key: str, name: str) -> Iterator[Finding]:
    """Yield a warning for a file that others can read. An unreadable one has its own finding."""
    path = machine.path(name)
    if path.exists() and path.stat().st_mode & 0o007:
        yield Finding(key, "warning", f"{name} can be read by everyone", f"chmod o= {name}")
