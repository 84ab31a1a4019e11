"""Hashes of files and their cache."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from identity_support import hashes
from machine import NEVER_S

from host_control.config import HostConfig
from host_control.vllm.identity import content
from host_control.vllm.identity.content import changed_since, hub_digest
from host_control.vllm.support import UncacheableError

_OPENED: list[str] = []
_LISTENING = [False]


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if _LISTENING[0] and event == "open":
        _OPENED.append(str(arguments[0]))


sys.addaudithook(_heard)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Collect the names of all files that this process opens."""
    _OPENED.clear()
    _LISTENING[0] = True
    try:
        yield _OPENED
    finally:
        _LISTENING[0] = False


def made(folder: Path, count: int = 3, size: int = 100_000) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"model-{index}.safetensors" for index in range(count)]
    for index, file in enumerate(files):
        file.write_bytes(bytes([index]) * size)
    return files


def expected(files: list[Path]) -> list[str]:
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_every_byte_changes_the_digest(tmp_path: Path) -> None:
    (file,) = made(tmp_path / "m", 1, size=(9 << 20) + 5)
    (before,) = hashes().digests([file])
    assert [before] == expected([file])
    with file.open("r+b") as handle:
        handle.seek(5_000_011)
        handle.write(b"x")
    assert hashes().digests([file]) == expected([file]) != [before]


def test_unchanged_files_are_not_opened_again(tmp_path: Path) -> None:
    files, memory = made(tmp_path / "m"), tmp_path / "cache" / "content.json"
    first = hashes(memory, settle_seconds=-1e6).digests(files)
    with opened() as names:
        assert hashes(memory, settle_seconds=-1e6).digests(files) == first
    assert [name for name in names if "model-" in name] == []
    assert [name for name in names if name == str(memory)] == [str(memory)], "and the memory is read once"
    assert memory.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", ["content", "size", "replaced", "times put back"])
