"""Configuration: flag, then environment, then YAML file, then default.

Each program has one :class:`Section`, a frozen pydantic model whose fields are its keys::

    class StorageConfig(Section):
        section = "storage"
        port: int = Field(6380, ge=0, le=65535)
        'TCP port; 0 takes a free one.'

A file (``--config`` or ``SHADOWSERVE_CONFIG_FILE``) holds one mapping for each section, so that one file can serve all
programs; a program reads only its own, and refuses a file that does not have it. The environment variable of a key is
``SHADOWSERVE_<SECTION>_<KEY>``; its flag is ``--<key>`` with dashes. Values from the environment and from flags are
YAML scalars or lists, as in the file, except that the text of a key that takes text is taken as it is: a password of
digits needs no quotes. Unknown sections, keys and variables are errors that name the nearest known one. Every key is
explained in ``configs/``.
"""

import ast
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from shadowserve.config_errors import explain, unknown
from shadowserve.errors import ConfigurationError

__all__ = ["CONFIG_FILE_VARIABLE", "NATIVE_LIBRARY_VARIABLE", "SECTIONS", "Section", "sections_of"]

CONFIG_FILE_VARIABLE: Final = "SHADOWSERVE_CONFIG_FILE"
NATIVE_LIBRARY_VARIABLE: Final = "SHADOWSERVE_NATIVE_LIBRARY"
SECTIONS: Final = ("storage", "dpu", "host")
_PREFIX: Final = "SHADOWSERVE_"
_UNREADABLE: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises: the last ones for numbers of 5,000 digits, ``!!bool x``, ``!!timestamp x``, ``[[[[...``."""
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, ""))


_PROGRAMS: Final = {
    "storage": "'shadowserve storage'",
    "dpu": "'shadowserve dpu'",
    "host": "the plugin of the engine",
}
"""The program that reads each section."""


class _Loader(yaml.SafeLoader):
    """YAML, but for a key that stands twice in a mapping, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def sections_of(file: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return which sections a configuration file has.

    Raises:
        ConfigurationError: it cannot be read, or it has a section that no program reads.
    """
    return tuple(_read(Path(file), SECTIONS[0]))


def _read(path: Path, section: str) -> dict[str, Any]:
    """Return a configuration file's sections; ``section`` is the one that a message suggests."""
    try:
        content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, *_UNREADABLE) as error:
        raise ConfigurationError(f"cannot read configuration file {path}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigurationError(f"file {path} holds no mapping; it should begin with '{section}:'")
    for name in content:
        if name not in SECTIONS:
            raise ConfigurationError(f"file {path}: {unknown('section', str(name), SECTIONS)}")
    return content


class Section(BaseModel):
    """Base of each program's configuration; immutable once loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    section: ClassVar[str]
    headings: ClassVar[Mapping[str, str]] = {}
    """For those who read all keys: key that begins a group to the group's heading."""
    replaced: ClassVar[Mapping[str, str]] = {}
    """Keys of older versions, and what to write instead of each, in which ``{}`` stands for its value."""

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        flags: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        flags_place: str = "command line",
    ) -> Self:
        """Return the configuration from all four places.

        Args:
            file: YAML file; by default the one that ``SHADOWSERVE_CONFIG_FILE`` names, if any.
            flags: keys given on the command line, or by an engine; ``None`` values do not count as given.
            environment: by default ``os.environ``.
            flags_place: where ``flags`` were given, for messages.

        Raises:
            ConfigurationError: a file that cannot be read, an unknown key, a value that does not fit; the message
                names the place, the key and the nearest key that exists.
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
                if key in cls.replaced:
                    raise ConfigurationError(f"{place}: {key} is no key any more: {cls.replaced[key].format(value)}")
                if key not in cls.model_fields:
                    raise ConfigurationError(f"{place}: {unknown('key', key, cls.model_fields)}")
                values[key], source[key] = value, place
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            # Not chained: the validation error's text would show passwords, which ours leaves out.
            raise ConfigurationError(explain(cls, error.errors(), source)) from None

    @classmethod
    def read_text(cls, key: str, text: str) -> Any:
        """Return the value that ``text``, from the environment or a flag, stands for.

        Raises:
            ConfigurationError: it is not YAML.
        """
        field = cls.model_fields.get(key)
        if field is not None and field.annotation in (str, SecretStr):
            return text
        try:
            return yaml.safe_load(text)
        except _UNREADABLE as error:
            raise ConfigurationError(f"{key}: {text[:80]!r} is not a YAML value: {error}") from error

    @classmethod
    def default_text(cls, key: str) -> str:
        """Return the default of a key as a reader would write it: ``256 MiB``, ``true``, ``none`` for empty or null."""
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
        """Return what each key is: its docstring, which only help and documents want, so it is read from the source."""
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
                f"file {path} has no section '{cls.section}', which {_PROGRAMS[cls.section]} reads: with its section "
                f"{given} it is a file of {programs}; 'shadowserve config' prints files to begin with"
            )
        own = content[cls.section]
        if own is None:
            return {}
        if not isinstance(own, dict):
            raise ConfigurationError(f"file {path}: section '{cls.section}' holds no mapping of keys to values")
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
