"""``shadowserve pool`` and ``shadowserve verify`` on real files."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from golden_volume import VALUES
from volume_support import Store

from shadowserve.errors import DeviceError
from shadowserve.native import BlockDevice
from shadowserve_tools import main

POOL_HEX = bytes(range(16)).hex()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file that is a volume with forty objects."""
    path = tmp_path / "device"
    done = run("pool", "format", path, "--size", "8MiB", "--objects-max", "100", "--pool", POOL_HEX)
    assert done.exit_code == 0, done.output
    assert f"an empty volume of pool {POOL_HEX}" in done.output
    with closing(BlockDevice(path)) as device:
        store = Store(device)
        for key, value in VALUES.items():
            store.keep(key, value)
        store.drain()
        store.volume.close()
    return path


def test_verify_and_status_of_a_sound_volume(path: Path) -> None:
    done = run("verify", path)
    assert done.exit_code == 0, done.output
    assert "sound; 40 objects" in done.output
    (result,) = json.loads(run("verify", path, "--json").output)
    assert result["sound"] and result["objects"] == 40 and result["pool"] == POOL_HEX and not result["findings"]
    (row,) = json.loads(run("pool", "status", path, "--json").output)
    assert row["objects"] == 40 and row["objects_max"] == 100 and row["state"] == "sound"
    shown = run("pool", "status", path)
    assert shown.exit_code == 0 and f"{path}: sound" in shown.output and "objects  40 of at most 100" in shown.output


def test_verify_finds_a_flipped_bit_and_changes_nothing(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"\x28" * 1000)  # in the largest value
    content[at + 500] ^= 1
    content[20] ^= 1  # in the first superblock
    path.write_bytes(content)
    done = run("verify", path)
    assert done.exit_code == 1, done.output
    assert "superblock block 0: this copy is not sound" in done.output
    assert "its bytes are not those that were stored" in done.output
    assert path.read_bytes() == content
    (result,) = json.loads(run("verify", path, "--json", "--no-objects").output)
    assert [finding["part"] for finding in result["findings"]] == ["superblock"]


def test_verify_reports_a_file_without_a_volume(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 21))
    done = run("verify", path)
    assert done.exit_code == 1 and "1 finding;" in done.output
    assert "there is no volume; the device holds nothing" in done.output
    shown = run("pool", "status", path)
    assert shown.exit_code == 1 and "there is no volume" in shown.output and "objects" not in shown.output


def test_a_missing_path_is_refused_with_advice(tmp_path: Path) -> None:
    advice = {
        tmp_path / "absent": "give its size",
        tmp_path / "folder" / "absent": f"make the folder {tmp_path / 'folder'}",
        Path("/dev/absent"): "lsblk",
        tmp_path: "it is a folder",
    }
    for path, told in advice.items():
        with pytest.raises(DeviceError, match=re.escape(told)):
            BlockDevice(path)


def test_misuse_has_another_exit_code_than_findings(tmp_path: Path, path: Path) -> None:
    assert run("verify").exit_code == 2
    assert run("verify", tmp_path / "absent").exit_code == 2
    assert run("pool", "format", tmp_path / "new", "--size", "8 parsecs").exit_code == 2
    assert run("pool", "format", tmp_path / "new", "--size", "8MiB", "--pool", "12").exit_code == 2
    with closing(BlockDevice(path)):
        assert run("verify", path).exit_code == 2  # in use
