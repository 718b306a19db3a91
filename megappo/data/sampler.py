"""The order in which the prompts of one source are drawn.

Invariants (asserted by tests/data/test_sampler.py):
1. The draws are the epochs one after the other: each row exactly once per epoch, in an order that depends on the seed
   and the epoch only. With a curriculum they are its rounds one after the other.
2. A batch that the epoch cannot fill is completed from the next epoch, so no row is ever left out and every batch has
   the same size. (Such a batch may hold a row twice; they are two draws.)
3. A restored sampler goes on with exactly the draws that would have followed, at the same cost at any position.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from megappo.data.curriculum import Curriculum, CurriculumError, calling, round_of, stored_state
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.observability.metrics import Metrics, mean

Place = tuple[str, int]
"""`Prompt.origin` and `Prompt.row`: which prompt of a run it is."""

Scored = tuple[Prompt, Sequence[float]]
"""A prompt and the scores of its answers."""


class PromptDraws(Protocol):
    """Draws batches of prompts for ever: from one source (`PromptSampler`) or from several (`PromptMixture`)."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches that make one pass over the prompts."""
        ...

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `count` prompts (default: a batch)."""
        ...

    def find(self, places: Sequence[Place]) -> dict[Place, Prompt]:
        """Return some prompts by where they are."""
        ...

    def observe(self, results: Sequence[Scored]) -> None:
        """Tell the curriculum, if there is one, what became of prompts."""
        ...

    def metrics(self) -> Metrics:
        """Return `data/epoch`: passes over the prompts so far, with the part of the running one."""
        ...

    # Any: plain numbers and strings.
    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later, for a JSON file."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the batch size may be another. Raises DataError when the state is of other
        prompts or another order: its position would leave out rows that were never drawn."""
        ...


