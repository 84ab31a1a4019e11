"""Commands of benchmarks and their options."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def _option(flags: str, kind: Any, default: Any, help_: str, unit: str | None = None) -> Decorator:
    """Add an option of a type; it is repeatable if the default has several values."""
    more: dict[str, Any] = {"multiple": isinstance(default, tuple), "metavar": unit}
    return click.option(*flags.split(), type=kind, default=default, show_default=True, help=help_, **more)


def whole(flags: str, default: int | tuple[int, ...], help_: str, least: int = 1, most: int | None = None) -> Decorator:
    """Add an option whose value is a whole number, or several numbers if the default has several."""
    return _option(flags, click.IntRange(least, most), default, help_)


def real(
    flags: str, default: float | tuple[float, ...], help_: str, least: float, most: float, unit: str | None = None
) -> Decorator:
    """Add an option whose value is a number, or several numbers if the default has several."""
    return _option(flags, click.FloatRange(least, most), default, help_, unit)


def choice(flags: str, names: Iterable[str], default: str | tuple[str, ...], help_: str) -> Decorator:
    """Add an option whose value is one of some names, or several of them if the default is a tuple."""
    return _option(flags, click.Choice(list(names)), default, help_)


def grouped(name: str, kind: Callable[..., Any], options: Mapping[str, Decorator]) -> Decorator:
    """Add options that become one argument, ``name``: a ``kind`` with an attribute for each option."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_group(*arguments: Any, **values: Any) -> None:
            attributes = {each: values.pop(each) for each in options}
            command(*arguments, **{name: kind(**attributes)}, **values)

        decorated: Callable[..., None] = with_group
        for option in reversed(list(options.values())):
            decorated = option(decorated)
        return decorated

    return decorate


def repeats_option(default: int, help_: str = "Number of pairs.", most: int = 50) -> Decorator:
    """Add ``--repeats``."""
    return whole("--repeats", default, help_, most=most)


def folder_option(help_: str, flag: str = "--folder") -> Decorator:
    """Add the option of a folder that exists; None by default."""
    return click.option(flag, type=click.Path(exists=True, file_okay=False, path_type=Path), help=help_)


def listed(
    flags: str, default: str | None, help_: str, read: Callable[[str], Any], count: range = range(1, 65), **more: Any
) -> Decorator:
    """Add an option with commas between its values; ``read`` checks one and returns it, or raises ValueError.

    Args:
        default: None for an option whose value is None where it is not given.
        count: Allowed numbers of values.
    """

    def parse(_context: click.Context, parameter: click.Parameter, text: str | None) -> list[Any] | None:
        if text is None:
            return None
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


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return a reader of :func:`listed` that takes these values."""

    def read(part: str) -> str:
        if part not in names:
            raise ValueError(f"{part!r} is none of {', '.join(names)}")
        return part

    return read
