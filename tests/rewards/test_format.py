import pytest

from megappo.errors import DataError
from megappo.rewards import Sample
from megappo.rewards.format import Format

CASES = [
    ("<think>why</think><answer>42</answer>", 1.0, 1.0),
    (" <think>\nwhy\n</think>\n\n<answer>\n42</answer>\n", 1.0, 1.0),
    ("<answer>42</answer><think>why</think>", 0.0, 1.0),
    ("Well: <think>why</think><answer>42</answer>", 0.0, 1.0),
    ("<think>why</think> so <answer>42</answer>", 0.0, 1.0),
    ("<think>why</think><answer>42</answer> done", 0.0, 1.0),
    ("<think> </think><answer>42</answer>", 0.0, 1.0),
    ("<think>why<answer>42</answer></think>", 0.0, 1.0),
    ("<think>why<answer>42</think></answer>", 0.0, 1.0),
    ("<think>why</think><think>why</think><answer>42</answer>", 0.0, 0.5),
    ("<think>why</think></think><answer>42</answer>", 0.0, 0.5),
    ("</think>why<think><answer>42</answer>", 0.0, 0.5),
    ("<think>why</think><answer>42", 0.0, 0.5),
    ("<Think>why</Think><answer>42</answer>", 0.0, 0.5),
    ("why 42", 0.0, 0.0),
    ("", 0.0, 0.0),
]


def score(reward: Format, response: str) -> tuple[float, float | None]:
    (result,) = reward.score([Sample(prompt="", response=response, answer=None)])
    return result.score, result.parts.get("tags")


@pytest.mark.parametrize(("response", "expected", "share"), CASES)
def test_each_tag_opens_and_closes_once_in_order_with_nothing_around(response, expected, share):
    assert score(Format(tags=["think", "answer"]), response) == (expected, share)


def test_a_tag_that_the_prompt_opened_is_not_opened_again():
    reward = Format(tags=["think", "answer"], opened_by_prompt=True)
    assert score(reward, "why</think><answer>42</answer>") == (1.0, 1.0)
    assert score(reward, "<think>why</think><answer>42</answer>") == (0.0, 0.5)


def test_a_pattern_must_match_all_of_the_response():
    reward = Format(pattern=r"\d+\.*")
    assert [score(reward, text)[0] for text in ("42.", "42", "a 42", "42 b")] == [1.0, 1.0, 0.0, 0.0]
    assert score(Format(pattern="a.b"), "a\nb") == (1.0, None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "give params.tags or params.pattern"),
        ({"tags": ["think"], "pattern": "."}, "and not both"),
        ({"tags": "think"}, "must be different names"),
        ({"tags": ["think", "think"]}, "must be different names"),
        ({"tags": ["<think>"]}, "must be different names"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": ".", "opened_by_prompt": True}, "needs params.tags"),
        ({"tags": ["think"], "opened_by_prompt": 1}, "must be true or false"),
    ],
)
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(DataError, match=message):
        Format(**params)
