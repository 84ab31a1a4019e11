"""Commands on real files. They describe a device without a sound volume alike, and none formats it without force."""

import errno
import json
import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from golden_volume import VALUES
from machine import WAIT_MAX_S
from pool_support import configuration
from simulated_device import SimulatedDevice
from store_driver import Driver
from volume_support import POOL, Store, device_of

from shadowserve.block import OperationKind
from shadowserve.errors import ConfigurationError, DeviceError
from shadowserve.native import BlockDevice
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.volume import block_reader, signature_check
from shadowserve.pool.volume.format import BLOCK_BYTES, SUPERBLOCK_OFFSETS, FormatError
from shadowserve.pool.volume.verification import verify_volume
from shadowserve.pool.volume.volume import Volume
from shadowserve_tools import main

MIB = 1 << 20
LARGE = 272 * MIB
"""Device size that exceeds the bytes read as a whole."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def words_of_the_server(path: Path) -> str:
    """Return the reason why a server does not start with a device."""
    with pytest.raises(ConfigurationError) as refused:
        Driver(DevicePool(configuration(devices=[{"path": str(path)}]), measure=False))
    return str(refused.value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a device that another process has fails at once."""
    monkeypatch.setitem(BlockDevice.__init__.__kwdefaults__, "busy_wait_s", 0.0)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A file that is a volume with forty objects."""
    path = tmp_path / "volume"
    assert run("pool", "format", path, "--size", "8MiB", "--objects-max", "100", "--pool", POOL.hex()).exit_code == 0
    with closing(BlockDevice(path)) as device:
        store = Store(device)
        for key, value in VALUES.items():
            store.keep(key, value)
        store.volume.close()
    return path


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A block device of 320 MiB: mkfs.xfs needs at least 300 MiB."""
    backing = tmp_path / "backing"
    backing.write_bytes(b"")
    os.truncate(backing, 320 * MIB)
    made = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, timeout=WAIT_MAX_S, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True, timeout=WAIT_MAX_S)


# ---- Commands


def test_verify_and_status_of_a_sound_volume(volume: Path) -> None:
    done = run("verify", volume)
    assert done.exit_code == 0, done.output
    assert "sound; 40 objects" in done.output
    (result,) = json.loads(run("verify", volume, "--json").output)
    assert result["sound"] and result["objects"] == 40 and result["pool"] == POOL.hex() and not result["findings"]
    (row,) = json.loads(run("pool", "status", volume, "--json").output)
    assert row["objects"] == 40 and row["objects_max"] == 100 and row["state"] == "sound"
    shown = run("pool", "status", volume)
    assert shown.exit_code == 0 and f"{volume}: sound" in shown.output and "objects  40 of at most 100" in shown.output


def test_verify_finds_a_flipped_bit_and_changes_nothing(volume: Path) -> None:
    content = bytearray(volume.read_bytes())
    at = content.index(b"\x28" * 1000)  # in the largest value
    content[at + 500] ^= 1
    content[20] ^= 1  # in the first superblock
    volume.write_bytes(content)
    done = run("verify", volume)
    assert done.exit_code == 1, done.output
    assert "superblock block 0: this copy is not sound" in done.output
    assert "its bytes are not those that were stored" in done.output
    assert volume.read_bytes() == content
    (result,) = json.loads(run("verify", volume, "--json", "--no-objects").output)
    assert [finding["part"] for finding in result["findings"]] == ["superblock"]


def test_verify_reports_a_file_without_a_volume(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 21))
    done = run("verify", path)
    assert done.exit_code == 1 and "1 finding;" in done.output
    assert "there is no volume; the device holds nothing" in done.output
    shown = run("pool", "status", path)
    assert shown.exit_code == 1 and "there is no volume" in shown.output and "objects" not in shown.output


def test_misuse_has_another_exit_code_than_findings(tmp_path: Path) -> None:
    assert run("verify").exit_code == 2
    assert run("verify", tmp_path / "absent").exit_code == 2
    assert run("pool", "format", tmp_path / "new", "--size", "8 parsecs").exit_code == 2
    assert run("pool", "format", tmp_path / "new", "--size", "8MiB", "--pool", "12").exit_code == 2


def test_a_missing_path_is_refused_with_advice(tmp_path: Path) -> None:
    advice = {
        tmp_path / "absent": "give its size",
        tmp_path / "folder" / "absent": f"make the folder {tmp_path / 'folder'}",
        Path("/dev/absent"): "lsblk",
        tmp_path: "it is a folder",
    }
    for path, message in advice.items():
        with pytest.raises(DeviceError, match=re.escape(message)):
            BlockDevice(path)


