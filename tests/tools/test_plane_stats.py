"""``shadowserve stats`` of a data plane."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machine import PATIENT
from rich.console import Console

from host_control.config import HostConfig
from shadowserve import __version__
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import ModelIdentity
from shadowserve.proto.convert import engine_message
from shadowserve_tools import main
from shadowserve_tools.plane_stats import table_of
from shadowserve_tools.processes import start_data_plane, start_storage

SMALL = ["--decompression-buffer-bytes", "8 MiB", "--store-buffer-bytes", "8 MiB", *PATIENT]
LAYOUT = ChunkLayout(
    dtype=DType.BFLOAT16, layers=2, kinds=2, vector_length=64, tokens=256, quantizer=Quantizer.LOSSLESS
)


def stats(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(main, ["stats", *arguments])


def test_a_narrow_terminal_shows_every_digit() -> None:
    """Symptom: in 80 columns, a tenant's limit of 2,000,000 keys was shown as 2,000,0…"""
    table = table_of("tenant", "keys", "bytes")
    table.add_row("a", "0 of 2,000,000", "0 B of 100 GiB")
    shown = io.StringIO()
    Console(width=24, file=shown).print(table)
    assert "…" not in shown.getvalue()


def test_a_data_plane_is_recognized_and_its_statistics_are_shown(tmp_path: Path) -> None:
    """Symptom: there were no stats for a data plane."""
    with start_storage(tmp_path) as storage, start_data_plane(tmp_path, storage.address, *SMALL) as plane:
        engine = engine_message(ModelIdentity(model="a model", dtype="bfloat16"), LAYOUT, paged=False)
        client = HostConfig(data_plane=plane.address).client(0, engine)
        client.connect(60.0, LAYOUT)
        assert not client.find([(bytes(32), [bytes([number]) * 32 for number in range(3)])], 60.0)()[0].stored.any()
        host, _, port = plane.address.rpartition(":")
        view = json.loads(stats("--host", host, "--port", port, "--json").output)
        assert (view["kind"], view["version"], view["storage_connected"]) == ("data plane", __version__, True)
        assert (view["lookup_keys"], view["lookup_hits"], view["lookup_hit_rate"]) == (3, 0, 0.0)
        assert view["engines"][0]["chunk_tokens"] == 256 and view["since"] == "start"
        done = stats("--host", host, "--port", port)
        assert done.exit_code == 0, done.output
        for text in ("data plane, shadowserve", "connected", "0.0 %", "lossless", "256"):
            assert text in done.output
        watched = stats("--host", host, "--port", port, "--watch", "--count", "2", "--interval", "0.05", "--json")
        first, second = (json.loads(line) for line in watched.output.splitlines())
        assert first["since"] == "start" and second["since"] != "start" and second["lookup_keys_per_s"] == 0
        client.close()


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_statistics_are_read_over_a_unix_socket_and_over_tls(tmp_path: Path, certificates: Path, kind: str) -> None:
    names = {"--tls-cert": "server.crt", "--tls-key": "server.key", "--tls-client-ca": "ca.crt"}
    flags = [word for flag, name in names.items() for word in (flag, str(certificates / name))]
    own = {"--tls-ca": "ca.crt", "--tls-cert": "client.crt", "--tls-key": "client.key"}
    address = ["--listen", f"unix:{tmp_path}/plane"]
    with start_data_plane(tmp_path, "127.0.0.1:1", *SMALL, *(address if kind == "socket" else flags)) as plane:
        host, _, port = plane.address.rpartition(":")
        asked = ["--host", plane.address] if kind == "socket" else ["--host", host, "--port", port]
        asked += [word for flag, name in own.items() for word in (flag, str(certificates / name)) if kind == "tls"]
        view = json.loads(stats(*asked, "--json").output)
    assert view["kind"] == "data plane" and not view["storage_connected"]
