"""What is refused before it reaches a model."""

import pytest

from megappo.config.rollout import SamplingConfig
from megappo.errors import RequestError
from megappo.rollout.engine import GenerateRequest
from megappo.rollout.prompts import RequestLimits, check_requests

LIMITS = RequestLimits(vocabulary=64, tokens=20, reason="the model's positions")


def check(prompt: list[int], *, row: int | None = 41, **sampling: object) -> None:
    request = GenerateRequest(group_id=6, prompt_tokens=prompt, num_samples=2, row=row)
    config = SamplingConfig(max_new_tokens=12, **sampling)  # type: ignore[arg-type]
    check_requests([request], config, limits=LIMITS, name="engine x 0")


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "has no tokens"),
        ([3, 64], "holds token 64, and the model has 64"),
        ([-1], "holds token -1, and the model has 64"),
        ([3] * 9, "has 9 tokens, which with max_new_tokens=12 is more than the 20 of the model's positions"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named_by_group_and_row(prompt: list[int], problem: str) -> None:
    with pytest.raises(RequestError, match=rf"engine x 0: generate: the prompt of group 6 \(data row 41\) {problem}"):
        check(prompt)
    with pytest.raises(RequestError, match=rf"the prompt of group 6 {problem}"):
        check(prompt, row=None)


def test_a_prompt_that_just_fits_passes() -> None:
    check([0, *[63] * 7])


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 64, and the model has 64 tokens"):
        check([3], stop_token_ids=[5, 64])
