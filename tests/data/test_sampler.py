"""The invariants listed in megappo/data/sampler.py."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.sampler import PromptSampler
from megappo.data.types import Prompt
from megappo.errors import DataError


def prompts(count: int, text: str = "q") -> list[Prompt]:
    return [Prompt(row=row, text=f"{text}{row}", tokens=[row], answer=None, source="test") for row in range(count)]


def sampler(count: int = 10, *, batch_size: int = 4, seed: int = 1, shuffle: bool = True, text: str = "q"):
    return PromptSampler(prompts(count, text), batch_size=batch_size, seed=seed, shuffle=shuffle)


def draw(source: PromptSampler, batches: int) -> list[int]:
    return [prompt.row for _ in range(batches) for prompt in source.next()]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_every_row_is_drawn_once_per_epoch(count, batch_size, seed, shuffle):
    batch_size = min(batch_size, count)
    rows = draw(sampler(count, batch_size=batch_size, seed=seed, shuffle=shuffle), 3 * count)
    for epoch in range(3):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_have_different_orders_that_the_seed_repeats():
    rows = draw(sampler(10, batch_size=5), 6)
    epochs = [tuple(rows[start : start + 10]) for start in (0, 10, 20)]
    assert len(set(epochs)) == 3
    assert rows == draw(sampler(10, batch_size=5), 6)
    assert rows != draw(sampler(10, batch_size=5, seed=2), 6)


def test_the_order_does_not_depend_on_the_batch_size():
    assert draw(sampler(12, batch_size=4), 9) == draw(sampler(12, batch_size=6), 6)


def test_without_shuffle_rows_come_in_order():
    assert draw(sampler(5, batch_size=2, shuffle=False), 5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 7])
def test_a_restored_sampler_goes_on_with_the_same_draws(steps):
    # 8 rows in batches of 2: an epoch ends at step 4, where a resume must not lose one.
    source = sampler(8, batch_size=2)
    draw(source, steps)
    state = json.loads(json.dumps(source.state_dict()))
    restored = sampler(8, batch_size=2)
    restored.load_state_dict(state)
    assert restored.epoch == steps / 4
    assert draw(restored, 9) == draw(source, 9)


def test_a_sampler_restored_far_into_a_run_goes_on_at_once():
    state = sampler(8, batch_size=2).state_dict() | {"drawn": 8 * 10**15 + 6}
    restored = sampler(8, batch_size=2)
    restored.load_state_dict(state)
    assert len(draw(restored, 4)) == 8


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (sampler(9), "prompts"),
        (sampler(text="other"), "fingerprint"),
        (sampler(seed=2), "seed"),
        (sampler(shuffle=False), "shuffle"),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(other, key):
    with pytest.raises(DataError, match=f"{key}="):
        other.load_state_dict(sampler().state_dict())


def test_prompts_are_found_again_by_origin_and_row():
    one = sampler(8)
    drawn = one.next(3)
    assert one.find([("", prompt.row) for prompt in drawn]) == {("", prompt.row): prompt for prompt in drawn}
    assert one.find([("math", drawn[0].row)]) == {}


def test_steps_per_epoch_reach_every_row():
    assert sampler(8, batch_size=4).steps_per_epoch == 2
    assert sampler(9, batch_size=4).steps_per_epoch == 3


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(DataError, match="3 prompts are fewer than one batch of 4"):
        sampler(3, batch_size=4)
