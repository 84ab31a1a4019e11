"""SHA-256 digests of files, with a cache.

Digests are cached in a small file, by path, size, times and inode: a start only costs one ``stat`` per unchanged file.
Of several ranks that start at the same time, one hashes, and the others wait for a lock and read the cache. Without a
usable cache, files are hashed at every start, and one log line says so.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from host_control.cache import CacheFile, cache_file
from host_control.config import HostConfig
from host_control.vllm.support import UncacheableError

_VERSION: Final = 1
_READ_BYTES: Final = 4 << 20
_ENTRIES_MAX: Final = 16_384
"""Entries of about 250 bytes, enough for some hundred models. The oldest are dropped first."""
_LOGGED_BYTES_MIN: Final = 1 << 30
"""Hashing this much is logged."""
_PROGRESS_S: Final = 10.0
_POLL_S: Final = 0.05
_HEX64: Final = re.compile(r"[0-9a-f]{64}")

_Signature = tuple[int, int, int, int]


def in_hub_cache(path: Path) -> bool:
    """Return True if a file is a blob in a Hugging Face hub cache. Blobs are named after their content."""
    real = path.resolve()
    return real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")


def hub_digest(path: Path) -> str | None:
    """Return the SHA-256 in a file's name in a hub cache, else ``None``. Small files have a git SHA-1 there."""
    name = path.resolve().name
    return name if in_hub_cache(path) and _HEX64.fullmatch(name) else None


