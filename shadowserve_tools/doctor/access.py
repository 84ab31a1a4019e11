"""Checks of access to a storage node: users, protection, and TLS."""

from collections.abc import Iterator

from shadowserve.errors import ConfigurationError
from shadowserve_tools.doctor.finding import Finding, Machine
from storage_kv.config import StorageConfig


def access(machine: Machine, config: StorageConfig) -> Iterator[Finding]:
    """Check the users file, and the protection of an address that other machines can reach.

    Args:
        machine: Machine of the files.
        config: Configuration of the server.
    """
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
        if machine.path(config.users_file).stat().st_mode & 0o007:
            yield Finding("users_file", "warning", f"{path} can be read by everyone", f"chmod o= {config.users_file}")
    if not config.listens_beyond_loopback:
        yield Finding("protection", "ok", f"{config.host}: other machines cannot connect")
        return
    if not users.anyone_enters or config.tls_client_ca:
        yield Finding("protection", "ok", f"{config.host}: clients authenticate")
    elif config.protected_mode:
        remedy = "set SHADOWSERVE_STORAGE_PASSWORD, users_file or tls_client_ca (docs/guides/security.md)"
        yield Finding("protection", "warning", f"{config.host}: protected mode refuses all other machines", remedy)
    else:
        remedy = "set SHADOWSERVE_STORAGE_PASSWORD, users_file or tls_client_ca (docs/guides/security.md)"
        yield Finding(
            "protection", "warning", f"{config.host}: every client that reaches it can read everything", remedy
        )
    if not config.tls_cert:
        found = "passwords and values cross the network in the clear"
        yield Finding("TLS", "warning", found, "set tls_cert and tls_key: scripts/make-certificates")
