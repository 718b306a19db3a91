import pytest

from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.repetition import Repetition


def reward_of(reward: Repetition, response: str) -> Reward:
    return reward.score([Sample(prompt="", response=response, answer=None)])[0]


def test_the_share_of_repeated_ngrams_is_taken_off():
    # a b | b a | a b | b c: 3 of 4 differ.
    assert reward_of(Repetition(n=2), "a b a b c") == Reward(score=-0.25, parts={"share": 0.25})
    # Case and white space make no difference.
    assert reward_of(Repetition(n=2), "A b\na  B c").score == -0.25


def test_a_loop_comes_close_to_minus_1():
    # 99 pairs, all the same.
    assert reward_of(Repetition(n=2), "so " * 100).score == pytest.approx(-(1 - 1 / 99))


def test_texts_shorter_than_an_ngram_cost_nothing():
    for text in ("", "a a a"):
        assert str(reward_of(Repetition(n=4), text).score) == "0.0"


def test_characters_are_units_of_languages_without_spaces():
    # abab: ab ba ab, 2 of 3 differ.
    assert reward_of(Repetition(n=2, unit="character"), "abab").score == pytest.approx(-1 / 3)
    assert reward_of(Repetition(n=2, unit="word"), "abab").score == 0.0


def test_a_free_share_costs_nothing_and_the_rest_is_scaled():
    assert reward_of(Repetition(n=2, free_share=0.25), "a b a b c").score == 0.0
    # a a: 3 pairs, 1 distinct: share 2/3; (2/3 - 1/3) / (2/3).
    assert reward_of(Repetition(n=2, free_share=1 / 3), "a a a a").score == pytest.approx(-0.5)


@pytest.mark.parametrize("params", [{"n": 0}, {"unit": "token"}, {"free_share": 1.0}, {"free_share": "a"}])
def test_wrong_parameters_are_refused(params):
    with pytest.raises(DataError, match=next(iter(params))):
        Repetition(**params)
