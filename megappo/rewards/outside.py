"""Rewards from outside, named `package.module:name`: a function of one sample, or a class with `score`."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from megappo.errors import DataError
from megappo.rewards.checks import check_names
from megappo.rewards.types import Sample


# Any: the parameters belong to the reward; the function or object may be of any kind.
def make_outside(name: str, found: object, params: Mapping[str, Any]) -> object:
    """Return an object with `score`, or a function of one sample.

    - A class is called with the parameters as keywords; its objects have `score(samples)`, or are called with a sample.
    - A function `f(sample, ...)` is the reward itself; the parameters are its keywords.

    Raises:
        DataError: it is neither, a parameter is unknown or missing, or the class refuses them.
    """
    if not callable(found):
        raise DataError(f"reward {name}: a {type(found).__name__} is no function and no class")
    if inspect.isclass(found):
        _check_params(name, found, params, taken=0)
        made = found(**params)
        if not callable(getattr(made, "score", made)):
            raise DataError(
                f"reward {name}: its objects have no method score(samples) and cannot be called with a sample"
            )
        return made
    _check_params(name, found, params, taken=1)
    return partial(found, **params) if params else found


def batch_function(reward: object) -> Callable[[Any], Any] | None:
    """Return what scores a batch, or None: the reward is called with one sample."""
    return cast(Callable[[Any], Any] | None, getattr(reward, "score", None))


def _check_params(name: str, target: Callable[..., Any], params: Mapping[str, Any], *, taken: int) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some functions of C have none
        return
    own = list(signature.parameters.values())[taken:]
    by_keyword = [one for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = None if any(one.kind is one.VAR_KEYWORD for one in own) else [one.name for one in by_keyword]
    check_names(name, params, known=known, needed=[one.name for one in by_keyword if one.default is one.empty])
    sample = Sample(prompt="", response="", answer=None)
    try:
        signature.bind(*[sample] * taken, **params)
    except TypeError as error:
        called = "the sample and " if taken else ""
        raise DataError(f"reward {name}: cannot be called with {called}params={dict(params)}: {error}") from error
