"""The hook for a curriculum: a class from outside that chooses which training prompts are drawn, and in which order.

`data.curriculum: package.module:Class` names it, `data.curriculum_params` are its keyword arguments. There is one
object per training source, so that the shares of mixed sources stay as they are weighted.
"""

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from megappo.config.data import DataConfig
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.registry import Registry


class Curriculum(Protocol):
    """Chooses and orders the prompts of one source, from what became of those drawn before.

    Draws come in rounds. A round may be as long as one likes: a pass over all prompts, or a few batches. All that
    `order` depends on must be in the arguments and in the state, so that a resumed run draws what would have followed.

    Example:
        class EasyFirst:
            def order(self, number, prompts):
                return sorted(range(len(prompts)), key=lambda index: prompts[index].extra["level"])
            def observe(self, indices, scores): ...
            def state_dict(self): return {}
            def load_state_dict(self, state): ...
    """

    def order(self, number: int, prompts: Sequence[Prompt]) -> Sequence[int]:
        """Return the positions in `prompts` of the draws of round `number` (0: the first), at least one. Prompts may
        be left out or come several times. Called when the draws of the round before are used up."""
        ...

    def observe(self, indices: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        """Learn what became of prompts: by position, the scores of their answers. Called once per generation, before
        anything else is drawn; prompts whose answers could not be scored are not among them."""
        ...

    def state_dict(self) -> dict[str, Any]:  # Any: what JSON holds
        """Return all that `order` depends on beside its arguments, for a JSON file."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` returned, in this process or an earlier one."""
        ...


class CurriculumError(DataError):
    """A curriculum raised an error, or gave something that is no order, while the run was going on."""

    exit_code = 1


CURRICULA: Registry[Callable[..., Curriculum]] = Registry("curriculum")


def make_curriculum(data: DataConfig) -> Curriculum | None:
    """Return a curriculum for one source; None where the configuration has none.

    Raises:
        RegistryError: it cannot be imported.
        DataError: it does not take the parameters, is no curriculum, or its state is not what JSON holds.
    """
    if data.curriculum is None:
        return None
    kind = CURRICULA.get(data.curriculum)
    try:
        made = kind(**data.curriculum_params)
    except TypeError as error:
        raise DataError(
            f"data.curriculum={data.curriculum}: cannot be made with curriculum_params="
            f"{data.curriculum_params}: {error}"
        ) from error
    except Exception as error:  # the boundary to a class from outside: whatever it raises
        raise DataError(
            f"data.curriculum={data.curriculum}: cannot be made: it raised {type(error).__name__}: {error}"
        ) from error
    missing = [name for name in ("order", "observe", "state_dict", "load_state_dict") if not hasattr(made, name)]
    if missing:
        raise DataError(
            f"data.curriculum={data.curriculum}: has no {', '.join(missing)} (see megappo.data.curriculum.Curriculum)"
        )
    stored_state(made)
    return made


def stored_state(curriculum: Curriculum) -> dict[str, Any]:  # Any: what JSON holds
    """Return the state as a JSON file will hold it.

    Raises:
        CurriculumError: `state_dict` raised.
        DataError: JSON does not hold it, or not as it is (keys that are no text come back as text).
    """
    name = type(curriculum).__qualname__
    with calling(curriculum, "state_dict()"):
        state = curriculum.state_dict()
    try:
        stored = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(f"data.curriculum: {name}.state_dict() cannot be stored as JSON: {error}") from error
    if not isinstance(state, Mapping) or stored != state:
        raise DataError(
            f"data.curriculum: {name}.state_dict() does not come back from JSON as it was "
            "(return a dict with text as keys, lists and no tuples)"
        )
    return stored


def round_of(curriculum: Curriculum, number: int, prompts: Sequence[Prompt]) -> np.ndarray:
    """Return the positions of the draws of a round, [draws] int64.

    Raises:
        CurriculumError: `order` raised, there are none, or they are no positions of prompts.
    """
    name = type(curriculum).__qualname__
    with calling(curriculum, f"order({number}, ...)"):
        order = np.asarray(curriculum.order(number, prompts))
    if order.ndim != 1 or len(order) == 0 or not np.issubdtype(order.dtype, np.integer):
        raise CurriculumError(
            f"data.curriculum: {name}.order({number}, ...) must return positions of prompts, at least one, "
            f"found {order!r:.80}"
        )
    wrong = order[(order < 0) | (order >= len(prompts))]
    if len(wrong):
        raise CurriculumError(
            f"data.curriculum: {name}.order({number}, ...) returned position {wrong[0]}, and there are "
            f"{len(prompts)} prompts"
        )
    return order.astype(np.int64)


@contextmanager
def calling(curriculum: Curriculum, method: str) -> Iterator[None]:
    """Run a method of a curriculum. Raises CurriculumError with whatever it raises, and where."""
    try:
        yield
    except Exception as error:  # the boundary to a class from outside
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise CurriculumError(
            f"data.curriculum: {type(curriculum).__qualname__}.{method} raised {type(error).__name__}: {error} "
            f"({at.filename}:{at.lineno})"
        ) from error
