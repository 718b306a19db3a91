"""Checks of a reward's parameters; each raises DataError that names the key, the value and the rule."""

import math
import re
from collections.abc import Collection, Sequence

from megappo.errors import DataError

REQUIRE_STOP = "require_stop"
"""Parameter of every reward: a response that did not end by itself scores 0."""


class MissingParams(DataError):
    """Parameters that a reward needs are not given."""

    def __init__(self, reward: str, names: Sequence[str]) -> None:
        self.reward, self.names = reward, list(names)
        super().__init__(f"reward {reward}: {', '.join(f'params.{name}' for name in names)} must be given")

    def __reduce__(self) -> tuple[type, tuple[str, list[str]]]:
        return type(self), (self.reward, self.names)


def check_names(reward: str, given: Collection[str], *, known: Sequence[str] | None, needed: Sequence[str]) -> None:
    """Require that parameters are known (None: any is), and that those without a default are given."""
    if known is not None and (unknown := [name for name in given if name not in known]):
        raise DataError(f"reward {reward}: params.{unknown[0]} is unknown (use {', '.join([*known, REQUIRE_STOP])})")
    if missing := [name for name in needed if name not in given]:
        raise MissingParams(reward, missing)


def check_switch(reward: str, key: str, value: object) -> None:
    """Require true or false."""
    if not isinstance(value, bool):
        raise DataError(f"reward {reward}: params.{key}={value!r} must be true or false")


def check_number(reward: str, key: str, value: object, *, least: float, most: float = math.inf) -> None:
    """Require a finite number from `least` to `most`."""
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or not least <= value <= most:  # type: ignore[operator]  # `sound` says that it is a number
        raise DataError(f"reward {reward}: params.{key}={value!r} must be {_range('a number', least, most)}")


def check_count(reward: str, key: str, value: object, *, least: int, most: float = math.inf) -> None:
    """Require a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DataError(f"reward {reward}: params.{key}={value!r} must be {_range('a whole number', least, most)}")


def check_choice(reward: str, key: str, value: object, choices: Sequence[str]) -> None:
    """Require one of the choices."""
    if value not in choices:
        raise DataError(f"reward {reward}: params.{key}={value!r} must be one of {', '.join(choices)}")


def check_pattern(reward: str, key: str, value: object, *, groups: int) -> None:
    """Require a regular expression of at least so many groups."""
    try:
        found = re.compile(value).groups  # type: ignore[call-overload]  # what is no text is a TypeError
    except (re.error, TypeError) as error:
        raise DataError(f"reward {reward}: params.{key}={value!r} is no regular expression: {error}") from error
    if found < groups:
        raise DataError(f"reward {reward}: params.{key}={value!r} must have a group, for example (.*)")


def _range(kind: str, least: float, most: float) -> str:
    return f"{kind}, {least:g} or more" if math.isinf(most) else f"{kind} from {least:g} to {most:g}"
