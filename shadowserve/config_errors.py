"""Messages for configuration errors: origin of the value, key, problem, and what to write."""

import difflib
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from shadowserve.sizes import ByteSize

_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    ByteSize: "a size such as 8 GiB",
}


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """Return the message for an unknown name, with the nearest known name and all known names."""
    name, colon, _ = name.partition(":")  # what follows is a value, perhaps a password
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
    blank = " Write a blank after the colon." if colon else ""
    return f"there is no {what} '{name}{colon}'{hint}{blank} Known: {', '.join(sorted(known))}"


def explain(model: type[BaseModel], errors: Iterable[Any], source: Mapping[str, str] | None = None) -> str:
    """Return the message for pydantic's errors in a section, one clause per key; ``source``: origin of each key."""
    found: dict[str, str] = {}
    errors = list(errors)
    misspelt = {tuple(each["loc"][:-1]) for each in errors if each["type"] == "extra_forbidden"}
    for each in errors:
        location = tuple(each["loc"])
        problem = str(each["msg"]).removeprefix("Value error, ")
        if not location:  # keys contradict each other; the input would be the whole section
            found.setdefault("", problem)
        elif each["type"] != "missing" or location[:-1] not in misspelt:  # otherwise the misspelt key is reported
            text = _clause(model, location, each, problem)
            place = "" if source is None else f"{source.get(str(location[0]), 'default')}: "
            found.setdefault(text.partition(":")[0], place + text)
    return "; ".join(found.values())


def _clause(model: type[BaseModel], location: Sequence[str | int], error: Mapping[str, Any], problem: str) -> str:
    """Return the path of a key, its problem, and its value unless it is secret."""
    if error["type"] == "extra_forbidden":
        parent, path, _ = _walk(model, location[:-1])
        name = str(location[-1])
        known = parent.model_fields if isinstance(parent, type) and issubclass(parent, BaseModel) else {}
        blank = f"; write a blank after the colon: {name.replace(':', ': ', 1)}" if ":" in name else ""
        if not blank and (nearest := difflib.get_close_matches(name, known, n=1, cutoff=0.0)):
            blank = f"; did you mean '{path}.{nearest[0]}'?"
        return f"{path}.{name}: there is no such key{blank} Known: {', '.join(sorted(known))}"
    annotation, path, several = _walk(model, location)
    if error["type"] == "missing":
        return f"{path}: it is missing, and it has no default"
    if several:
        problem = _alternatives(path, annotation, error["input"])
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel) and error["type"].endswith("_type"):
        problem = f"it is a mapping of {', '.join(annotation.model_fields)}"
    elif error["type"] == "string_pattern_mismatch":
        problem += _example(model, location)
    silent = several or _is_secret(model, location) or "://" in str(error["input"])  # a URL may hold a password
    given = "" if silent else f" (given: {error['input']!r})"
    return f"{path}: {problem}{given}"


def _example(model: type[BaseModel], location: Sequence[str | int]) -> str:
    """Return the field's example as the end of a message; empty if it has none."""
    parent, _, _ = _walk(model, location[:-1])
    if not isinstance(parent, type) or not issubclass(parent, BaseModel):
        return ""
    field = parent.model_fields.get(str(location[-1]))
    return f", such as {field.examples[0]}" if field and field.examples else ""


def _walk(model: type[BaseModel], location: Sequence[str | int]) -> tuple[Any, str, bool]:
    """Return the type at a location, its path, and True if the type is a union.

    After the key of a union, pydantic's location has the alternative that it tried; the walk ends before it.
    """
    annotation: Any = model
    path = ""
    for part in location:
        annotation = _bare(annotation)
        if _choices(annotation):
            return annotation, path, True
        if isinstance(part, int):
            annotation, path = (get_args(annotation) or (Any,))[0], f"{path}[{part}]"
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(part)
            annotation, path = (field.annotation if field else Any), f"{path}.{part}".lstrip(".")
        else:
            annotation, path = (get_args(annotation) or (Any,))[-1], f"{path}.{part}".lstrip(".")
    return _bare(annotation), path, False


def _bare(annotation: Any) -> Any:
    """Return a type without ``Annotated``; for ``X | None``, X."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        others = [each for each in get_args(annotation) if each is not type(None)]
        return _bare(others[0]) if len(others) == 1 else annotation
    return annotation


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _alternatives(path: str, annotation: Any, given: Any) -> str:
    """Return the message for a value that fits no alternative of a union."""
    choices = [_bare(each) for each in _choices(annotation)]
    of_numbers = any(get_origin(each) is list for each in choices)
    if of_numbers and isinstance(given, int) and not isinstance(given, bool):
        return f"a list of numbers is written in brackets: {path.rpartition('.')[2]}: [{given}]"
    return f"{given!r} is not {' or '.join(_named(each) for each in choices)}"


def _named(annotation: Any) -> str:
    """Return a description of a type's values."""
    if get_origin(annotation) is Literal:
        return " or ".join(str(each) for each in get_args(annotation))
    if get_origin(annotation) is list:
        return "a list of numbers such as [0, 1]"
    if annotation is type(None):
        return "null"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _is_secret(model: type[BaseModel], location: Sequence[str | int]) -> bool:
    annotation, _, _ = _walk(model, location)
    return not model.model_fields[str(location[0])].repr or annotation is SecretStr
