"""Converts configuration objects to plain data that is the same in every process."""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable, Mapping, Set
from pathlib import PurePath
from typing import Any, Final


def canonical(value: Any) -> Any:
    """Return a value as JSON-compatible data. Equal values give equal data, without addresses of objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    for kind, convert in _CONVERTERS:
        if isinstance(value, kind):
            return convert(value)
    return _qualified_name(value) if isinstance(value, type) else _of_object(value)


def _of_object(value: Any) -> Any:
    # Before dataclasses: Transformers' configurations are dataclasses, and to_dict() has more than their fields.
    if callable(convert := getattr(value, "to_dict", None)):
        return canonical(convert())
    if dataclasses.is_dataclass(value):
        return {field.name: canonical(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if callable(value):
        return _qualified_name(value)
    if type(value).__module__ == "torch":
        return str(value)
    return {"type": type(value).__qualname__} | canonical(getattr(value, "__dict__", {}))


def _qualified_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


_CONVERTERS: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (enum.Enum, lambda value: f"{type(value).__qualname__}.{value.name}"),
    (Mapping, lambda value: {str(canonical(key)): canonical(item) for key, item in value.items()}),
    (Set, lambda value: sorted(json.dumps(canonical(item), sort_keys=True) for item in value)),
    ((list, tuple), lambda value: [canonical(item) for item in value]),
    (bytes, bytes.hex),
    (PurePath, str),
)
"""Types with their conversion, in the order in which they are tried."""


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON as hexadecimal digits."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
