"""Configuration: flag, then environment, then YAML file, then default.

Each program has one :class:`Section`, a frozen pydantic model whose fields are its keys::

    class StorageConfig(Section):
        section = "storage"
        port: int = Field(6380, ge=0, le=65535)
        'TCP port; 0 takes a free one.'

A file (``--config`` or ``SHADOWSERVE_CONFIG_FILE``) has one mapping per section, so one file can serve all programs.
Each program reads its own section and refuses a file without it. The environment variable of a key is
``SHADOWSERVE_<SECTION>_<KEY>``, its flag ``--<key>`` with dashes. Values from the environment and from flags are YAML
scalars or lists, as in the file; the value of a text key needs no quotes. Unknown sections, keys and variables are
errors that name the nearest known one. ``configs/`` explains every key.
"""

import ast
import inspect
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from shadowserve.config_errors import explain, unknown
from shadowserve.errors import ConfigurationError

CONFIG_FILE_VARIABLE: Final = "SHADOWSERVE_CONFIG_FILE"
NATIVE_LIBRARY_VARIABLE: Final = "SHADOWSERVE_NATIVE_LIBRARY"
SECTIONS: Final = ("storage", "dpu", "host")
_PREFIX: Final = "SHADOWSERVE_"
_UNREADABLE: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Exceptions of PyYAML, such as those for numbers of 5,000 digits, ``!!bool x``, ``!!timestamp x``, ``[[[[...``."""
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, ""))


_PROGRAMS: Final = {"storage": "'shadowserve storage'", "dpu": "'shadowserve dpu'", "host": "the plugin of the engine"}
"""The program that reads each section."""


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys; YAML itself uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' is a duplicate key", mark)
        return super().construct_mapping(node, deep)


def _problem(error: Exception) -> str:
    """Return the problem of a file and its place, without the line and its value, which may be a password."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        begin = error.context_mark
        begun = f", {error.context} from line {begin.line + 1}" if error.context and begin else ""
        return place + re.sub(r"\b(alias|anchor|handle|tag) '.*'", r"\1", error.problem or "it is not YAML") + begun
    if isinstance(error, OSError | UnicodeError | yaml.YAMLError):
        return str(error)
    return f"it has a value that YAML cannot convert ({type(error).__name__})"


def sections_of(file: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of a configuration file's sections; ConfigurationError if it is no configuration file."""
    return tuple(_read(Path(file), SECTIONS[0]))


def _read(path: Path, section: str) -> dict[str, Any]:
    """Return a configuration file's sections by name; error messages suggest ``section``."""
    try:
        content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, *_UNREADABLE) as error:
        raise ConfigurationError(f"cannot read configuration file {path}: {_problem(error)}") from None
    if not isinstance(content, dict) or not content:
        raise ConfigurationError(f"file {path} is not a mapping; it must begin with '{section}:'")
    for name in content:
        if name not in SECTIONS:
            raise ConfigurationError(f"file {path}: {unknown('section', str(name), SECTIONS)}")
    return content


class Section(BaseModel):
    """Base of each program's configuration; immutable once loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    section: ClassVar[str]
    headings: ClassVar[Mapping[str, str]] = {}
    """Headings of groups of keys in documents and help, by the first key of the group."""

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        flags: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        flags_place: str = "command line",
    ) -> Self:
        """Return the configuration from flags, environment, file and defaults.

        Args:
            file: YAML file; default: the file that ``SHADOWSERVE_CONFIG_FILE`` names, if any.
            flags: Values from the command line or an engine, by key; ``None`` means not given.
            flags_place: Origin of ``flags``, for messages.

        Raises:
            ConfigurationError: The file cannot be read, a key is unknown, or a value is invalid. The message names the
                origin, the key and the nearest known key.
        """
        environment = os.environ if environment is None else environment
        path = file or environment.get(CONFIG_FILE_VARIABLE)
        layers = [
            (f"file {path}", cls._from_file(Path(path)) if path else {}),
            ("environment", cls._from_environment(environment)),
            (flags_place, {key: value for key, value in (flags or {}).items() if value is not None}),
        ]
        values: dict[str, Any] = {}
        source: dict[str, str] = {}
        for place, given in layers:
            for key, value in given.items():
                if key not in cls.model_fields:
                    raise ConfigurationError(f"{place}: {unknown('key', key, cls.model_fields)}")
                values[key], source[key] = value, place
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            # Not chained: the text of the validation error would show passwords.
            raise ConfigurationError(explain(cls, error.errors(), source)) from None

    @classmethod
    def read_text(cls, key: str, text: str) -> Any:
        """Return a key's value from the YAML of an environment variable or a flag."""
        field = cls.model_fields.get(key)
        if field is not None and field.annotation in (str, SecretStr):
            return text
        try:
            return yaml.safe_load(text)
        except _UNREADABLE as error:
            raise ConfigurationError(f"{key}: {text[:80]!r} is not a YAML value: {error}") from error

    @classmethod
    def default_text(cls, key: str) -> str:
        """Return a key's default as text: ``256 MiB``, ``true``, ``none`` for empty or null."""
        value = cls.model_fields[key].default
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if value is None or value == "":
            return "none"
        if key.endswith("_bytes") or "_bytes_" in key:
            unit, name = next((unit, name) for unit, name in _UNITS if value % unit == 0 and (value or unit == 1))
            return f"{value // unit} {name}".rstrip()
        return json.dumps(value) if isinstance(value, bool | list | dict) else str(value)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the docstring of each key, read from the source; only help and documents need it."""
        found = {}
        for model in (each for each in reversed(cls.__mro__) if issubclass(each, BaseModel) and each is not BaseModel):
            (definition,) = ast.parse(inspect.getsource(model)).body
            assert isinstance(definition, ast.ClassDef)
            for key, text in zip(definition.body, definition.body[1:], strict=False):
                match key, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        found[name] = inspect.cleandoc(words)
        return {key: found[key] for key in cls.model_fields if key in found}

    @classmethod
    def _from_file(cls, path: Path) -> dict[str, Any]:
        content = _read(path, cls.section)
        if cls.section not in content:
            given = " and ".join(f"'{section}'" for section in content)
            programs = " and of ".join(_PROGRAMS[section] for section in content)
            raise ConfigurationError(
                f"file {path} has no section '{cls.section}', which {_PROGRAMS[cls.section]} reads: its section "
                f"{given} is for {programs}; 'shadowserve config' prints example files"
            )
        own = content[cls.section]
        if own is None:
            return {}
        if not isinstance(own, dict):
            raise ConfigurationError(f"file {path}: section '{cls.section}' is not a mapping of keys to values")
        return {str(key): value for key, value in own.items()}

    @classmethod
    def _from_environment(cls, environment: Mapping[str, str]) -> dict[str, Any]:
        given = {}
        for variable, text in environment.items():
            if not variable.startswith(_PREFIX) or variable in (CONFIG_FILE_VARIABLE, NATIVE_LIBRARY_VARIABLE):
                continue
            section, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
            if section not in SECTIONS or not key:
                raise ConfigurationError(f"environment: {unknown('variable', variable, cls._variables())}")
            if section == cls.section:
                try:
                    given[key] = cls.read_text(key, text)
                except ConfigurationError as error:
                    raise ConfigurationError(f"environment: {variable}: {error}") from error
        return given

    @classmethod
    def _variables(cls) -> list[str]:
        own = [f"{_PREFIX}{cls.section}_{key}".upper() for key in cls.model_fields]
        return [CONFIG_FILE_VARIABLE, NATIVE_LIBRARY_VARIABLE, *own]
