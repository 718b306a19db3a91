"""The `algorithm` object of a case: JSON values -> AlgorithmConfig, every fault reported under its key.

JSON has types of its own, so a value is taken as it is or refused: no text is read as a number, and nothing is filled
in from the environment or from other keys.
"""

import typing
from collections.abc import Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any, cast

from megappo.config import schema
from megappo.config.algorithm import AlgorithmConfig, DynamicSamplingConfig
from megappo.config.algorithm_rules import algorithm_violations
from megappo.errors import ConfigError, Violation

_LONGEST_SHOWN = 60
"""Characters of a faulty value that a message repeats."""


def parse_algorithm(given: dict[str, Any]) -> AlgorithmConfig:  # Any: JSON values, checked here
    """Return the algorithm section with defaults for what is left out. Raises ConfigError with every broken rule."""
    violations: list[Violation] = []
    algorithm = cast(AlgorithmConfig, _section(given, AlgorithmConfig, "algorithm", violations))
    if not violations:
        violations = _sampling_control(algorithm.sampling)
        refused = {violation.key for violation in violations}
        violations += [violation for violation in algorithm_violations(algorithm) if violation.key not in refused]
    if violations:
        raise ConfigError(violations)
    return algorithm


def number_of(value: object) -> float | None:
    """Return a JSON number as a float; None when it is none, or an integer that no float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _sampling_control(sampling: DynamicSamplingConfig) -> list[Violation]:
    """Nothing is sampled here, so no key of sampling control may ask for anything."""
    default = DynamicSamplingConfig()
    return [
        Violation(
            key=f"algorithm.sampling.{name}",
            value=_shown(getattr(sampling, name)),
            rule="cannot be used here: inspect draws no samples",
            remedy="leave it out",
        )
        for name in schema.field_types(DynamicSamplingConfig)
        if getattr(sampling, name) != getattr(default, name)
    ]


def _section(given: dict[str, Any], section: type, key: str, violations: list[Violation]) -> object:
    """Return an instance of a configuration class; what is wrong in `given` goes to `violations`."""
    annotations = schema.field_types(section)
    values: dict[str, object] = {}
    for name, value in given.items():
        if name in annotations:
            values[name] = _value(value, annotations[name], f"{key}.{name}", violations)
        else:
            rule = "is not a key of the configuration"
            remedy = _nearest(f"{key}.{name}", list(annotations))
            violations.append(Violation(key=f"{key}.{name}", value=_shown(value), rule=rule, remedy=remedy))
    return None if violations else section(**values)


def _value(given: Any, annotation: schema.Annotation, key: str, violations: list[Violation]) -> object:
    inner = schema.without_none(annotation)
    if given is None and inner is not annotation:
        return None
    if (section := schema.section_of(inner)) and isinstance(given, dict):
        return _section(cast(dict[str, Any], given), section, key, violations)
    if typing.get_origin(inner) is list and isinstance(given, list):
        (item,) = typing.get_args(inner)
        items = enumerate(cast(list[Any], given))
        return [_value(value, item, f"{key}[{index}]", violations) for index, value in items]
    if inner is float and (number := number_of(given)) is not None:
        return number
    if inner in (int, bool, str) and type(given) is inner:
        return given
    if isinstance(inner, type) and issubclass(inner, Enum) and isinstance(given, str) and given in inner.__members__:
        return inner[given]
    rule = f"must be {schema.describe(annotation)}"
    violations.append(Violation(key=key, value=_shown(given), rule=rule, remedy="or leave it out for its default"))
    return None


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * _LONGEST_SHOWN:
        return "a number that is too large"
    text = "null" if value is None else str(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _nearest(key: str, siblings: Sequence[str]) -> str:
    parent, _, name = key.rpartition(".")
    near = [f"{parent}.{sibling}" for sibling in get_close_matches(name, siblings, n=1)]
    near = near or [known for known in schema.nearest_keys(key) if known.startswith("algorithm.")]
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(siblings)}"
