"""Prompts of several sources, mixed by weight.

Invariants (asserted by tests/data/test_mixture.py), k the number of sources:
1. After any number of draws each source has had its share of them, up to less than one draw (1 - 1/(2 k - 2) at most).
   So its share of any draws in a row is exact up to less than two, with two sources up to one.
2. The draws of one source are those that it would give alone, in the same order: its epochs are whole, and what other
   sources there are and how they are weighted does not change it.
3. A restored mixture goes on with exactly the draws that would have followed, at the same cost at any position.

The order of the sources is that of Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32
(1980), pp. 323-330): of the sources that are due, the one comes whose next draw must not wait the longest.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm
from typing import Any

from megappo.data.curriculum import Curriculum
from megappo.data.sampler import Place, PromptSampler, Scored, check_same
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.observability.metrics import Metrics, mean


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightedPrompts:
    """The prompts of one source; their `origin` is its name."""

    prompts: Sequence[Prompt]
    weight: float
    """Above 0; relative to the other weights."""
    curriculum: Curriculum | None = None


class PromptMixture:
    """Draws from several sources.

    Example:
        sources = {"math": WeightedPrompts(prompts=math, weight=3), "code": WeightedPrompts(prompts=code, weight=1)}
        mixture = PromptMixture(sources, batch_size=32, seed=0, shuffle=True)
        batch = mixture.next()  # 24 of math and 8 of code
    """

    def __init__(self, sources: Mapping[str, WeightedPrompts], *, batch_size: int, seed: int, shuffle: bool) -> None:
        """Raises DataError when a source has fewer prompts than its share of one batch."""
        self._batch_size = batch_size
        self._seed = seed
        self._weights = {name: source.weight for name, source in sources.items()}
        self._prompts = {name: len(source.prompts) for name, source in sources.items()}
        self._turns = _Turns(self._weights)
        for name, source in sources.items():
            share = self._turns.most_of(name, batch_size)
            if len(source.prompts) < share:
                raise DataError(
                    f"data.train_sources.{name}: {len(source.prompts)} prompts are fewer than its share of one batch, "
                    f"{share} of {batch_size} (give more rows, or lower its weight or batching.prompts_per_step)"
                )
        self._samplers = {
            name: PromptSampler(
                source.prompts,
                batch_size=1,
                seed=_seed_of(seed, name),
                shuffle=shuffle,
                curriculum=source.curriculum,
            )
            for name, source in sources.items()
        }

    @property
    def steps_per_epoch(self) -> int:
        """Batches that hold as many draws as there are prompts; each source is passed over by its weight."""
        return -(-sum(self._prompts.values()) // self._batch_size)

    def metrics(self) -> Metrics:
        """Return `data/epoch` (draws over prompts, of all sources) and `data/epoch/<source>`."""
        drawn = sum(self._turns.drawn.values())
        of_each = {f"data/epoch/{name}": mean(sampler.epoch, 1) for name, sampler in self._samplers.items()}
        return {"data/epoch": mean(drawn / sum(self._prompts.values()), 1)} | of_each

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `count` prompts (default: a batch)."""
        turns = [self._turns.take() for _ in range(self._batch_size if count is None else count)]
        drawn = {name: iter(self._samplers[name].next(turns.count(name))) for name in dict.fromkeys(turns)}
        return [next(drawn[name]) for name in turns]

    def find(self, places: Sequence[Place]) -> dict[Place, Prompt]:
        """Return some prompts by where they are."""
        return {place: prompt for sampler in self._samplers.values() for place, prompt in sampler.find(places).items()}

    def observe(self, results: Sequence[Scored]) -> None:
        """Tell the curriculum of each source, if there is one, what became of its prompts."""
        for name, sampler in self._samplers.items():
            sampler.observe([result for result in results if result[0].origin == name])

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later: plain numbers and strings, for a JSON file."""
        return {
            "drawn": sum(self._turns.drawn.values()),
            "seed": self._seed,
            "weights": dict(self._weights),
            "sources": {name: sampler.state_dict() for name, sampler in self._samplers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the batch size may be another.

        Raises:
            DataError: the state is of other sources, weights, prompts or another order.
        """
        check_same(state, self.state_dict(), ("seed", "weights"))
        stored = state["sources"]
        for name, sampler in self._samplers.items():
            try:
                sampler.load_state_dict(stored[name])
            except DataError as error:
                raise DataError(f"data.train_sources.{name}: {error}") from error
        self._turns.drawn = {name: stored[name]["drawn"] for name in self._samplers}


class _Turns:
    """Whose turn it is. All in whole numbers: nothing drifts, however long a run is."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        # As the number is written: 0.1 is a tenth, and not the nearest binary fraction.
        exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
        scale = lcm(*(weight.denominator for weight in exact.values()))
        self._weights = {name: int(weight * scale) for name, weight in exact.items()}
        self._total = sum(self._weights.values())
        self.drawn = dict.fromkeys(weights, 0)

    def take(self) -> str:
        """Return the next source."""
        draw, total = sum(self.drawn.values()) + 1, self._total
        slack = max(1, 2 * len(self._weights) - 2)
        # Draws that a source is behind, times the total.
        behind = {name: weight * draw - self.drawn[name] * total for name, weight in self._weights.items()}
        due = [name for name in behind if behind[name] * slack >= total]
        chosen = min(due, key=lambda name: Fraction(total * (slack - 1) - slack * behind[name], self._weights[name]))
        self.drawn[chosen] += 1
        return chosen

    def most_of(self, name: str, count: int) -> int:
        """Return the share of a source in so many draws, rounded up."""
        return ceil(Fraction(self._weights[name] * count, self._total))


def _seed_of(seed: int, name: str) -> int:
    """Return a seed for one source, so that sources of equal sizes are not drawn in the same order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")
