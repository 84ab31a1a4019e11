"""Storage servers with TLS, and the matching configuration of a data plane."""

import socket
import ssl
from pathlib import Path
from typing import Any

from dataplane_support import Server


class TlsServer(Server):
    """A storage server with TLS."""

    def __init__(self, kind: str, directory: Path, folder: Path, *, mutual: bool = False, password: str = "") -> None:
        self.context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        files = {"cert": folder / "server.crt", "key": folder / "server.key"}
        if mutual:
            self.context.load_cert_chain(folder / "client.crt", folder / "client.key")
        if kind == "redis":
            flags = {
                "tls-cert-file": files["cert"],
                "tls-key-file": files["key"],
                "tls-ca-cert-file": folder / "ca.crt",
            }
            options = [word for name, path in flags.items() for word in (f"--{name}", str(path))]
            options += ["--tls-auth-clients", "yes" if mutual else "no"]
        else:
            options = ["--tls-cert", str(files["cert"]), "--tls-key", str(files["key"])]
            options += ["--tls-client-ca", str(folder / "ca.crt")] if mutual else []
        super().__init__(kind, directory, password=password, options=tuple(options))
        if kind == "redis":
            self.options += ("--tls-port", str(self.port), "--port", "0")

    def _connection(self) -> socket.socket:
        return self.context.wrap_socket(super()._connection(), server_hostname="127.0.0.1")


def trusting(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"storage_tls_ca": str(folder / "ca.crt")} | changes


def showing(folder: Path) -> dict[str, Any]:
    return {"storage_tls_cert": str(folder / "client.crt"), "storage_tls_key": str(folder / "client.key")}
