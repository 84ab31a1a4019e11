"""Commands of benchmarks and their options."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, output_options

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def benchmark(*columns: str, bars: Sequence[str] = ()) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function the command of its name.

    It is called with an empty report of these columns, programs that end after it, and its options. Then the report is
    printed and written.
    """

    def decorate(measure: Callable[..., None]) -> click.Command:
        @functools.wraps(measure)
        def command(output: Output, **options: Any) -> None:
            report = Report(measure.__name__, columns, bars)
            with Programs() as programs:
                measure(report, programs, **options)
            report.finish(output)

        return click.command()(output_options(command))

    return decorate


def whole(flags: str, default: int, help_: str, least: int = 1, most: int | None = None) -> Decorator:
    """Add an option whose value is a whole number."""
    kind = click.IntRange(least, most)
    return click.option(*flags.split(), default=default, show_default=True, type=kind, help=help_)


def real(
    flags: str, default: float | Sequence[float], help_: str, least: float, most: float, unit: str | None = None
) -> Decorator:
    """Add an option whose value is a number, or several numbers if the default has several."""
    more: dict[str, Any] = {"default": default, "show_default": True, "help": help_, "metavar": unit}
    kind = click.FloatRange(least, most)
    return click.option(*flags.split(), type=kind, multiple=not isinstance(default, float), **more)


def repeats_option(default: int, help_: str = "Number of pairs.", most: int = 50) -> Decorator:
    """Add ``--repeats``."""
    return whole("--repeats", default, help_, most=most)


def folder_option(help_: str, flag: str = "--folder") -> Decorator:
    """Add the option of a folder that exists; None by default."""
    return click.option(flag, type=click.Path(exists=True, file_okay=False, path_type=Path), help=help_)


def listed(
    flags: str, default: str, help_: str, read: Callable[[str], Any], count: range = range(1, 65), **more: Any
) -> Decorator:
    """Add an option with commas between its values; ``read`` checks one and returns it, or raises ValueError.

    Args:
        count: Allowed numbers of values.
    """

    def parse(_context: click.Context, parameter: click.Parameter, text: str) -> list[Any]:
        parts = text.split(",")
        try:
            if len(parts) not in count:
                raise ValueError(f"not {count[0]} to {count[-1]} values")
            return [read(part) for part in parts]
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: {error}", param=parameter) from error

    return click.option(*flags.split(), default=default, show_default=True, callback=parse, help=help_, **more)


def numbers_option(
    flags: str, default: str, help_: str, *, least: int = 1, most: int = 1024, count: range = range(1, 65)
) -> Decorator:
    """Add an option of whole numbers with commas between; its value is a list."""

    def read(part: str) -> int:
        if not part.strip().isdecimal() or not least <= int(part) <= most:
            raise ValueError(f"not a list of whole numbers from {least} to {most}")
        return int(part)

    return listed(flags, default, help_, read, count, metavar="N,...")


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return a reader of :func:`listed` that takes these values."""

    def read(part: str) -> str:
        if part not in names:
            raise ValueError(f"{part!r} is none of {', '.join(names)}")
        return part

    return read
