"""What is refused before it reaches a model."""

import pytest

from megappo.config.rollout import SamplingConfig
from megappo.errors import RequestError
from megappo.rollout.engine import FinishReason, GenerateRequest, SampledResponse
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


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_that_a_program_put_behind_the_prompt_is_one_of_the_models(token: int) -> None:
    begun = [
        SampledResponse(tokens=tokens, log_probs=[0.0] * len(tokens), finish_reason=FinishReason.abort, versions=[])
        for tokens in ([], [5, token])
    ]
    request = GenerateRequest(group_id=6, prompt_tokens=[3], num_samples=2, row=41, begun=begun)
    message = rf"group 6 \(data row 41\) is followed by token {token}, and the model has 64 \(check what rollout\.agent"
    with pytest.raises(RequestError, match=message):
        check_requests([request], SamplingConfig(max_new_tokens=12), limits=LIMITS, name="engine x 0")


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 64, and the model has 64 tokens"):
        check([3], stop_token_ids=[5, 64])