# ---- Truncated devices


@pytest.mark.parametrize("size", [8 * MIB - BLOCK_BYTES, 3 * MIB, MIB // 2], ids=["by a block", "by much", "to a bit"])
def test_verify_status_and_server_describe_a_truncated_device_alike(volume: Path, size: int) -> None:
    """Symptom: verify and pool status reported 'sound', but the server refused the volume."""
    os.truncate(volume, size)
    message = words_of_the_server(volume)
    words = f"device {volume} has {size} bytes, was formatted with {8 * MIB}: give it back its size"
    assert words in message
    checked, status = run("verify", volume), run("pool", "status", volume)
    assert checked.exit_code == status.exit_code == 1
    assert words in checked.output and words in status.output and ": sound" not in checked.output + status.output
    (result,) = json.loads(run("verify", volume, "--json").output)
    assert not result["sound"] and [each["part"] for each in result["findings"]] == ["size"]
    (row,) = json.loads(run("pool", "status", volume, "--json").output)
    assert words in row["state"] and row["pool"] != "none"


@pytest.mark.usefixtures("impatient")
def test_status_also_lists_devices_that_cannot_be_opened(volume: Path, tmp_path: Path) -> None:
    with closing(BlockDevice(tmp_path / "used", size=MIB)):
        done = run("pool", "status", tmp_path / "used", volume, "--json")
        assert done.exit_code == 1
        used, sound = json.loads(done.output)
        assert "another process has it" in used["state"] and sound["state"] == "sound"
        checked = run("verify", tmp_path / "used", volume, "--json")
        assert checked.exit_code == 2
        assert [each["sound"] for each in json.loads(checked.stdout)] == [False, True]


def test_verify_describes_two_volumes_superblocks_like_the_server(volume: Path) -> None:
    """Symptom: 'the command line cannot be used'."""
    with volume.open("r+b") as file:
        file.seek(SUPERBLOCK_OFFSETS[1])
        file.write(device_of(seed=99).peek(SUPERBLOCK_OFFSETS[1], BLOCK_BYTES))
    assert "two volumes" in words_of_the_server(volume)
    checked, status = run("verify", volume), run("pool", "status", volume)
    assert checked.exit_code == status.exit_code == 1
    assert "two volumes" in checked.output and "two volumes" in status.output


# ---- Devices with other contents


def refused(path: Path, meaning: str) -> None:
    """Check that server and command refuse to format ``meaning``, and that --force suffices."""
    before = path.read_bytes() if path.is_file() and path.stat().st_size < LARGE else None
    assert re.search(meaning, words_of_the_server(path))
    done = run("pool", "format", path)
    assert done.exit_code == 1 and re.search(meaning, done.output) and "--force" in done.output
    assert before is None or path.read_bytes() == before
    forced = run("pool", "format", path, "--force")
    assert forced.exit_code == 0 and re.search(f"dropped: .*{meaning}", forced.output), forced.output
    assert run("pool", "status", path).exit_code == 0


def sparse(path: Path, size: int, *parts: tuple[int, bytes]) -> Path:
    """Create a file with bytes at given offsets; negative offsets count from its end."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, content in parts:
            file.seek(offset if offset >= 0 else size + offset)
            file.write(content)
    return path


@pytest.mark.parametrize(
    ("offset", "content", "meaning"),
    [
        (0, b"XFSB", "XFS"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (512, b"EFI PART", "GPT"),
        (512, b"LABELONE", "LVM"),
        (1536, b"LABELONE", "LVM"),
        (0, b"\xfc\x4e\x2b\xa9", "MD RAID"),
        (4096, b"\xfc\x4e\x2b\xa9", "MD RAID"),
        (-8192, b"\xfc\x4e\x2b\xa9", "MD RAID"),
        (-65536, b"\xfc\x4e\x2b\xa9", "MD RAID"),
        (131072 + 5 * 1024, struct.pack("<Q", 0x00BAB10C), "ZFS"),
        (-131072, struct.pack("<Q", 0x00BAB10C), "ZFS"),
        (-512, b"EFI PART", "GPT"),
        (-4096, b"EFI PART", "GPT"),
        (16384, b"SKUL\xba\xbe", "LUKS"),
        (65526, b"SWAPSPACE2", "swap"),
        (4120, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81"), "bcache"),
        (1 << 20, bytes.fromhex("0dd001c0"), "VMFS"),
        (64 * MIB + 64, b"_BHRfS_M", "Btrfs"),
        (128 * MIB + 56, b"\x53\xef", "ext"),
        (32769, b"CD001", "ISO 9660"),
        (3, b"NTFS    ", "NTFS"),
        (1024, b"\x10\x20\xf5\xf2", "F2FS"),
        (0, b"bluestore block device", "Ceph"),
        (LARGE // 2 + 4096 * 3 + 17, b"x" * (2 * MIB), "something"),
        (-100, b"x", "something"),
    ],
)
def test_a_signature_is_found_at_every_known_place(offset: int, content: bytes, meaning: str, tmp_path: Path) -> None:
    """Symptom: the device was formatted, because only its first MiB was checked."""
    size = 16 * MIB if 0 <= offset < 4 * MIB else LARGE
    with closing(BlockDevice(sparse(tmp_path / "device", size, (offset, content)))) as device:
        assert re.search(meaning, signature_check.describe_content(device) or "")


@pytest.mark.parametrize(("size", "offset"), [(16 * MIB, 512), (LARGE, -4096)])
def test_content_with_a_signature_is_neither_opened_nor_formatted(size: int, offset: int, tmp_path: Path) -> None:
    refused(sparse(tmp_path / "device", size, (offset, b"EFI PART")), "GPT")


def test_content_that_only_wipefs_detects_is_named(tmp_path: Path) -> None:
    if shutil.which("wipefs", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
        pytest.skip("wipefs is not installed")
    refused(sparse(tmp_path / "device", 16 * MIB, (1024, bytes.fromhex("e2e1f5e0"))), "what wipefs calls erofs")


@pytest.mark.parametrize("words", ["exit 1", "echo nonsense", "echo '{\"signatures\": [{}]}'", "echo {}"])
def test_a_failing_wipefs_is_ignored(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "wipefs"
    program.write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with closing(BlockDevice(sparse(tmp_path / "device", 16 * MIB))) as device:
        assert signature_check.describe_content(device) is None


def test_an_unreadable_object_is_a_finding() -> None:
    """Symptom: 'there is no object'."""
    store = Store(device_of())
    for key, value in VALUES.items():
        store.keep(key, value)
    store.snapshot()
    device = store.device.restart()
    device.fail(OperationKind.READ, times=None, first_block=store.volume.superblock.layout.data_first)
    findings = {finding.what for finding in verify_volume(device).findings}
    assert findings and all(each.startswith("it cannot be read: ") for each in findings)


@pytest.mark.parametrize(("offsets", "size"), [(SUPERBLOCK_OFFSETS, BLOCK_BYTES), ([0], 2 * MIB)])
def test_a_volume_without_any_superblock_is_not_taken_for_empty(volume: Path, offsets: list[int], size: int) -> None:
    """Symptom: with both superblocks zeroed, the server formatted the device. Objects show what it is."""
    with volume.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(bytes(size))
    refused(volume, "a volume of ShadowServe")


def test_samples_of_a_large_device_find_what_is_promised(tmp_path: Path) -> None:
    """A run as long as two slices is found at any offset, and so are bytes spread over a hundredth of the device."""
    slices = 2 * (LARGE // signature_check.SAMPLES)
    chance = random.Random(7)
    for trial in range(8):
        content = chance.randrange(0, LARGE - slices, 512), b"\1" * slices
        with closing(BlockDevice(sparse(tmp_path / f"run{trial}", LARGE, content))) as device:
            assert signature_check.describe_content(device) is not None
        os.unlink(tmp_path / f"run{trial}")
    blocks = chance.sample(range(LARGE // BLOCK_BYTES), LARGE // BLOCK_BYTES // 100)
    with closing(BlockDevice(sparse(tmp_path / "spread", LARGE, *((b * BLOCK_BYTES, b"x") for b in blocks)))) as device:
        assert signature_check.describe_content(device) is not None


def test_a_large_empty_device_is_formatted_at_the_start(tmp_path: Path) -> None:
    path = sparse(tmp_path / "device", LARGE)
    pool = Driver(DevicePool(configuration(devices=[{"path": str(path)}]), measure=False))
    pool.put(b"a", b"x")
    pool.stop()
    assert run("verify", path).exit_code == 0


def test_no_device_is_formatted_if_another_is_refused(tmp_path: Path) -> None:
    empty = sparse(tmp_path / "empty", 16 * MIB)
    used = sparse(tmp_path / "used", 16 * MIB, (-4096, b"EFI PART"))
    with pytest.raises(ConfigurationError, match="GPT"):
        Driver(DevicePool(configuration(devices=[{"path": str(empty)}, {"path": str(used)}]), measure=False))
    assert not any(empty.read_bytes())


@pytest.mark.parametrize("tool", ["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "mkswap"])
def test_content_made_by_a_tool_is_not_formatted_over(tool: str, loop: Path) -> None:
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    if (program := shutil.which(tool, path=path)) is None:
        pytest.skip(f"{tool} is not installed")
    subprocess.run([program, str(loop)], check=True, capture_output=True, timeout=WAIT_MAX_S)
    refused(loop, {"mkfs.ext4": "ext", "mkfs.xfs": "XFS", "mkfs.btrfs": "Btrfs", "mkswap": "swap"}[tool])


def test_an_old_second_superblock_does_not_endanger_a_new_file_system(volume: Path) -> None:
    """Symptom: the copy at 1 MiB was sound, so the server 'repaired' the first one and overwrote the file system."""
    with volume.open("r+b") as file:
        file.write(bytes(BLOCK_BYTES))
        file.seek(1080)
        file.write(b"\x53\xef")
    before = volume.read_bytes()
    message = words_of_the_server(volume)
    assert "ext2, ext3 or ext4" in message and "at 1 MiB" in message and "wipefs" in message
    assert volume.read_bytes() == before
    assert message.removeprefix("the pool cannot be opened: ") in run("verify", volume).output
    with volume.open("r+b") as file:
        file.seek(1080)
        file.write(bytes(2))  # as wipefs does
    pool = Driver(DevicePool(configuration(devices=[{"path": str(volume)}]), measure=False))
    pool.stop()
    assert run("verify", volume).exit_code == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["device", "its file"])
def test_a_mounted_device_is_not_formatted_even_when_forced(how: str, loop: Path, tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["/usr/sbin/mkfs.ext4", "-q", str(loop)], check=True, timeout=WAIT_MAX_S)
    where = tmp_path / "mounted"
    where.mkdir()
    if subprocess.run(
        ["mount", str(loop), str(where)], capture_output=True, timeout=WAIT_MAX_S, check=False
    ).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (where / "file").write_bytes(b"x")
        done = run("pool", "format", "--force", loop if how == "device" else tmp_path / "backing")
        assert done.exit_code == 1 and ("mounted" in done.output or "loop device" in done.output), done.output
        assert (where / "file").read_bytes() == b"x"
    finally:
        subprocess.run(["umount", str(where)], check=True, timeout=WAIT_MAX_S)


def test_an_existing_file_keeps_its_size_when_formatted(tmp_path: Path) -> None:
    """Symptom: the pool refused the file with 'nothing was changed', but had enlarged it to the configured size."""
    path = sparse(tmp_path / "photos", 16 * MIB, (5 * MIB, b"a photo"))
    for options in ((), ("--force",)):
        done = run("pool", "format", path, "--size", "32MiB", *options)
        assert done.exit_code == 2 and "omit --size" in done.output
        assert path.stat().st_size == 16 * MIB


# ---- Unreadable devices


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM])
def test_an_unreadable_device_is_not_taken_for_empty(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: unreadable blocks counted as zeros, so the server formatted a volume."""
    monkeypatch.setattr(block_reader, "_PAUSES_S", 0.1)
    device = device_of()
    written = len(device.trace)
    device.fail(OperationKind.READ, error=error, times=None)
    with pytest.raises(OSError, match=os.strerror(error)):
        Store(device)
    with pytest.raises(OSError, match=os.strerror(error)):
        Volume.format(device, pool_id=POOL, objects_max=200)
    assert all(kind is OperationKind.READ for kind, _, _ in device.trace[written:])
    device.faults.clear()
    Store(device)


def test_an_unreadable_block_is_not_taken_for_empty() -> None:
    device = SimulatedDevice(16 * MIB)
    device.poke(9 * MIB, b"x")
    device.fail(OperationKind.READ, times=None, first_block=9 * MIB // BLOCK_BYTES, last_block=10 * MIB // BLOCK_BYTES)
    with pytest.raises((OSError, FormatError)):
        Volume.format(device, pool_id=POOL, objects_max=200)