class PromptSampler:
    """Draws from one source.

    Example:
        sampler = PromptSampler(prompts, batch_size=32, seed=0, shuffle=True)
        batch = sampler.next()
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Raises DataError when there are fewer prompts than one batch takes.

        Args:
            curriculum: orders the draws; `seed` and `shuffle` are then not read.
        """
        if len(prompts) < batch_size:
            raise DataError(
                f"data: {len(prompts)} prompts are fewer than one batch of {batch_size} "
                "(give more rows, or lower batching.prompts_per_step)"
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        self._drawn = 0
        self._rounds = _Rounds(curriculum, prompts) if curriculum is not None else None
        self._order: tuple[int, np.ndarray] | None = None
        """Epoch and order, as far as one was needed."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches after which every row has been drawn at least once (without a curriculum)."""
        return -(-len(self._prompts) // self._batch_size)

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far, with the part of the running one."""
        return self._drawn / len(self._prompts)

    def metrics(self) -> Metrics:
        """Return `data/epoch`."""
        return {"data/epoch": mean(self.epoch, 1)}

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `count` prompts (default: a batch)."""
        count = self._batch_size if count is None else count
        batch: list[Prompt] = []
        while len(batch) < count:
            missing = count - len(batch)
            chosen = self._of_epoch(missing) if self._rounds is None else self._rounds.take(missing)
            batch.extend(self._prompts[index] for index in chosen.tolist())
            self._drawn += len(chosen)
        return batch

    def find(self, places: Sequence[Place]) -> dict[Place, Prompt]:
        """Return some prompts by where they are."""
        wanted = set(places)
        return {
            place: prompt for prompt in self._prompts if wanted and (place := (prompt.origin, prompt.row)) in wanted
        }

    def observe(self, results: Sequence[Scored]) -> None:
        """Tell the curriculum, if there is one, what became of prompts."""
        if self._rounds is not None and results:
            self._rounds.observe(results)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later: plain numbers and strings, for a JSON file."""
        state = {
            "drawn": self._drawn,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }
        return state if self._rounds is None else state | {"curriculum": self._rounds.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the batch size may be another.

        Raises:
            DataError: the state is of other prompts, another seed, another shuffle setting or another curriculum.
        """
        check_same(state, self.state_dict(), ("seed", "shuffle", "prompts", "fingerprint"))
        if self._rounds is not None or "curriculum" in state:
            named = {"curriculum": None if self._rounds is None else self._rounds.name}
            check_same({"curriculum": state.get("curriculum", {}).get("name")}, named, ("curriculum",))
        self._drawn = state["drawn"]
        if self._rounds is not None:
            self._rounds.load_state_dict(state["curriculum"])

    def _of_epoch(self, most: int) -> np.ndarray:
        """Return the next draws of the running epoch, [at most `most`] int64."""
        epoch, position = divmod(self._drawn, len(self._prompts))
        if self._order is None or epoch != self._order[0]:
            order = epoch_order(len(self._prompts), epoch, seed=self._seed, shuffle=self._shuffle)
            self._order = (epoch, order)
        return self._order[1][position : position + most]


class _Rounds:
    """The draws that a curriculum chooses. A round's order is not stored: it follows from the curriculum's state at the
    beginning of the round, which is."""

    def __init__(self, curriculum: Curriculum, prompts: Sequence[Prompt]) -> None:
        self._curriculum = curriculum
        self._prompts = prompts
        self._number = -1
        self._position = 0
        self._order = np.zeros(0, dtype=np.int64)
        self._at_begin = stored_state(curriculum)

    @property
    def name(self) -> str:
        """Which curriculum it is."""
        kind = type(self._curriculum)
        return f"{kind.__module__}:{kind.__qualname__}"

    @cached_property
    def _positions(self) -> Mapping[Place, int]:
        return {(prompt.origin, prompt.row): index for index, prompt in enumerate(self._prompts)}

    def take(self, most: int) -> np.ndarray:
        """Return the next draws of the running round, or of the next one, [at most `most`] int64."""
        if self._position == len(self._order):
            self._at_begin = stored_state(self._curriculum)
            self._number, self._position = self._number + 1, 0
            self._order = round_of(self._curriculum, self._number, self._prompts)
        chosen = self._order[self._position : self._position + most]
        self._position += len(chosen)
        return chosen

    def observe(self, results: Sequence[Scored]) -> None:
        """Pass on what became of prompts."""
        places = [(prompt.origin, prompt.row) for prompt, _ in results]
        with calling(self._curriculum, f"observe({len(places)} prompts)"):
            self._curriculum.observe(
                [self._positions[place] for place in places], [list(scores) for _, scores in results]
            )

    def state_dict(self) -> dict[str, Any]:
        """Return where drawing goes on."""
        return {
            "name": self.name,
            "round": self._number,
            "position": self._position,
            "at_begin": self._at_begin,
            "now": stored_state(self._curriculum),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._number, self._position, self._at_begin = state["round"], state["position"], state["at_begin"]
        self._load(self._at_begin)
        begun = self._number >= 0
        self._order = round_of(self._curriculum, self._number, self._prompts) if begun else np.zeros(0, dtype=np.int64)
        if self._position > len(self._order):
            raise CurriculumError(
                f"data.curriculum: {self.name}.order({self._number}, ...) gave {len(self._order)} draws and had given "
                "more before the checkpoint (all that it depends on must be in its state)"
            )
        self._load(state["now"])

    def _load(self, state: Mapping[str, Any]) -> None:
        with calling(self._curriculum, "load_state_dict(...)"):
            self._curriculum.load_state_dict(dict(state))


def epoch_order(count: int, epoch: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """Return the order of `count` rows in one epoch, [count] int64; it depends on the arguments only."""
    return np.random.default_rng([seed, epoch]).permutation(count) if shuffle else np.arange(count)


def check_same(
    stored: Mapping[str, Any], own: Mapping[str, Any], keys: Iterable[str], *, same: str = "data and seed"
) -> None:
    """Raise DataError when a stored state differs in one of some keys; `same` says what they depend on."""
    for key in keys:
        if stored.get(key) != own[key]:
            raise DataError(
                f"data: the checkpoint was made with {key}={stored.get(key)}, this run has {key}={own[key]} (use the "
                f"same {same}, or start a new run from the checkpoint's weights)"
            )


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a digest of rows and texts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.row}\x00{prompt.text}\x00".encode())
    return digest.hexdigest()[:16]
