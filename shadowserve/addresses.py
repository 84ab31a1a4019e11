"""Parsing of host:port addresses, and the test for loopback addresses."""

import ipaddress


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, an IPv6 host in brackets; ValueError says what is wrong."""
    check_no_url(text)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"'{text}' is not host:port with a port up to 65535, such as 127.0.0.1:6380 or [::1]:6380")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"'{text}': an IPv6 host needs brackets, such as [::1]:6380")
    return host, int(port)


def check_no_url(text: str) -> None:
    """Refuse a URL in place of a host or of host:port, with a ValueError that says what to write."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return
    bare = rest.rpartition("@")[2].partition("/")[0]
    encrypted = "; configure TLS with tls_ca" if scheme in ("rediss", "https") else ""
    raise ValueError(f"'{scheme}://...' is a URL; write its host and port alone: {bare}{encrypted}")


def join_address(host: str, port: int) -> str:
    """Return ``host:port`` for :func:`split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True for a loopback address (IPv4 or IPv6) or the name localhost."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
