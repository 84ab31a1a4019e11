"""What files hold: the SHA-256 of every byte, remembered by what the file system says of a file.

Weights are hundreds of gigabytes, and an engine starts often, so what was hashed is remembered in a small file of the
user's: path, size, times and inode on one side, the digest on the other. A start with files that have not changed costs
one ``stat`` of each. Ranks that start together hash once: the others wait for a lock, and read what was remembered.

The file is a help and nothing more: where it is missing, broken, somebody else's or cannot be written, files are
hashed, and one line of the log says so.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from host_control.cache import cache_file
from host_control.config import HostConfig
from host_control.vllm.support import UncacheableError

_VERSION: Final = 1
_READ_BYTES: Final = 4 << 20
_FILE_BYTES_MAX: Final = 16 << 20
_ENTRIES_MAX: Final = 16_384
"""Of about 250 bytes: some hundred models. The oldest go first."""
_WORTH_A_LINE: Final = 1 << 30
_PROGRESS_S: Final = 10.0
_POLL_S: Final = 0.05
_HEX64: Final = re.compile(r"[0-9a-f]{64}")

_Signature = tuple[int, int, int, int]


def in_hub_cache(path: Path) -> bool:
    """Return whether a file is a blob of a Hugging Face hub's cache, which are named after what they hold."""
    real = path.resolve()
    return real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")


def hub_digest(path: Path) -> str | None:
    """Return the SHA-256 that a hub's cache has named a file after; ``None`` where it has not.

    Small files are named after git's SHA-1 of them, with 40 digits: that is no hash of ours.
    """
    name = path.resolve().name
    return name if in_hub_cache(path) and _HEX64.fullmatch(name) else None


def changed_since(path: Path, moment_ns: int) -> bool:
    """Return whether a file, or a link on the way to it, has changed since a moment, in nanoseconds of the epoch.

    What is in a hub's cache never changes: its commits and blobs are named after their content.
    """
    if in_hub_cache(path) and "snapshots" in path.parts:
        return False
    try:
        links = [part for part in (path, *path.absolute().parents) if part.is_symlink()]
        return any(status.st_ctime_ns > moment_ns for status in (path.stat(), *(link.lstat() for link in links)))
    except OSError:
        return True


