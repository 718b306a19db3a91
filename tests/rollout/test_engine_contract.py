"""What every registered engine must do. Oracle: a plain transformers forward pass of the model folder.

Tolerance 1e-4 on log-probs: float32 sums in another order differ by a few 1e-6.
"""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput
from tests.rollout.conftest import END_TOKENS
from tests.rollout.subject import Subject

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [33, 34, 35, 36], [40]]
Models = tuple[PreTrainedModel, PreTrainedModel]
Folders = tuple[Path, Path]


def ask(num_samples: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(group_id=10 + index, prompt_tokens=prompt, num_samples=num_samples)
        for index, prompt in enumerate(PROMPTS)
    ]


@torch.no_grad()
def largest_difference(model: PreTrainedModel, outputs: list[GroupOutput], temperature: float = 1.0) -> float:
    """Largest |log-prob of the engine - log-prob of a forward pass| over all sampled tokens."""
    largest = 0.0
    for output in outputs:
        prompt = PROMPTS[output.group_id - 10]
        for response in output.responses:
            assert len(response.tokens) == len(response.log_probs) > 0
            logits = model(torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits / temperature, -1)
            expected = expected.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]
            largest = max(largest, (expected - torch.tensor(response.log_probs)).abs().max().item())
    return largest


@pytest.fixture(autouse=True)
def first_weights(subject: Subject, folders: Folders) -> None:
    """Undo what a test before this one did to the weights."""
    if subject.version:
        subject.hand_over(folders[0])


def test_log_probs_are_those_of_a_forward_pass(subject: Subject, models: Models) -> None:
    outputs = subject.generate(ask(6), SamplingConfig(max_new_tokens=12))
    assert [output.group_id for output in outputs] == [10, 11, 12, 13]
    assert [len(output.responses) for output in outputs] == [6] * 4
    assert len({tuple(response.tokens) for output in outputs for response in output.responses}) > 20
    assert largest_difference(models[0], outputs) < 1e-4
    assert largest_difference(models[1], outputs) > 0.1


def test_log_probs_are_under_logits_divided_by_temperature(subject: Subject, models: Models) -> None:
    outputs = subject.generate(ask(4), SamplingConfig(temperature=0.7, max_new_tokens=12))
    assert largest_difference(models[0], outputs, temperature=0.7) < 1e-4
    assert largest_difference(models[0], outputs, temperature=1.0) > 0.1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.0, max_new_tokens=12),
        SamplingConfig(top_k=1, max_new_tokens=12),
        SamplingConfig(top_p=1e-6, max_new_tokens=12),
    ],
    ids=["temperature 0", "top_k 1", "tiny top_p"],
)
def test_greedy_takes_the_likeliest_token_and_keeps_full_log_probs(
    subject: Subject, models: Models, sampling: SamplingConfig
) -> None:
    outputs = subject.generate(ask(2), sampling)
    assert largest_difference(models[0], outputs) < 1e-4
    with torch.no_grad():
        for output in outputs:
            prompt = PROMPTS[output.group_id - 10]
            for response in output.responses:
                logits = models[0](torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 : -1]
                assert logits.argmax(-1).tolist() == response.tokens


def test_a_response_ends_with_an_end_token_or_at_the_limit(subject: Subject) -> None:
    outputs = subject.generate(ask(16), SamplingConfig(max_new_tokens=24))
    reasons = set()
    for response in (response for output in outputs for response in output.responses):
        reasons.add(response.finish_reason)
        ended = response.finish_reason is FinishReason.stop
        assert ended or (response.finish_reason is FinishReason.length and len(response.tokens) == 24)
        assert (response.tokens[-1] in END_TOKENS) is ended
        assert not set(response.tokens[:-1]) & set(END_TOKENS)
    assert reasons == {FinishReason.stop, FinishReason.length}


def test_every_end_token_of_the_folder_ends_a_response(subject: Subject) -> None:
    outputs = subject.generate(ask(64), SamplingConfig(max_new_tokens=16))
    last = {response.tokens[-1] for output in outputs for response in output.responses}
    assert set(END_TOKENS) <= last


def test_one_sample_and_no_request_are_fine(subject: Subject) -> None:
    assert [len(output.responses) for output in subject.generate(ask(1), SamplingConfig(max_new_tokens=2))] == [1] * 4
    assert subject.generate([], SamplingConfig(max_new_tokens=2)) == []


@pytest.mark.parametrize(
    ("prompt", "problem"), [([5, 64], "holds token 64"), ([-1], "holds token -1"), ([], "has no tokens")]
)
def test_a_prompt_that_the_model_cannot_read_is_refused(
    subject: Subject, models: Models, prompt: list[int], problem: str
) -> None:
    request = GenerateRequest(group_id=1, prompt_tokens=prompt, num_samples=1)
    with pytest.raises(EngineError, match=rf"engine \w+ 0: generate: the prompt of group 1 {problem}"):
        subject.generate([request], SamplingConfig(max_new_tokens=2))
    assert largest_difference(models[0], subject.generate(ask(1), SamplingConfig(max_new_tokens=4))) < 1e-4


def test_sleep_and_wake_change_nothing_on_a_cpu(subject: Subject, models: Models) -> None:
    subject.run(subject.engine.sleep())
    subject.run(subject.engine.wake_weights())
    assert largest_difference(models[0], subject.generate(ask(1), SamplingConfig(max_new_tokens=4))) < 1e-4
