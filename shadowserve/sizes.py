"""Sizes in bytes with units: ``8 GiB``, ``500 MB``, ``4096``."""

import re
from typing import Any, Final

import pydantic
from pydantic_core import PydanticCustomError, core_schema

_DECIMAL: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_UNITS: Final = {name.lower(): size for name, size in (_DECIMAL | _BINARY).items()}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)", re.ASCII)
_DECIMAL_COMMA: Final = re.compile(r"\d+,\d+\s*[A-Za-z]*", re.ASCII)
_KNOWN: Final = f"units are {', '.join(_DECIMAL)} (powers of 1000) and {', '.join(_BINARY)} (powers of 1024)"
_BYTES_MAX: Final = 1 << 63
_DIGITS_MAX: Final = 40


class ByteSize(pydantic.ByteSize):
    """A number of bytes, from an integer or from a text of a number and a unit."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read, serialization=core_schema.plain_serializer_function_ser_schema(int)
        )

    @classmethod
    def read(cls, value: Any) -> "ByteSize":
        """Return the size from a configuration value; the error says what to write."""
        if isinstance(value, int) and not isinstance(value, bool):
            if 0 <= value < _BYTES_MAX:
                return cls(value)
            raise _refused("a size is from 0 to 2**63 - 1 bytes")
        if not isinstance(value, str):
            raise _refused(f"a size is a number of bytes, or a number and a unit, such as 8 GiB; {_KNOWN}")
        text = value.strip()
        if _DECIMAL_COMMA.fullmatch(text):
            raise _refused(f"write a point for the decimal comma: {text.replace(',', '.')}")
        match = _SIZE.fullmatch(text)
        if match is None or len(match[1]) > _DIGITS_MAX:
            raise _refused(f"a size is a number and a unit, such as 8 GiB; {_KNOWN}")
        unit = _UNITS.get(match[2].lower() or "b")
        if unit is None:
            raise _refused(f"unknown unit '{match[2][:20]}'; {_KNOWN}")
        size = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
        if size >= _BYTES_MAX:
            raise _refused("a size is from 0 to 2**63 - 1 bytes")
        return cls(size)


def human_size(count: float) -> str:
    """Return a number of bytes in the largest fitting binary unit: ``23.5 GiB``, ``512 MiB``."""
    for name, unit in reversed(_BINARY.items()):
        if count >= unit:
            return f"{count / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{count:.0f} B"


def _refused(problem: str) -> PydanticCustomError:
    return PydanticCustomError("byte_size", "{problem}", {"problem": problem})
