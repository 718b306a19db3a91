import pytest

from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.numeric import Numeric

# Response, its number in the strict form, its number in the flexible one; None: it gives none.
CASES = [
    ("#### 42", 42, 42),
    ("6 * 7 = 42\n#### 42\n", 42, 42),
    ("####42", 42, 42),
    ("#### 42 apples", 42, 42),
    ("#### $1,234.50", 1234.5, 1234.5),
    ("#### -3", -3, -3),
    ("#### \u22123", -3, -3),
    ("#### -$3", -3, -3),
    ("#### $-3", -3, -3),
    ("#### +3", 3, 3),
    ("#### 50%", 50, 50),
    ("#### .5", 0.5, 0.5),
    ("#### 42.00", 42, 42),
    ("#### 42.", 42, 42),
    ("#### 1/2", 0.5, 0.5),
    ("#### 1e3", 1000, 1000),
    ("#### 1\n#### 2", 2, 2),
    # Out of the strict form.
    ("#### 42 or 43", None, 43),
    ("####\n42", None, 42),
    ("#### unknown", None, None),
    ("the answer is 42.", None, 42),
    ("\\boxed{42}", None, 42),
    ("10-5", None, 5),
    ("x = 10 - 5 = 5", None, 5),
    ("it falls to -5 degrees", None, -5),
    ("(3)-4", None, 4),
    ("1,2,3", None, 3),
    ("12,345,67", None, 67),
    ("1,234,567", None, 1234567),
    ("3 + 4 = 7, all of them", None, 7),
    ("half, 1/2, of it", None, 0.5),
    ("it is 1/2.", None, 0.5),
    ("on 1/2/2024", None, 2024),
    ("#### -1,000/8", -125, -125),
    ("3,4.5", None, 4.5),
    ("0.5.1", None, 0.1),
    ("1/0", None, None),
    ("", None, None),
    ("forty-two", None, None),
    ("9" * 5000, None, None),
    ("111," * 20000 + "11", None, 11),
    ("111," * 20000 + "111", None, None),
    ("1/" * 20000, None, 1),
    ("-$" * 20000, None, None),
]


def rewards(reward: Numeric, response: str, *answers: str | None) -> list[Reward]:
    return reward.score([Sample(prompt="", response=response, answer=answer) for answer in answers])


@pytest.mark.parametrize(("response", "strict", "flexible"), CASES)
def test_a_response_gives_its_number(response, strict, flexible):
    for mode, number in (("strict", strict), ("flexible", flexible)):
        right, wrong = rewards(Numeric(mode=mode), response, "77" if number is None else str(number), "78")
        parts = {"parsed": float(number is not None), "marked": float(strict is not None)}
        assert (right.score, right.parts) == (float(number is not None), parts)
        assert (wrong.score, wrong.parts) == (0.0, parts)


def test_equal_values_have_one_extracted_form():
    texts = [rewards(Numeric(), text, "42")[0].extracted for text in ("42", "so 42.00", "#### 84/2", "none")]
    assert texts == ["42", "42", "42", ""]


def test_a_percent_sign_is_a_unit_unless_it_counts():
    assert [reward.score for reward in rewards(Numeric(), "50%", "50", "0.5")] == [1.0, 0.0]
    assert [reward.score for reward in rewards(Numeric(percent=True), "50\\%", "50", "0.5", "50%")] == [0.0, 1.0, 1.0]


def test_a_tolerance_is_relative_to_the_answer():
    near = Numeric(tolerance=0.01)
    assert [rewards(near, text, "-200")[0].score for text in ("-198", "-202", "-197.9", "200")] == [1.0, 1.0, 0.0, 0.0]
    assert rewards(near, "0.001", "0")[0].score == 0.0


@pytest.mark.parametrize("answer", ["72", "Natalia sold 48/2 = 24 clips in May.\n#### 72", "$72", "72 clips", "72.0"])
def test_the_rows_answer_may_be_a_whole_solution(answer):
    assert rewards(Numeric(), "72", answer)[0].score == 1.0


@pytest.mark.parametrize("answer", ["", "seventy-two", "72 or 73", "#### ", None])
def test_a_row_without_one_number_is_an_error(answer):
    with pytest.raises(DataError, match=r"no answer|not one number"):
        rewards(Numeric(), "72", answer)


def test_wrong_parameters_are_refused_by_name():
    with pytest.raises(DataError, match="mode='lax' must be one of strict, flexible"):
        Numeric(mode="lax")
    with pytest.raises(DataError, match="tolerance=-1 must be a number from 0 to 1"):
        Numeric(tolerance=-1)
    with pytest.raises(DataError, match="percent='no' must be true or false"):
        Numeric(percent="no")  # type: ignore[arg-type]
