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
