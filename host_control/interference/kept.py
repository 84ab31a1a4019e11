"""The file that keeps what engines have learnt, by model and machine, so that a start continues from the last run."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from host_control.cache import CacheFile

_VERSION: Final = 2
_ENGINES_MAX: Final = 256
"""Engines in the file, of about 2 KiB each. The oldest are dropped first."""


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
