"""A server that other machines can reach: protected mode, warnings, and ``shadowserve doctor``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from machine import wait_for
from storage_support import Child
from test_access import own_address
from test_tls import make_certificates, tls_flags

from shadowserve_tools import main


@pytest.fixture
def users(tmp_path: Path) -> Path:
    file = tmp_path / "users.acl"
    file.write_text("user ann on >pa ~* +@all\n")
    file.chmod(0o600)
    return file


def test_protected_mode_depends_on_users_and_certificates(
    start: Callable[..., Child], users: Path, tmp_path: Path
) -> None:
    child = start("--host", "0.0.0.0", "--users-file", str(users))
    with child.client(own_address()) as outside:
        assert outside.call("PING") == b"NOAUTH Authentication required."
        assert outside.call("AUTH", "ann", "pa") == b"OK"
        assert outside.call("ACL", "SETUSER", "default", "on", "nopass", "+@all", "~*") == b"OK"
    with child.client(own_address()) as outside:  # protected mode refuses clients without a password
        assert outside.receive_to_end().startswith(b"-DENIED ")
    wait_for(lambda: any("no_tls" in line for line in child.log))
    make_certificates(tmp_path)
    child = start("--host", "0.0.0.0", *tls_flags(tmp_path))
    with child.client(own_address()) as outside:
        assert outside.receive_to_end().startswith(b"-DENIED ")  # TLS alone does not identify clients
    assert not any("no_tls" in line for line in child.log)
    child = start("--host", "0.0.0.0", *tls_flags(tmp_path, mutual=True))
    with child.client(own_address()) as outside:
        outside.send("PING")
        assert outside.receive_to_end().startswith(b"-ERR this server speaks TLS only")


def findings(config: Path, text: str) -> dict[str, list[str]]:
    config.write_text(f"storage:\n  port: 1\n{text}")
    result = CliRunner().invoke(main, ["doctor", "--role", "storage", "--config", str(config), "--json"])
    found: dict[str, list[str]] = {}
    for finding in json.loads(result.output)["findings"]:
        found.setdefault(finding["what"], []).append(finding["state"])
    return found


def test_doctor_looks_at_users_protection_and_certificates(users: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    assert findings(config, "")["protection"] == ["ok"]
    found = findings(config, "  host: 0.0.0.0\n")
    assert found["protection"] == ["warning"] and found["TLS"] == ["warning"]
    found = findings(config, f"  host: 0.0.0.0\n  users_file: {users}\n")
    assert found["protection"] == ["ok"] and found["users_file"] == ["ok"] and found["TLS"] == ["warning"]
    users.chmod(0o644)
    assert findings(config, f"  users_file: {users}\n")["users_file"] == ["ok", "warning"]
    users.write_text("user ann +nosuch\n")
    assert findings(config, f"  users_file: {users}\n")["users_file"] == ["failed"]
    make_certificates(tmp_path)
    files = f"  tls_cert: {tmp_path}/server.crt\n  tls_key: {tmp_path}/server.key\n  tls_client_ca: {tmp_path}/ca.crt\n"
    found = findings(config, "  host: 0.0.0.0\n" + files)
    assert (
        found["protection"] == ["ok"] and found["tls_cert"] == found["tls_client_ca"] == ["ok"] and "TLS" not in found
    )
    (tmp_path / "server.key").write_text("nothing")
    assert findings(config, files)["tls_cert"] == ["failed"]
