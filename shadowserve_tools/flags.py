"""The flags of the programs: one for each key of a section, with what it takes, its limits and its default in words."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from shadowserve.config import CONFIG_FILE_VARIABLE, Section
from shadowserve.errors import ConfigurationError
from shadowserve.sizes import ByteSize

_LIMITS: Final = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "under {}",
    "multiple_of": "multiple of {}",
}
_TIMES: Final = "_s"
_GENERAL: Final = "General"
_CHOICE_COLUMNS_MAX: Final = 40
"""Most columns of alternatives next to a flag and its default, for a terminal of 80 columns."""
_VALUES: Final = (
    "BYTES take units (64GiB); PATH is a file or a folder; CORES and NODES are lists ('[2, 3]'); LIST and MAPPING are "
    "YAML; WORD is one of those named. null stands for none."
)


def metavar(key: str, field: FieldInfo, description: str) -> str:
    """Return the placeholder of a flag's value, such as ``BYTES``, ``PORT`` or ``[memory|pool]``."""
    pattern = next((text for each in field.metadata if (text := getattr(each, "pattern", None))), None)
    if pattern:  # all patterns are alternatives
        return f"[{pattern.strip('^()$')}]"
    if description.startswith("File of"):
        return "PATH"
    words = sorted(_alternatives(key, field, field.annotation), key=str.isupper)
    if len(words) == 1 and not words[0].islower():
        return words[0]
    choice = f"[{'|'.join(words)}]"
    return choice if len(choice) <= _CHOICE_COLUMNS_MAX else "WORD"


def _alternatives(key: str, field: FieldInfo, annotation: Any) -> list[str]:
    """Return the words for what a type takes: literal values as they are, kinds of values in capitals."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return []
    if origin is Annotated:
        return _alternatives(key, field, arguments[0])
    if origin is Literal:
        return [str(each) for each in arguments]
    if origin in (Union, types.UnionType):
        return [word for each in arguments for word in _alternatives(key, field, each)]
    if annotation is bool:
        return ["true", "false"]
    if origin is list:
        return [{"cores": "CORES", "nodes": "NODES"}.get(key.rpartition("_")[2], "LIST")]
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return ["MAPPING"]
    return [_scalar(key, field, annotation)]


def _scalar(key: str, field: FieldInfo, annotation: Any) -> str:
    if annotation is ByteSize:
        return "BYTES"
    if annotation is float:
        return "SECONDS" if key.endswith(_TIMES) else "NUMBER"
    if annotation is int:
        return "PORT" if key.endswith("port") else "MICROSECONDS" if key.endswith("_us") else "COUNT"
    if annotation is Path:
        return "PATH"
    if key.endswith("host"):
        return "HOST"
    return "HOST:PORT" if str(field.default).rpartition(":")[2].isdigit() else "TEXT"


def limits(key: str, field: FieldInfo) -> str:
    """Return the least and the most that a key takes, in words; empty where it has no limits."""
    is_size = key.endswith("_bytes") or "_bytes_" in key
    found = []
    for constraint in field.metadata:
        for name, text in _LIMITS.items():
            limit = getattr(constraint, name, None)
            if limit is not None:
                found.append(text.format(_size(limit) if is_size else limit))
    return ", ".join(found)


def _size(count: int) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return str(count)


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number of bytes with a unit, of at most ``most`` bytes; see ``sizes``."""

    name = "SIZE"

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int:
        try:
            size = int(ByteSize.read(value))
        except PydanticCustomError:
            self.fail(f"{value!r} is not a size; write it like 64KiB", parameter, context)
        if size < self._least or self._most is not None and size > self._most:
            limits = f"{_size(self._least)} to {_size(self._most or 0)}".replace(" KiB", "KiB").replace(" MiB", "MiB")
            self.fail(f"{value!r}: has to be {limits}", parameter, context)
        return size


class Program(click.Command):
    """A command whose help lists its many options below headings, each name on a line and its text below."""

    def __init__(self, *arguments: Any, section: type[Section], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.section = section

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description, and the meaning of the placeholders."""
        super().format_help_text(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(_VALUES)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, the general ones first."""
        groups: dict[str, list[click.Parameter]] = {_GENERAL: []}
        heading = _GENERAL
        described = self.section.descriptions()
        for parameter in self.get_params(ctx):
            key = str(parameter.name)
            if isinstance(parameter, click.Option) and (field := self.section.model_fields.get(key)):
                parameter.metavar = metavar(key, field, described[key])
                parameter.help = described[key].replace("``", "'")
            heading = self.section.headings.get(key, heading)
            groups.setdefault(heading if key in self.section.model_fields else _GENERAL, []).append(parameter)
        for title, parameters in groups.items():
            with formatter.section(title):
                for parameter in parameters:
                    self._write(parameter, ctx, formatter)

    def _write(self, parameter: click.Parameter, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names, text = parameter.get_help_record(ctx) or ("", "")
        if field := self.section.model_fields.get(str(parameter.name)):
            notes = f"default: {self.section.default_text(str(parameter.name))}"
            bounds = limits(str(parameter.name), field).removeprefix("at least 0.0").removeprefix("at least 0")
            names += f"  [{'; '.join(filter(None, (notes, bounds.removeprefix(', '))))}]"
        formatter.write(f"{'':>{formatter.current_indent}}{names}\n")
        with formatter.indentation(), formatter.indentation():
            formatter.write_text(text)


def section_flags(section: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``--config`` and one flag for each key of a section."""

    def read(_context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else section.read_text(str(parameter.name), text)
        except ConfigurationError as error:
            raise click.BadParameter(str(error), param=parameter) from error

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for key in reversed(section.model_fields):
            function = click.option(f"--{key.replace('_', '-')}", key, callback=read)(function)
        return click.option(
            "--config",
            type=click.Path(dir_okay=False),
            metavar="PATH",
            envvar=CONFIG_FILE_VARIABLE,
            help=f"YAML file with a section '{section.section}'; 'shadowserve config' prints an example.",
        )(function)

    return decorate
