"""Addresses as people write them, and which of them other machines can reach."""

import ipaddress

__all__ = ["check_no_url", "is_loopback", "join_address", "split_address"]


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host stands in brackets.

    Raises:
        ValueError: no port, or none that can be.
    """
    check_no_url(text)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"'{text}' is no host:port with a port up to 65535, such as 127.0.0.1:6380 or [::1]:6380")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"'{text}': an IPv6 host stands in brackets, such as [::1]:6380")
    return host, int(port)


def check_no_url(text: str) -> None:
    """Refuse a URL where a host, or a host and a port, is meant.

    Raises:
        ValueError: it has a scheme; the message says what to write.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return
    bare = rest.rpartition("@")[2].partition("/")[0]
    encrypted = ", and TLS is configured with keys of its own (tls_ca)" if scheme in ("rediss", "https") else ""
    raise ValueError(f"'{scheme}://...' is a URL; write its host and port alone: {bare}{encrypted}")


def join_address(host: str, port: int) -> str:
    """Return ``host:port`` as :func:`split_address` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address, IPv4 or IPv6, or a name; of names that is localhost."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