def test_changed_files_are_read_again(tmp_path: Path, change: str) -> None:
    files, memory = made(tmp_path / "m"), tmp_path / "content.json"
    hashes(memory, settle_seconds=-1e6).digests(files)
    status, size = files[1].stat(), files[1].stat().st_size
    if change == "replaced":
        files[1].unlink()
    files[1].write_bytes(b"z" * (size + (change == "size")))
    if change in ("replaced", "times put back"):
        os.utime(files[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    with opened() as names:
        assert hashes(memory, settle_seconds=-1e6).digests(files) == expected(files)
    assert [Path(name).name for name in names if "model-" in name][:1] == ["model-1.safetensors"]


def test_a_recently_changed_file_is_not_cached(tmp_path: Path) -> None:
    # A cached digest would hide another change in the same tick of the file system's clock.
    files, memory = made(tmp_path / "m"), tmp_path / "content.json"
    hashes(memory, settle_seconds=1e6).digests(files)
    with opened() as names:
        hashes(memory, settle_seconds=1e6).digests(files)
    assert sum("model-" in name for name in names) == len(files)


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 1, "files": {"/a": [1, 2, 3, 4, "no"]}}', b"\xff" * 9,
               b'{"version": 1, "files": {"/a": 5}}', b"[" * 100_000, "of others", "a folder", "a link",
               "below a file"],
)  # fmt: skip
def test_an_unusable_cache_costs_one_log_line(tmp_path: Path, damage: Any, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    files, memory = made(tmp_path / "m"), tmp_path / "content.json"
    hashes(memory, settle_seconds=-1e6).digests(files)
    if damage == "of others":
        memory.chmod(0o666)
    elif damage == "a folder":
        memory.unlink()
        memory.mkdir()
    elif damage == "below a file":
        memory /= "content.json"
    elif damage == "a link":
        memory.rename(tmp_path / "elsewhere.json")
        memory.symlink_to(tmp_path / "elsewhere.json")
    else:
        memory.write_bytes(damage)
    assert hashes(memory, settle_seconds=-1e6).digests(files) == expected(files)
    assert len([record for record in caplog.records if "identity_cache" in record.getMessage()]) == 1


def test_the_cache_drops_the_oldest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_ENTRIES_MAX", 4)
    files, memory = made(tmp_path / "m", 6, 10), tmp_path / "content.json"
    for file in files:
        hashes(memory, settle_seconds=-1e6).digests([file])
    assert [Path(path).name[6] for path in json.loads(memory.read_text())["files"]] == ["2", "3", "4", "5"]


@pytest.mark.parametrize("kind", ["gone", "pipe", "folder"])
def test_unreadable_files_are_uncacheable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(UncacheableError, match="cannot be read|not a regular file"):
        hashes().digests([path])


def hub(folder: Path, name: str, data: bytes) -> Path:
    """Create a file in a hub cache, with the layout of huggingface_hub."""
    blob = folder / "models--a--model" / "blobs" / name
    link = folder / "models--a--model" / "snapshots" / ("0" * 40) / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


def test_hashes_in_hub_file_names_are_used(tmp_path: Path) -> None:
    name = hashlib.sha256(b"weights").hexdigest()
    link = hub(tmp_path, name, b"weights")
    with opened() as names:
        assert hashes().digests([link]) == [name] == [hub_digest(link)]
    assert not [path for path in names if "models--" in path]


@pytest.mark.parametrize("name", ["a" * 40, "A" * 64, "g" * 64, "a" * 63, "outside of a hub's cache"])
def test_other_file_names_are_not_hashes(tmp_path: Path, name: str) -> None:
    link = hub(tmp_path, name, b"config")
    if "outside" in name:
        link = tmp_path / "blobs" / ("a" * 64)
        link.parent.mkdir()
        link.write_bytes(b"config")
    assert hub_digest(link) is None
    assert hashes().digests([link]) == [hashlib.sha256(b"config").hexdigest()]


def test_a_changed_symbolic_link_is_a_change(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", 1)[0].parent, made(tmp_path / "new", 1)[0].parent
    (tmp_path / "current").symlink_to(old)
    file = tmp_path / "current" / "model-0.safetensors"
    moment = max(path.lstat().st_ctime_ns for path in (tmp_path / "current", file, new / file.name))
    assert not changed_since(file, moment)
    (tmp_path / "next").symlink_to(new)
    (tmp_path / "next").replace(tmp_path / "current")
    os.utime(tmp_path / "current", follow_symlinks=False)
    assert changed_since(file, moment - 1)


def test_ranks_that_start_together_hash_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for the ranks: locks of two open files exclude each other in one process, too."""
    files, barrier, read = made(tmp_path / "m", 4, 8 << 20), threading.Barrier(3), list[Path]()
    digest = content._digest
    monkeypatch.setattr(content, "_digest", lambda path, progress: (read.append(path), digest(path, progress))[1])

    def rank() -> list[str]:
        barrier.wait(NEVER_S)
        found: list[str] = hashes(tmp_path / "c" / "content.json", settle_seconds=-1e6).digests(files)
        return found

    with ThreadPoolExecutor(3) as ranks:
        results = [ranks.submit(rank) for _ in range(3)]
        assert all(each.result() == expected(files) for each in results)
    assert sorted(read) == files


def test_a_lock_that_is_never_released_ends_in_hashing(tmp_path: Path) -> None:
    memory, files = tmp_path / "content.json", made(tmp_path / "m")
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl,sys;f=open(sys.argv[1],'w');fcntl.flock(f,2);print(1,flush=True);input()",
         f"{memory}.lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        assert hashes(memory, lock_seconds=0.2).digests(files) == expected(files)
    finally:
        holder.communicate(b"\n", timeout=NEVER_S)


def test_long_hashing_is_logged(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(content, "_LOGGED_BYTES_MIN", 1000)
    hashes(tmp_path / "content.json").digests(made(tmp_path / "m"))
    assert "hashing 3 files" in caplog.text and "0.0 GB" in caplog.text


def test_without_a_home_folder_files_are_hashed_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    files = made(tmp_path / "m")
    assert content.content_hashes(HostConfig(), logging.getLogger("t")).digests(files) == expected(files)


def test_the_path_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = made(tmp_path / "m")
    for configured, place in (
        ("", tmp_path / "cache" / "shadowserve"),
        (str(tmp_path / "own" / "c.json"), tmp_path / "own"),
    ):
        content.content_hashes(HostConfig(identity_cache=configured), logging.getLogger("t")).digests(files)
        assert list(place.iterdir())
    before = sorted(tmp_path.rglob("*"))
    content.content_hashes(HostConfig(identity_cache="none"), logging.getLogger("t")).digests(files)
    assert sorted(tmp_path.rglob("*")) == before
