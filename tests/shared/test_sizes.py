"""Sizes as users write them: valid forms, and the error messages of others."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from shadowserve.sizes import ByteSize, human_size

REPOSITORY = Path(__file__).parents[2]


class Model(BaseModel):
    size: ByteSize


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0), (4096, 4096), ("4096", 4096), ("8 GiB", 8 << 30), ("8GiB", 8 << 30), (" 8  gib ", 8 << 30),
        ("1.5 MiB", 3 << 19), (".5 KiB", 512), ("500 MB", 500_000_000), ("1B", 1), ("9007199254740993", 2**53 + 1),
        ("4503599627370497 KiB", (2**52 + 1) << 10), ("2 PiB", 2 << 50),
    ],
)  # fmt: skip
def test_a_number_and_a_unit_are_a_size(text: Any, size: int) -> None:
    assert Model(size=text).size == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "a number and a unit")
            for text in ("8 GB of RAM", "4 GiB and more", "8GB/s", "-1 GiB", "1 000 MiB", "")
        ),
        ("8,5 GiB", "write a point for the decimal comma: 8.5 GiB"), ("8G", "unknown unit 'G'"),
        ("8 Gbit", "unknown unit 'Gbit'"), ("3 parsecs", "KiB, MiB, GiB, TiB, PiB (powers of 1024)"),
        (1.5, "a number and a unit"), (True, "a number and a unit"), ([1], "a number and a unit"),
        (-1, "2**63"), (1 << 63, "2**63"), ("9000 PiB", "2**63"), ("9" * 50, "a number and a unit"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_what_to_write(text: Any, message: str) -> None:
    """Symptom: '8 GB of RAM' was read as 8 GB, and '8,5 GiB' as 8 bytes."""
    with pytest.raises(ValidationError) as refused:
        Model(size=text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 30, "1 GiB"), (int(23.53 * 2**30), "23.5 GiB")]
)
def test_a_size_is_printed_in_its_largest_unit(size: int, text: str) -> None:
    assert human_size(size) == text