class ContentHashes:
    """SHA-256 digests of files.

    Args:
        path: of the file that remembers; ``None`` for none.
        logger: for long work, and for a file that cannot be used.
        threads: at most so many files are read at once.
        settle_seconds: a file that changed less than this before it was read is not remembered: its times may be too
            coarse to show another change.
        lock_seconds: after so long a process no longer waits for another one that hashes.
    """

    def __init__(
        self,
        path: Path | None,
        logger: logging.Logger,
        *,
        threads: int = 4,
        settle_seconds: float = 2.0,
        lock_seconds: float = 900.0,
    ) -> None:
        self._path = path
        self._logger = logger
        self._threads = threads
        self._settle_ns = int(settle_seconds * 1e9)
        self._lock_seconds = lock_seconds
        self._said = False
        self._known: dict[str, tuple[_Signature, str]] = {}

    def digests(self, files: Sequence[Path]) -> list[str]:
        """Return the digest of each file, 64 hexadecimal digits.

        Raises:
            UncacheableError: a file cannot be read, is no regular file, or changes while it is read.
        """
        found = {path: hub_digest(path) for path in files}
        rest = [path for path, digest in found.items() if digest is None]
        found |= self._remembered(rest)
        if missing := [path for path in rest if found[path] is None]:
            with self._lock() as waited:
                if waited:
                    found |= self._remembered(missing)
                found |= self._hash([path for path in missing if found[path] is None])
        return [found[path] or "" for path in files]

    # ------------------------------------------------------------------ what is remembered

    def _remembered(self, files: Sequence[Path]) -> dict[Path, str | None]:
        known = {**self._known, **self._read()} if files else {}
        found: dict[Path, str | None] = {}
        for path in files:
            signature, digest = known.get(str(path.resolve()), (None, None))
            found[path] = digest if signature == _signature(_stat(path)) else None
        return found

    def _read(self) -> dict[str, tuple[_Signature, str]]:
        if self._path is None:
            return {}
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._say(f"cannot be read: {error}")
            return {}
        status = os.fstat(descriptor)
        # Whoever can write it can have one model's KV taken for another's.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            self._say("is no file, or one that others can write; it is not used")
            return {}
        with open(descriptor, "rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        try:
            return _checked(data)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._say(f"is broken and is written anew: {error}")
            return {}

    def _write(self, entries: dict[str, tuple[_Signature, str]]) -> None:
        self._known.update(entries)
        if self._path is None:
            return
        merged = {path: entry for path, entry in self._read().items() if path not in entries} | entries
        kept = dict(list(merged.items())[-_ENTRIES_MAX:])
        text = json.dumps(
            {"version": _VERSION, "files": {p: [*s, digest] for p, (s, digest) in kept.items()}}, indent=0
        )
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            partial.replace(self._path)
        except OSError as error:
            self._say(f"cannot be written: {error}")
            with contextlib.suppress(OSError):
                partial.unlink()

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            self._logger.warning(
                "ShadowServe: the memory of hashed files, %s (identity_cache), %s; files are hashed again",
                self._path,
                what,
            )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hash alone; yield whether somebody else may have hashed meanwhile."""
        if self._path is None:
            yield False
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._path.with_name(self._path.name + ".lock")
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._say(f"cannot be locked: {error}")
            yield False
            return
        try:
            ends = time.monotonic() + self._lock_seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= ends:
                        break  # hash beside whoever holds it
                    time.sleep(_POLL_S)
            yield True
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------ hashing

    def _hash(self, files: Sequence[Path]) -> dict[Path, str]:
        if not files:
            return {}
        sizes = [_stat(path).st_size for path in files]
        total, began, progress = sum(sizes), time.monotonic(), _Progress()
        if total >= _WORTH_A_LINE:
            self._logger.info(
                "ShadowServe: hashing %d files of %s, %.1f GB, once; they are remembered in %s",
                len(files),
                files[0].parent,
                total / 1e9,
                self._path or "nothing, since identity_cache is none",
            )
        # The largest first, so that no thread is left alone with it.
        order = sorted(range(len(files)), key=lambda index: -sizes[index])
        with ThreadPoolExecutor(min(self._threads, len(files)), thread_name_prefix="shadowserve-hash") as pool:
            running = {files[index]: pool.submit(_digest, files[index], progress) for index in order}
            while wait(running.values(), timeout=_PROGRESS_S).not_done:
                self._logger.info(
                    "ShadowServe: hashed %.1f of %.1f GB in %.0f s",
                    progress.done / 1e9,
                    total / 1e9,
                    time.monotonic() - began,
                )
            results = {path: future.result() for path, future in running.items()}
        settled = time.time_ns() - self._settle_ns - int((time.monotonic() - began) * 1e9)
        self._write(
            {
                str(path.resolve()): (signature, digest)
                for path, (signature, digest) in results.items()
                if max(signature[1], signature[2]) < settled
            }
        )
        return {path: digest for path, (_, digest) in results.items()}


class _Progress:
    """Bytes that all threads have hashed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UncacheableError(f"{path} cannot be read: {error.strerror}") from error


def _signature(status: os.stat_result) -> _Signature:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(path: Path, progress: _Progress) -> tuple[_Signature, str]:
    """Read a file; the interpreter's lock is free while bytes are read and hashed."""
    sha, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    view = memoryview(buffer)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise UncacheableError(f"{path} is no regular file: what it holds cannot be known")
            while count := file.readinto(buffer):
                sha.update(view[:count])
                progress.add(count)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise UncacheableError(f"{path} cannot be read: {error.strerror}") from error
    if _signature(before) != _signature(after):
        raise UncacheableError(f"{path} changed while it was read: what the engine has loaded cannot be known")
    return _signature(after), sha.hexdigest()


def _checked(data: bytes) -> dict[str, tuple[_Signature, str]]:
    if len(data) > _FILE_BYTES_MAX:
        raise ValueError(f"it is longer than {_FILE_BYTES_MAX} bytes")
    described = json.loads(data)
    if not isinstance(described, dict) or described.get("version") != _VERSION:
        raise ValueError("it is of another version")
    entries: dict[str, tuple[_Signature, str]] = {}
    for path, (size, changed, status_changed, inode, digest) in described["files"].items():
        numbers = (size, changed, status_changed, inode)
        if not all(type(number) is int for number in numbers) or not _HEX64.fullmatch(digest):
            raise ValueError(f"what it says of {path} is no digest")
        entries[path] = (numbers, digest)
    return entries


def content_hashes(config: HostConfig, logger: logging.Logger) -> ContentHashes:
    """Return the digests of files as a host is configured to remember them."""
    path = cache_file(config.identity_cache, "content.json")
    if path is None and config.identity_cache != "none":
        logger.warning("ShadowServe: there is no folder to remember hashed files in; set identity_cache")
    return ContentHashes(path, logger)
