import threading

import pytest

from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.math_verify import MathVerify

CASES = [
    ("72", "The answer is 72.", 1.0),
    ("72", "#### 72", 1.0),
    ("\\frac{1}{2}", "so $0.5$", 1.0),
    ("\\frac{1}{2}", "2", 0.0),
    ("1/2", "\\boxed{\\frac12}", 1.0),
    ("1,000", "1000", 1.0),
    ("$x^2-1$", "$(x-1)(x+1)$", 1.0),
    ("0.333", "1/3", 0.0),
]


def score_cases() -> list[float]:
    samples = [Sample(prompt="", response=response, answer=answer) for answer, response, _ in CASES]
    return [reward.score for reward in MathVerify().score(samples)]


def test_equal_values_count_whatever_their_form():
    assert score_cases() == [expected for _, _, expected in CASES]


def test_scores_are_the_same_off_the_main_thread():
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(score_cases()))
    thread.start()
    thread.join(timeout=120)
    assert found == [[expected for _, _, expected in CASES]]


def test_a_response_without_expression_says_so():
    (reward,) = MathVerify().score([Sample(prompt="", response="I do not know", answer="72")])
    assert reward == Reward(score=0.0, parts={"parsed": 0.0}, extracted="")


def test_equal_numbers_are_extracted_as_one_text():
    texts = ["0.5", "1/2", "$\\frac{2}{4}$", "1,000", "1000.0", "$x^2-1$"]
    rewards = MathVerify().score([Sample(prompt="", response=text, answer="1") for text in texts])
    assert [reward.extracted for reward in rewards] == ["1/2", "1/2", "1/2", "1000", "1000", "x**2 - 1"]


@pytest.mark.parametrize("answer", ["", None])
def test_an_answer_that_cannot_be_compared_is_an_error(answer):
    with pytest.raises(DataError, match=r"no answer|no number or LaTeX"):
        MathVerify().score([Sample(prompt="", response="5", answer=answer)])
