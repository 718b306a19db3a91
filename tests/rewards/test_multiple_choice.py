import pytest

from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.multiple_choice import MultipleChoice

CHOSEN = [
    ("B", "B"),
    ("b", "B"),
    (" (B) \n", "B"),
    ("**B.**", "B"),
    ("B) Paris", "B"),
    ("**B.** Paris", "B"),
    ("Let me think.\n\nC: it is green\n", "C"),
    ("The answer is B.", "B"),
    ("the answer is (b)", "B"),
    ("Answer: **C**", "C"),
    ("**Answer:** C", "C"),
    ("ANSWER = $\\text{D}$", "D"),
    ("The correct answer is option D because it fits", "D"),
    ("so \\boxed{A}", "A"),
    ("so \\boxed{\\text{(A)}}", "A"),
    ("Answer: A. On reflection, the answer is B. Option C is wrong.", "B"),
    ("\\boxed{A}, no: the answer is C", "C"),
    ("the answer is C, that is \\boxed{A}", "A"),
    ("The answer is B, A is wrong", "B"),
    # Nothing is chosen.
    ("", ""),
    ("I do not know", ""),
    ("A dog bit the man", ""),
    ("E", ""),
    ("Answer: E", ""),
    ("the answer is a matter of taste", ""),
    ("The answer is not A", ""),
    ("The answer is A or B", ""),
    ("Answer: A/B", ""),
    ("Answer: A, B, C, D", ""),
    ("Answer: (A) and (B)", ""),
    ("ABCD", ""),
    ("Answer: Because", ""),
    ("answer " * 20000, ""),
    ("answer" + " *_" * 20000 + "x", ""),
    ("\\boxed{" * 20000, ""),
    ("(" * 50000, ""),
    (" " * 50000 + "\n" * 50000, ""),
]


@pytest.mark.parametrize(("response", "letter"), CHOSEN)
def test_a_response_chooses_by_the_rules(response, letter):
    answers = "ABCD"
    rewards = MultipleChoice().score([Sample(prompt="", response=response, answer=answer) for answer in answers])
    parts = {"parsed": float(letter != "")}
    assert rewards == [Reward(score=float(letter == answer), parts=parts, extracted=letter) for answer in answers]


def score(reward: MultipleChoice, response: str, answer: str | None) -> float:
    return reward.score([Sample(prompt="", response=response, answer=answer)])[0].score


def test_further_letters_are_choices_where_they_are_named():
    assert score(MultipleChoice(letters="ABCDEFGHIJ"), "The answer is J.", "J") == 1.0


def test_a_pattern_is_the_only_rule():
    tagged = MultipleChoice(pattern="<answer>(.*?)</answer>")
    assert score(tagged, "The answer is C. <answer>A</answer> <answer> (b) </answer>", "B") == 1.0
    assert score(tagged, "<answer>B or C</answer>", "B") == 0.0
    assert score(tagged, "The answer is B", "B") == 0.0


@pytest.mark.parametrize("answer", ["(b)", "B.", " b "])
def test_the_rows_letter_may_be_written_in_any_way(answer):
    assert score(MultipleChoice(), "Answer: B", answer) == 1.0


@pytest.mark.parametrize("answer", ["E", "Paris", "", "AB", None])
def test_a_row_without_a_letter_is_an_error(answer):
    with pytest.raises(DataError, match=r"no answer|none of the letters ABCD"):
        score(MultipleChoice(), "A", answer)


@pytest.mark.parametrize("params", [{"letters": "A"}, {"letters": "abcd"}, {"letters": "AAB"}, {"letters": 4}])
def test_letters_that_are_none_are_refused(params):
    with pytest.raises(DataError, match="two or more different letters"):
        MultipleChoice(**params)


@pytest.mark.parametrize("pattern", ["answer (", "answer .", 3])
def test_a_pattern_without_a_group_is_refused(pattern):
    with pytest.raises(DataError, match=r"params\.pattern="):
        MultipleChoice(pattern=pattern)
