"""The order in which prompts are drawn.

Invariants (asserted by tests/data/test_sampler.py):
1. The draws are the epochs one after the other: each row exactly once per epoch, in an order that depends on the seed
   and the epoch only.
2. A batch that the epoch cannot fill is completed from the next epoch, so no row is ever left out and every batch has
   the same size. (Such a batch may hold a row twice; they are two draws.)
3. A restored sampler goes on with exactly the draws that would have followed, at the same cost at any position.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megappo.data.types import Prompt
from megappo.errors import DataError


class PromptSampler:
    """Draws batches of prompts for ever.

    Example:
        sampler = PromptSampler(prompts, batch_size=32, seed=0, shuffle=True)
        batch = sampler.next()
    """

    def __init__(self, prompts: Sequence[Prompt], *, batch_size: int, seed: int, shuffle: bool) -> None:
        """Raises DataError when there are fewer prompts than one batch takes."""
        if len(prompts) < batch_size:
            raise DataError(
                f"data: {len(prompts)} prompts are fewer than one batch of {batch_size} "
                "(give more rows, or lower batching.prompts_per_step)"
            )
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        self._fingerprint = _fingerprint(prompts)
        self._order: tuple[int, np.ndarray] = (0, self._order_of(0))

    @property
    def steps_per_epoch(self) -> int:
        """Batches after which every row has been drawn at least once."""
        return -(-len(self._prompts) // self._batch_size)

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far, with the part of the running one."""
        return self._drawn / len(self._prompts)

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `count` prompts (default: a batch)."""
        count = self._batch_size if count is None else count
        batch: list[Prompt] = []
        while len(batch) < count:
            epoch, position = divmod(self._drawn, len(self._prompts))
            if epoch != self._order[0]:
                self._order = (epoch, self._order_of(epoch))
            chosen = self._order[1][position : position + count - len(batch)]
            batch.extend(self._prompts[index] for index in chosen.tolist())
            self._drawn += len(chosen)
        return batch

    def of_rows(self, rows: Sequence[int]) -> dict[int, Prompt]:
        """Return the prompts of some rows, by row."""
        wanted = set(rows)
        return {prompt.row: prompt for prompt in self._prompts if prompt.row in wanted}

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later: plain numbers and strings, for a JSON file."""
        return {
            "drawn": self._drawn,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the batch size may be another.

        Raises:
            DataError: the state is of other prompts, another seed or another shuffle setting: its position would
                leave out rows that were never drawn.
        """
        for key, value in self.state_dict().items():
            if key != "drawn" and state[key] != value:
                raise DataError(
                    f"data: the checkpoint was made with {key}={state[key]}, this run has {key}={value} (use the same "
                    "data and seed, or start a new run from the checkpoint's weights)"
                )
        self._drawn = state["drawn"]

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the order of one epoch, [prompts] int64."""
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a digest of rows and texts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.row}\x00{prompt.text}\x00".encode())
    return digest.hexdigest()[:16]
