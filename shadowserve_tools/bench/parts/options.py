"""Options that several benchmarks have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def folder_option(help_: str) -> Decorator:
    """Add ``--folder``, a folder that exists; None by default."""
    kind = click.Path(exists=True, file_okay=False, path_type=Path)
    return click.option("--folder", type=kind, help=help_)


def numbers_option(
    name: str, default: str, help_: str, *, least: int = 1, most: int = 1024, count: range = range(1, 65)
) -> Decorator:
    """Add an option of whole numbers with commas between; its value is a list.

    Args:
        name: Flag, and optionally the argument, as for ``click.option``.
        default: Default as text.
        help_: Help text.
        least: Smallest allowed number.
        most: Largest allowed number.
        count: Allowed numbers of numbers.
    """

    def read(_context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
        parts = text.split(",")
        numbers = [int(part) for part in parts if part.strip().isdecimal()]
        if (
            len(numbers) != len(parts)
            or len(numbers) not in count
            or not all(least <= each <= most for each in numbers)
        ):
            raise click.BadParameter(f"{text!r} is not a list of whole numbers from {least} to {most}", param=parameter)
        return numbers

    options: dict[str, Any] = {"default": default, "show_default": True, "callback": read, "help": help_}
    return click.option(*name.split(), metavar="N,...", **options)
