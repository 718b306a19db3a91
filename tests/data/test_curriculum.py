"""The protocol of megappo/data/curriculum.py, with a curriculum that goes by what it observed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megappo.config.data import DataConfig
from megappo.data.curriculum import CurriculumError, make_curriculum
from megappo.data.mixture import PromptMixture, WeightedPrompts
from megappo.data.sampler import PromptSampler
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.registry import RegistryError


class Weakest:
    """Rounds of the `size` prompts with the lowest mean score so far, the unseen first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.totals: dict[str, list[float]] = {}

    def order(self, number: int, prompts: Sequence[Prompt]) -> Sequence[int]:
        def mean(index: int) -> float:
            count, total = self.totals.get(str(index), (0, 0.0))
            return total / count if count else -1.0

        return np.array(sorted(range(len(prompts)), key=lambda index: (mean(index), index))[: self.size])

    def observe(self, indices: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        for index, found in zip(indices, scores):
            count, total = self.totals.get(str(index), [0, 0.0])
            self.totals[str(index)] = [count + len(found), total + sum(found)]

    def state_dict(self) -> dict[str, Any]:
        return {"totals": {key: list(value) for key, value in self.totals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.totals = {key: list(value) for key, value in state["totals"].items()}


class Chosen:
    """Orders what it was given; its state is whatever it was given."""

    def __init__(self, order: Any = (0,), state: Any = None) -> None:
        self.given, self.state = order, state if state is not None else {}

    def order(self, number: int, prompts: Sequence[Prompt]) -> Any:
        return self.given

    def observe(self, indices: Sequence[int], scores: Sequence[Sequence[float]]) -> None: ...

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NotReady:
    def __init__(self) -> None:
        raise RuntimeError("no table")


class Careless(Weakest):
    """Fails in the method that it is told."""

    def __init__(self, method: str = "state_dict") -> None:
        super().__init__(2)
        self.method = method

    def order(self, number: int, prompts: Sequence[Prompt]) -> Sequence[int]:
        return [{}[number]] if self.method == "order" and number else super().order(number, prompts)

    def observe(self, indices: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        if self.method == "observe":
            raise ValueError("no idea of these")

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1 / 0} if self.method == "state_dict" else super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("levels")


class NoCurriculum:
    """Has none of the methods."""


def prompts_of(origin: str = "", count: int = 6) -> list[Prompt]:
    # Rows are not positions.
    return [
        Prompt(row=10 * row, text=f"{origin}{row}", tokens=[row], answer=None, source="test", origin=origin)
        for row in range(count)
    ]


def sampler(curriculum: Any, *, batch_size: int = 2) -> PromptSampler:
    return PromptSampler(prompts_of(), batch_size=batch_size, seed=0, shuffle=True, curriculum=curriculum)


def work(source: Any, batches: int) -> list[int]:
    """Draw, and score each prompt by its row."""
    drawn: list[int] = []
    for _ in range(batches):
        batch = source.next(2)
        drawn += [prompt.row // 10 for prompt in batch]
        source.observe([(prompt, [prompt.row / 10.0, prompt.row / 10.0]) for prompt in batch])
    return drawn


def test_rounds_follow_one_another_and_see_what_was_observed():
    # Rounds of 4, two batches each: 0-3 are unseen; then 4 and 5 are, and 0 and 1 weakest; then 0-3 are weakest.
    assert work(sampler(Weakest(4)), 6) == [0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3]


def test_a_round_may_end_inside_of_a_batch_and_repeat_prompts():
    source = sampler(Chosen([5, 5, 1]))
    assert [prompt.row // 10 for _ in range(3) for prompt in source.next()] == [5, 5, 1, 5, 5, 1]
    assert source.epoch == 1.0


@pytest.mark.parametrize("batches", range(6))
def test_a_restored_curriculum_goes_on_with_the_same_draws(batches):
    # Rounds of 5 and batches of 2, so that most positions are inside of a round whose order no longer follows from
    # what the curriculum knows.
    source = sampler(Weakest(5))
    work(source, batches)
    restored = sampler(Weakest(5))
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert restored.state_dict() == source.state_dict()
    assert work(restored, 8) == work(source, 8)


def test_a_state_of_another_curriculum_or_of_none_is_refused():
    with pytest.raises(DataError, match=r"curriculum=.*Weakest, this run has curriculum=None"):
        sampler(None).load_state_dict(sampler(Weakest(4)).state_dict())
    with pytest.raises(DataError, match=r"curriculum=None, this run has curriculum=.*Weakest"):
        sampler(Weakest(4)).load_state_dict(sampler(None).state_dict())
    source = sampler(Weakest(6))
    work(source, 3)
    with pytest.raises(DataError, match="gave 4 draws and had given more"):
        sampler(Weakest(4)).load_state_dict(source.state_dict())


def test_each_source_of_a_mixture_has_a_curriculum_of_its_own():
    curricula = {"a": Weakest(2), "b": Weakest(3)}
    sources = {
        name: WeightedPrompts(prompts=prompts_of(name), weight=1, curriculum=curriculum)
        for name, curriculum in curricula.items()
    }
    mixed = PromptMixture(sources, batch_size=4, seed=0, shuffle=True)
    batch = mixed.next()
    mixed.observe([(prompt, [1.0]) for prompt in batch])
    assert sorted((prompt.origin, prompt.row) for prompt in batch) == [("a", 0), ("a", 10), ("b", 0), ("b", 10)]
    assert curricula["a"].totals.keys() == curricula["b"].totals.keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([], "must return positions of prompts, at least one"),
        ([0.5], "must return positions"),
        ([[0]], "must return positions"),
        ([0, 6], "returned position 6, and there are 6 prompts"),
        ([-1], "returned position -1"),
    ],
)
def test_an_order_that_is_none_is_refused(order, message):
    with pytest.raises(DataError, match=f"Chosen.order.*{message}"):
        sampler(Chosen(order)).next()


@pytest.mark.parametrize(
    ("name", "params", "error", "message"),
    [
        ("nowhere:Class", {}, RegistryError, "curriculum 'nowhere:Class' cannot be imported"),
        ("Weakest", {"size": 3, "speed": 1}, DataError, "cannot be made with curriculum_params=.*speed"),
        ("NotReady", {}, DataError, "cannot be made: it raised RuntimeError: no table"),
        ("NoCurriculum", {}, DataError, "has no order, observe, state_dict, load_state_dict"),
        ("Chosen", {"state": {1: 2}}, DataError, "does not come back from JSON"),
        ("Chosen", {"state": [1]}, DataError, "does not come back from JSON"),
        ("Chosen", {"state": {"seen": {1, 2}}}, DataError, "cannot be stored as JSON"),
    ],
)
def test_what_is_no_curriculum_is_named(monkeypatch, tmp_path, name, params, error, message):
    (tmp_path / "outside_curricula.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    named = name if ":" in name else f"outside_curricula:{name}"
    with pytest.raises(error, match=message):
        make_curriculum(DataConfig(curriculum=named, curriculum_params=params))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("order", r"Careless\.order\(1, \.\.\.\) raised KeyError: 1 \(.*test_curriculum\.py:\d+\)"),
        ("observe", r"Careless\.observe\(2 prompts\) raised ValueError: no idea of these \("),
        ("state_dict", r"Careless\.state_dict\(\) raised ZeroDivisionError: division by zero \("),
    ],
)
def test_an_error_of_a_curriculum_names_its_method_and_place(method, message):
    with pytest.raises(CurriculumError, match=rf"^data\.curriculum: {message}"):
        work(sampler(Careless(method)), 2)


def test_an_error_in_taking_a_state_names_the_curriculum():
    with pytest.raises(CurriculumError, match=r"Careless\.load_state_dict\(\.\.\.\) raised KeyError: 'levels'"):
        sampler(Careless("load")).load_state_dict(sampler(Careless("load")).state_dict())


def test_no_curriculum_is_made_where_none_is_named():
    assert make_curriculum(DataConfig()) is None


def test_the_curriculum_of_the_documentation_keeps_the_protocol():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    names: dict[str, Any] = {}
    exec(text.partition("# my_curriculum.py")[2].partition("\n")[2].partition("```")[0], names)
    source = sampler(names["Frontier"](size=4))
    drawn = work(source, 3)
    restored = sampler(names["Frontier"](size=4))
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert work(restored, 4) == work(source, 4)
    # What scored 1 or more is solved and 0 is hopeless: the next round is of the two unseen ones.
    assert sorted(drawn) == list(range(6))
