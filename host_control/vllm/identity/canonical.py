"""Objects of a configuration as plain data that is the same in every process."""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any


def canonical(value: Any) -> Any:
    """Return a value as what JSON can hold: equal values give equal text, and no address of an object is in it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, Mapping):
        return {str(canonical(key)): canonical(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(json.dumps(canonical(item), sort_keys=True) for item in value)
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, PurePath):
        return str(value)
    if callable(convert := getattr(value, "to_dict", None)) and not isinstance(value, type):
        return canonical(
            convert()
        )  # before dataclasses: Transformers' configurations are some, with more beside the fields
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: canonical(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if type(value).__module__ == "torch":
        return str(value)
    return {"type": type(value).__qualname__} | canonical(getattr(value, "__dict__", {}))


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, in hexadecimal digits."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
