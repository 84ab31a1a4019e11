"""The file that keeps what was learnt of engines, by model and machine: a start goes on where the last one ended.

It is a help and nothing more: where it is missing, of an earlier release, broken, or cannot be written, the first steps
say it all again. It holds numbers and hashes, as JSON.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

_VERSION: Final = 2
"""Of what is kept. A file of a lower one is of an earlier release, and is replaced."""
_FILE_BYTES_MAX: Final = 1 << 20
_ENGINES_MAX: Final = 256
"""Of about 2 KiB each. The oldest go first."""


class _Learning(Protocol):
    def pack(self) -> dict[str, Any]: ...

    def restore(self, packed: Mapping[str, Any]) -> None: ...


def engine_name(model: bytes, machine: str) -> str:
    """Return what engines are called that compute the same on the same: 64 hexadecimal digits."""
    return hashlib.sha256(model + b"\0" + machine.encode(errors="surrogateescape")).hexdigest()


class KeptLearning:
    """What was learnt of one engine.

    Args:
        path: of the file; ``None`` for none.
        name: of the engine, as :func:`engine_name` makes it.
        learnt: by name, what is kept.
        logger: for a file that cannot be used.
    """

    def __init__(self, path: Path | None, name: str, learnt: Mapping[str, _Learning], logger: logging.Logger) -> None:
        self._path, self._name, self._learnt, self._logger = path, name, learnt, logger

    def load(self) -> None:
        """Restore all that the file has of this engine."""
        found = self._read().get(self._name)
        for name, learning in self._learnt.items():
            packed = found.get(name) if isinstance(found, dict) else None
            if packed is not None:
                self._try(lambda packed=packed, learning=learning: learning.restore(packed))  # type: ignore[misc]

    def save(self) -> None:
        """Write it, beside what the file has of other engines, and of this one that is not learnt now."""
        if self._path is None:
            return
        engines = self._read()
        before = engines.pop(self._name, None)
        now = {name: learning.pack() for name, learning in self._learnt.items()}
        engines[self._name] = (before if isinstance(before, dict) else {}) | now
        text = json.dumps({"version": _VERSION, "engines": dict(list(engines.items())[-_ENGINES_MAX:])})
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            partial.replace(self._path)
        except OSError as error:
            self._say(f"cannot be written: {error}")
            with contextlib.suppress(OSError):
                partial.unlink()

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._try(lambda: found.update(_checked(_bytes_of(self._path))))  # type: ignore[arg-type]
        return found

    def _try(self, read: Callable[[], None]) -> None:
        try:
            read()
        except FileNotFoundError:
            raise
        except OSError as error:
            self._say(f"cannot be read: {error}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._say(f"is broken and is written anew: {error}")

    def _say(self, what: str) -> None:
        self._logger.warning(
            "ShadowServe: the memory of how long engines compute, %s (computing_cache), %s; it is learnt again",
            self._path,
            what,
        )


def _bytes_of(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ValueError(f"it is longer than {_FILE_BYTES_MAX} bytes")
    return data


def _checked(data: bytes) -> dict[str, Any]:
    described = json.loads(data)
    version = described.get("version") if isinstance(described, dict) else None
    if type(version) is int and 0 < version < _VERSION:
        return {}
    if version != _VERSION:
        raise ValueError("it is of another version")
    engines = described.get("engines")
    if not isinstance(engines, dict):
        raise ValueError("it holds no engines")
    return engines