def hub_folder(name: str, kind: str = "", **options: Any) -> Path:
    """Return the folder of a model or an adapter in a Hugging Face hub cache, found without network access."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True, **options))
    except Exception as error:  # the type depends on the name
        raise UncacheableError(f"{kind}{name} is neither a folder nor in the hub's cache: {error}") from error


def changed_since(path: Path, moment_ns: int) -> bool:
    """Return True if a file, or a symbolic link in its path, has changed since a time in nanoseconds.

    Snapshots in a hub cache never change: commits and blobs are named after their content.
    """
    if in_hub_cache(path) and "snapshots" in path.parts:
        return False
    try:
        links = [part for part in (path, *path.absolute().parents) if part.is_symlink()]
        return any(status.st_ctime_ns > moment_ns for status in (path.stat(), *(link.lstat() for link in links)))
    except OSError:
        return True


class ContentHashes:
    """Computes and caches SHA-256 digests of files.

    Args:
        path: Path of the cache; ``None`` for no cache.
        threads: Number of files that are read at the same time.
        settle_seconds: A file that changed less than this before it was read is not cached: its times may be too
            coarse to show another change.
        lock_seconds: Time to wait for another process that hashes.
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
        self._file = CacheFile(path, "the cache of file hashes (identity_cache)", "files are hashed again", logger)
        self._logger = logger
        self._threads = threads
        self._settle_ns = int(settle_seconds * 1e9)
        self._lock_seconds = lock_seconds
        self._known: dict[str, tuple[_Signature, str]] = {}

    def digests(self, files: Sequence[Path]) -> list[str]:
        """Return the digest of each file, 64 hexadecimal digits; a file must not change while it is read."""
        found = {path: hub_digest(path) for path in files}
        rest = [path for path, digest in found.items() if digest is None]
        found |= self._remembered(rest)
        if missing := [path for path in rest if found[path] is None]:
            with self._lock() as waited:
                if waited:
                    found |= self._remembered(missing)
                found |= self._hash([path for path in missing if found[path] is None])
        return [found[path] or "" for path in files]

    def _remembered(self, files: Sequence[Path]) -> dict[Path, str | None]:
        """Return the known digest of each file; ``None`` if the file is new or has changed."""
        known = {**self._known, **self._entries()} if files else {}
        found: dict[Path, str | None] = {}
        for path in files:
            signature, digest = known.get(str(path.resolve()), (None, None))
            found[path] = digest if signature == _signature(_stat(path)) else None
        return found

    def _entries(self) -> dict[str, tuple[_Signature, str]]:
        return self._file.read(_checked) or {}

    def _remember(self, entries: dict[str, tuple[_Signature, str]]) -> None:
        self._known.update(entries)
        merged = {path: entry for path, entry in self._entries().items() if path not in entries} | entries
        kept = list(merged.items())[-_ENTRIES_MAX:]
        self._file.write(
            {"version": _VERSION, "files": {path: [*signature, digest] for path, (signature, digest) in kept}}
        )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the lock for hashing; yield True if another process may have hashed meanwhile."""
        path = self._file.path
        if path is None:
            yield False
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = path.with_name(path.name + ".lock")
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._file.warn(f"cannot be locked: {error}")
            yield False
            return
        try:
            deadline = time.monotonic() + self._lock_seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= deadline:
                        break  # hash without the lock
                    time.sleep(_POLL_S)
            yield True
        finally:
            os.close(descriptor)

    def _hash(self, files: Sequence[Path]) -> dict[Path, str]:
        if not files:
            return {}
        sizes = [_stat(path).st_size for path in files]
        total, began, progress = sum(sizes), time.monotonic(), dict.fromkeys(files, 0)
        if total >= _LOGGED_BYTES_MIN:
            self._logger.info(
                "ShadowServe: hashing %d files of %s, %.1f GB; the hashes are %s",
                len(files),
                files[0].parent,
                total / 1e9,
                f"cached in {self._file.path}" if self._file.path else "not cached (identity_cache: none)",
            )
        # The largest files first, so that no thread starts one when all others are done.
        order = sorted(range(len(files)), key=lambda index: -sizes[index])
        with ThreadPoolExecutor(min(self._threads, len(files)), thread_name_prefix="shadowserve-hash") as pool:
            running = {files[index]: pool.submit(_digest, files[index], progress) for index in order}
            while wait(running.values(), timeout=_PROGRESS_S).not_done:
                self._logger.info(
                    "ShadowServe: hashed %.1f of %.1f GB in %.0f s",
                    sum(progress.values()) / 1e9,
                    total / 1e9,
                    time.monotonic() - began,
                )
            results = {path: future.result() for path, future in running.items()}
        settled = time.time_ns() - self._settle_ns - int((time.monotonic() - began) * 1e9)
        self._remember(
            {
                str(path.resolve()): (signature, digest)
                for path, (signature, digest) in results.items()
                if max(signature[1], signature[2]) < settled
            }
        )
        return {path: digest for path, (_, digest) in results.items()}


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UncacheableError(f"{path} cannot be read: {error.strerror}") from error


def _signature(status: os.stat_result) -> _Signature:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(path: Path, progress: dict[Path, int]) -> tuple[_Signature, str]:
    """Return the signature and digest of a file; count its hashed bytes. Reading and hashing release the GIL."""
    sha, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    view = memoryview(buffer)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise UncacheableError(f"{path} is not a regular file")
            while count := file.readinto(buffer):
                sha.update(view[:count])
                progress[path] += count
            after = os.fstat(file.fileno())
    except OSError as error:
        raise UncacheableError(f"{path} cannot be read: {error.strerror}") from error
    if _signature(before) != _signature(after):
        raise UncacheableError(f"{path} changed while it was read, so the content that the engine loaded is unknown")
    return _signature(after), sha.hexdigest()


def _checked(described: Any) -> dict[str, tuple[_Signature, str]]:
    if not isinstance(described, dict) or described.get("version") != _VERSION:
        raise ValueError("it has another version")
    entries: dict[str, tuple[_Signature, str]] = {}
    for path, (size, changed, status_changed, inode, digest) in described["files"].items():
        numbers = (size, changed, status_changed, inode)
        if not all(type(number) is int for number in numbers) or not _HEX64.fullmatch(digest):
            raise ValueError(f"the entry of {path} is not a digest")
        entries[path] = (numbers, digest)
    return entries


def content_hashes(config: HostConfig, logger: logging.Logger) -> ContentHashes:
    """Return a cache of digests at the configured path."""
    path = cache_file(config.identity_cache, "content.json")
    if path is None and config.identity_cache != "none":
        logger.warning("ShadowServe: there is no home folder to cache file hashes in; set identity_cache to a path")
    return ContentHashes(path, logger)
