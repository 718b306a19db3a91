import pytest

from megappo.errors import DataError
from megappo.rewards import Sample
from megappo.rewards.exact_match import ExactMatch


def score(response: str, answer: str | None, *, strip: bool = True) -> float:
    return ExactMatch(strip=strip).score([Sample(prompt="", response=response, answer=answer)])[0].score


def test_the_whole_response_must_be_the_answer():
    assert score("42", "42") == 1.0
    assert score("the answer is 42", "42") == 0.0
    assert score("A", "a") == 0.0


def test_white_space_around_counts_only_without_strip():
    assert score(" 42\n", "42 ") == 1.0
    assert score("42 ", "42", strip=False) == 0.0


def test_a_row_without_answer_is_an_error():
    with pytest.raises(DataError, match="no answer"):
        score("", None)


def test_case_counts_unless_it_is_ignored():
    sample = Sample(prompt="", response=" Paris", answer="PARIS")
    assert [ExactMatch(ignore_case=ignore).score([sample])[0].score for ignore in (False, True)] == [0.0, 1.0]


def test_a_pattern_picks_what_is_compared():
    reward = ExactMatch(pattern="<answer>(.*?)</answer>")
    texts = ["<answer>1</answer> <answer>\n42\n</answer>", "42", "<answer>4</answer>"]
    rewards = reward.score([Sample(prompt="", response=text, answer="42") for text in texts])
    assert [(result.score, result.extracted) for result in rewards] == [(1.0, "42"), (0.0, ""), (0.0, "4")]


@pytest.mark.parametrize("params", [{"pattern": "("}, {"pattern": "abc"}, {"ignore_case": 1}, {"strip": "no"}])
def test_wrong_parameters_are_refused(params):
    with pytest.raises(DataError, match=next(iter(params))):
        ExactMatch(**params)
