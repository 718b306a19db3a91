"""The invariants listed in megappo/data/mixture.py."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.mixture import PromptMixture, WeightedPrompts
from megappo.data.sampler import PromptSampler
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.observability.metrics import values


def prompts_of(origin: str, count: int) -> list[Prompt]:
    return [
        Prompt(row=row, text=f"{origin}{row}", tokens=[row], answer=None, source=origin, origin=origin)
        for row in range(count)
    ]


def mixture(weights: dict[str, float], *, rows: int = 40, batch_size: int = 8, seed: int = 1) -> PromptMixture:
    sources = {name: WeightedPrompts(prompts=prompts_of(name, rows), weight=weight) for name, weight in weights.items()}
    return PromptMixture(sources, batch_size=batch_size, seed=seed, shuffle=True)


def draw(mixed: PromptMixture, count: int) -> list[tuple[str, int]]:
    return [(prompt.origin, prompt.row) for prompt in mixed.next(count)]


WEIGHTS = st.lists(st.sampled_from([0.01, 0.1, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 300), st.integers(1, 60))
def test_the_share_of_any_draws_in_a_row_is_exact_up_to_two(weights, start, length):
    named = {f"s{index}": weight for index, weight in enumerate(weights)}
    mixed, count = mixture(named, rows=400), len(weights)
    before = Counter(origin for origin, _ in draw(mixed, start))
    window = Counter(origin for origin, _ in draw(mixed, length))
    bound = 1 - 1 / (2 * count - 2) if count > 1 else 0.0
    for name, weight in named.items():
        share = weight / sum(weights)
        assert abs(before[name] - share * start) <= bound + 1e-9
        assert abs(window[name] - share * length) <= 2 * bound + 1e-9


def test_a_batch_that_the_weights_divide_has_exactly_their_shares():
    mixed = mixture({"a": 3, "b": 1})
    for _ in range(20):
        assert Counter(origin for origin, _ in draw(mixed, 8)) == {"a": 6, "b": 2}


def test_sources_alternate_inside_of_a_batch():
    assert [origin for origin, _ in draw(mixture({"a": 1, "b": 1}), 6)] in (["a", "b"] * 3, ["b", "a"] * 3)


def test_epochs_of_a_source_are_whole_and_do_not_depend_on_the_others():
    mixed = draw(mixture({"a": 1, "b": 2}, rows=10), 60)
    of_a = [row for origin, row in mixed if origin == "a"]
    assert sorted(of_a[:10]) == sorted(of_a[10:20]) == list(range(10)) and of_a[:10] != of_a[10:20]
    other = draw(mixture({"c": 0.5, "a": 7, "b": 2}, rows=10), 60)
    assert [row for origin, row in other if origin == "a"][: len(of_a)] == of_a
    assert of_a[:10] != [row for origin, row in mixed if origin == "b"][:10]


@pytest.mark.parametrize("drawn", [0, 1, 7, 30, 61])
def test_a_restored_mixture_goes_on_with_the_same_draws(drawn):
    weights = {"a": 1.0, "b": 0.3, "c": 2.0}
    mixed = mixture(weights, rows=9)
    draw(mixed, drawn)
    restored = mixture(weights, rows=9)
    restored.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    assert restored.metrics() == mixed.metrics()
    assert draw(restored, 50) == draw(mixed, 50)


def test_a_mixture_restored_far_into_a_run_goes_on_at_once_with_exact_shares():
    state = mixture({"a": 1, "b": 3}, rows=10).state_dict()
    state["sources"]["a"]["drawn"], state["sources"]["b"]["drawn"] = 10**15, 3 * 10**15
    restored = mixture({"a": 1, "b": 3}, rows=10)
    restored.load_state_dict(state)
    assert Counter(origin for origin, _ in draw(restored, 400)) == {"a": 100, "b": 300}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mixture({"a": 1, "b": 2}), "weights="),
        (mixture({"a": 1, "c": 1}), "weights="),
        (mixture({"a": 1, "b": 1}, seed=2), "seed="),
        (mixture({"a": 1, "b": 1}, rows=41), r"data\.train_sources\.a: .*prompts="),
    ],
)
def test_a_state_of_another_mixture_is_refused(other, message):
    with pytest.raises(DataError, match=message):
        other.load_state_dict(mixture({"a": 1, "b": 1}).state_dict())


def test_a_state_of_one_source_is_no_state_of_a_mixture():
    one = PromptSampler(prompts_of("a", 8), batch_size=4, seed=1, shuffle=True)
    with pytest.raises(DataError, match="weights=None"):
        mixture({"a": 1, "b": 1}).load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="prompts=None"):
        one.load_state_dict(mixture({"a": 1, "b": 1}).state_dict() | {"shuffle": True})


def test_fewer_rows_than_the_share_of_a_batch_are_refused():
    # 8 * 2.5 / 3.5 = 5.7 draws of a batch, rounded up.
    with pytest.raises(DataError, match=r"data\.train_sources\.big: 5 prompts are fewer .* 6 of 8"):
        mixture({"small": 1.0, "big": 2.5}, rows=5)


def test_epochs_are_told_of_all_sources_and_of_each():
    mixed = mixture({"a": 3, "b": 1}, rows=10, batch_size=8)
    assert mixed.steps_per_epoch == 3
    mixed.next()
    assert values(mixed.metrics()) == {"data/epoch": 0.4, "data/epoch/a": 0.6, "data/epoch/b": 0.2}


def test_prompts_are_found_by_origin_and_row():
    found = mixture({"a": 1, "b": 1}).find([("a", 3), ("b", 3)])
    assert {place: prompt.text for place, prompt in found.items()} == {("a", 3): "a3", ("b", 3): "b3"}
