import numpy as np
import pytest

from megappo.algo.token_rewards import compute_overlong_penalty
from megappo.config.algorithm import OverlongConfig
from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.length import Length, Overlong


def scores(reward: Length | Overlong, lengths: list[int]) -> list[float]:
    samples = [Sample(prompt="", response="x", answer=None, response_tokens=tokens) for tokens in lengths]
    return [result.score for result in reward.score(samples)]


def test_longer_responses_lose_in_proportion_down_to_minus_1():
    reward = Length(target_tokens=100, scale_tokens=50)
    assert scores(reward, [1, 100, 101, 125, 150, 1000]) == [0.0, 0.0, -0.02, -0.5, -1.0, -1.0]


def test_shorter_responses_lose_as_much_on_both_sides():
    reward = Length(target_tokens=100, scale_tokens=50, both_sides=True)
    assert scores(reward, [1, 75, 100, 125]) == [-1.0, -0.5, 0.0, -0.5]


def test_the_length_is_a_part():
    samples = [Sample(prompt="", response="x", answer=None, response_tokens=7)]
    assert Length(target_tokens=9, scale_tokens=1).score(samples) == [Reward(score=0.0, parts={"tokens": 7.0})]


def test_over_long_responses_lose_within_the_buffer():
    reward = Overlong(max_tokens=100, buffer_tokens=20)
    assert scores(reward, [1, 80, 81, 90, 100, 101]) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]


def test_over_long_is_the_penalty_of_the_algorithm():
    lengths = list(range(1, 130))
    penalty = compute_overlong_penalty(np.array(lengths), OverlongConfig(max_length=100, buffer=20, factor=1.0))
    assert scores(Overlong(max_tokens=100, buffer_tokens=20), lengths) == pytest.approx(penalty.tolist())


def test_no_penalty_is_a_plain_zero():
    samples = [Sample(prompt="", response="", answer=None)]
    for reward in (Length(target_tokens=1, scale_tokens=1), Overlong(max_tokens=2, buffer_tokens=1)):
        assert str(reward.score(samples)[0].score) == "0.0"


@pytest.mark.parametrize("reward", [Length(target_tokens=1, scale_tokens=1), Overlong(max_tokens=2, buffer_tokens=1)])
def test_a_response_whose_tokens_were_not_counted_is_an_error(reward):
    with pytest.raises(DataError, match="were not counted"):
        reward.score([Sample(prompt="", response="x", answer=None)])


def test_wrong_parameters_are_refused_by_name():
    with pytest.raises(DataError, match="scale_tokens=0 must be a whole number, 1 or more"):
        Length(target_tokens=1, scale_tokens=0)
    with pytest.raises(DataError, match=r"target_tokens=1\.5 must be a whole number"):
        Length(target_tokens=1.5, scale_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="buffer_tokens=20 must be a whole number from 1 to 10"):
        Overlong(max_tokens=10, buffer_tokens=20)
