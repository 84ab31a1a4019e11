"""Small JSON files in the user's cache folder. An engine works without them, but starts slower or learns again."""

import contextlib
import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

_T = TypeVar("_T")
_FILE_BYTES_MAX: Final = 16 << 20
_VERSION: Final = 2
_ENGINES_MAX: Final = 256
"""Engines in the file of learnt times, of about 2 KiB each. The oldest are dropped first."""


def cache_file(configured: str, name: str) -> Path | None:
    """Return the path of a cache file: a configured one, or ``name`` in the user's cache folder.

    ``None`` for no file: configured as ``none``, or the user has no home folder, as in some containers.
    """
    if configured:
        return None if configured == "none" else Path(configured)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return folder / "shadowserve" / name


class CacheFile:
    """A JSON file that only its user can write. A missing, invalid or unusable file counts as empty.

    The first problem is logged as a warning: ``label`` (contents and configuration key), the problem, ``consequence``.
    """

    def __init__(self, path: Path | None, label: str, consequence: str, logger: logging.Logger) -> None:
        self.path = path
        self._label = label
        self._consequence = consequence
        self._logger = logger
        self._warned = False

    def read(self, parse: Callable[[Any], _T]) -> _T | None:
        """Return ``parse`` of the file's JSON; ``None`` if there is no valid file.

        ``parse`` raises ``ValueError``, ``TypeError``, ``KeyError`` or ``AttributeError`` for invalid contents.
        """
        if self.path is None:
            return None
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.warn(f"cannot be read: {error}")
            return None
        status = os.fstat(descriptor)
        # A file that others can write could make one model's KV pass for another's.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            self.warn("is not a regular file, or other users can write it; it is not used")
            return None
        with open(descriptor, "rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        try:
            if len(data) > _FILE_BYTES_MAX:
                raise ValueError(f"it is longer than {_FILE_BYTES_MAX} bytes")
            return parse(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.warn(f"is invalid and will be replaced: {error}")
            return None

    def write(self, contents: Any) -> None:
        """Replace the file atomically."""
        if self.path is None:
            return
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(contents, file)
            partial.replace(self.path)
        except OSError as error:
            self.warn(f"cannot be written: {error}")
            with contextlib.suppress(OSError):
                partial.unlink()

    def warn(self, problem: str) -> None:
        """Log a problem with the file, if it is the first."""
        if not self._warned:
            self._warned = True
            self._logger.warning("ShadowServe: %s, %s %s; %s", self._label, self.path, problem, self._consequence)


class _Learning(Protocol):
    def pack(self) -> dict[str, Any]: ...

    def restore(self, packed: Mapping[str, Any]) -> None: ...


def engine_name(model: bytes, machine: str) -> str:
    """Return the name of engines with the same model and machine: 64 hexadecimal digits."""
    return hashlib.sha256(model + b"\0" + machine.encode(errors="surrogateescape")).hexdigest()


class KeptLearning:
    """Saves and restores what one engine has learnt, by name of the object; ``path`` ``None`` for no file."""

    def __init__(self, path: Path | None, name: str, learnt: Mapping[str, _Learning], logger: logging.Logger) -> None:
        self._name, self._learnt = name, learnt
        self._file = CacheFile(path, "the file of learnt times (computing_cache)", "times are learnt again", logger)

    def load(self) -> None:
        found = self._engines().get(self._name)
        for name, learning in self._learnt.items():
            packed = found.get(name) if isinstance(found, dict) else None
            if packed is not None:
                try:
                    learning.restore(packed)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    self._file.warn(f"is invalid and will be replaced: {error}")

    def save(self) -> None:
        """Update this engine's entry in the file. Parts of it that were not learnt this time are kept."""
        engines = self._engines()
        before = engines.pop(self._name, None)
        now = {name: learning.pack() for name, learning in self._learnt.items()}
        engines[self._name] = (before if isinstance(before, dict) else {}) | now
        self._file.write({"version": _VERSION, "engines": dict(list(engines.items())[-_ENGINES_MAX:])})

    def _engines(self) -> dict[str, Any]:
        return self._file.read(_checked) or {}


def _checked(described: Any) -> dict[str, Any]:
    if not isinstance(described, dict) or described.get("version") != _VERSION:
        raise ValueError("it has another version")
    engines = described.get("engines")
    if not isinstance(engines, dict):
        raise ValueError("it holds no engines")
    return engines
