"""The shape of the configuration as plain facts: which dotted keys there are and what each may hold."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any, cast

from megappo.config.run import RunConfig

# Any: annotations are types, unions and generic aliases, which have no common type.
Annotation = Any


def field_types(section: type) -> dict[str, Annotation]:
    """Return field name -> annotation of one configuration class."""
    hints = typing.get_type_hints(section)
    return {declared.name: hints[declared.name] for declared in dataclasses.fields(section)}


def without_none(annotation: Annotation) -> Annotation:
    """Return the annotation with `| None` taken off."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0]
    return annotation


def section_of(annotation: Annotation) -> type | None:
    """Return the configuration class that the annotation is (or may be), or None for a plain value."""
    inner = without_none(annotation)
    return cast(type, inner) if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def annotation_of(key: str) -> Annotation | None:
    """Return the annotation at a dotted key, or None when there is no such key. A key of a map has the map's type."""
    annotation: Annotation = RunConfig
    for part in key.split("."):
        inner = without_none(annotation)
        if typing.get_origin(inner) is dict:
            annotation = typing.get_args(inner)[1]
        elif (section := section_of(annotation)) and part in (fields := field_types(section)):
            annotation = fields[part]
        else:
            return None
    return annotation


def known_keys(section: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, sections included."""
    for name, annotation in field_types(section).items():
        yield prefix + name
        if inner := section_of(annotation):
            yield from known_keys(inner, f"{prefix}{name}.")


def nearest_keys(key: str) -> list[str]:
    """Return up to three known keys that `key` most likely meant; none when nothing is close.

    The same ending elsewhere (a key at the wrong level) counts before a similar spelling beside it, and that before
    a similar spelling anywhere.
    """
    keys = list(known_keys())
    parent, _, last = key.rpartition(".")
    for ending in (f".{key}", f".{last}"):
        misplaced = [known for known in keys if f".{known}".endswith(ending)]
        if 0 < len(misplaced) <= 3:
            return misplaced
    # Of the type, not of the known keys, which hold none inside of a map.
    section = section_of(annotation_of(parent)) if parent else RunConfig
    siblings = [f"{parent}.{name}".lstrip(".") for name in field_types(section)] if section else []
    return difflib.get_close_matches(key, siblings, n=1) or difflib.get_close_matches(key, keys, n=1)


def describe(annotation: Annotation) -> str:
    """Say in words what a key of this type may hold, for example `an integer or null`."""
    inner = without_none(annotation)
    words = _describe_inner(inner)
    return words if inner is annotation else f"{words} or null"


_LISTS: dict[Any, str] = {int: "[1, 2]", float: "[0.5, 1.0]"}
_WORDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _describe_list(item: Annotation) -> str:
    if isinstance(item, type) and issubclass(item, Enum):
        names = [member.name for member in item]
        return f"a list such as [{names[0]}], of {', '.join(names)}"
    return f"a list such as {_LISTS.get(item, '[first, second]')}"


def _describe_inner(annotation: Annotation) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(member.name for member in annotation)
    if section := section_of(annotation):
        return "a section with the keys " + ", ".join(field_types(section))
    origin = typing.get_origin(annotation)
    if origin is dict:
        section = section_of(typing.get_args(annotation)[1])
        example = "value" if section is None else f"{{{next(iter(field_types(section)))}: value, ...}}"
        return f"a map such as {{name: {example}}}"
    if origin is list:
        return _describe_list(typing.get_args(annotation)[0])
    return "a value"
