"""Programs over the real engines: a single turn is what the engine answers, and the log-probs of many turns are those
of one pass over all tokens.

Tolerance 1e-4 on log-probs: float32 sums in another order differ by a few 1e-6.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.data.tokenizer import load_tokenizer
from megappo.rollout.agents import AGENTS
from megappo.rollout.agents.program import AgentResult, AgentSpec, AgentTask, Generate
from megappo.rollout.agents.runner import AgentRunner
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, SampledResponse
from tests.rollout.agents.conftest import Program, generate
from tests.rollout.conftest import END_TOKENS
from tests.rollout.subject import Subject

Models = tuple[PreTrainedModel, PreTrainedModel]
REQUESTS = [
    GenerateRequest(group_id=4, prompt_tokens=[5, 6, 7, 8, 9], num_samples=3),
    GenerateRequest(group_id=9, prompt_tokens=[20, 21], num_samples=2),
    GenerateRequest(group_id=11, prompt_tokens=[30, 31, 32], num_samples=1, greedy=True),
]


@pytest.fixture(autouse=True)
def first_weights(subject: Subject, folders: tuple[Path, Path]) -> None:
    """Undo what a test before this one did to the weights."""
    if subject.version:
        subject.hand_over(folders[0])


def run(subject: Subject, program: Any, sampling: SamplingConfig, requests: list[GenerateRequest]) -> list[GroupOutput]:
    """Answer with a program."""
    found: list[GroupOutput] = subject.run(
        generate(AgentRunner(subject.engine, program, RolloutConfig(agent="tests:Program")), requests, sampling, seed=3)
    )
    return found


def test_a_single_turn_is_what_the_engine_answers(subject: Subject, folders: tuple[Path, Path]) -> None:
    spec = AgentSpec(config=RolloutConfig(), tokenizer=load_tokenizer(str(folders[0])))
    # Only the transformers engine draws the same again.
    sampling = SamplingConfig(max_new_tokens=12, temperature=1.0 if subject.engine.at_once is None else 0.0)
    made = run(subject, AGENTS.get("single_turn")(spec), sampling, REQUESTS)
    direct = subject.generate(REQUESTS, sampling, seed=3)
    assert [group.policy_version for group in made] == [group.policy_version for group in direct]
    for group, expected in zip(made, direct, strict=True):
        for response, other in zip(group.responses, expected.responses, strict=True):
            assert (response.tokens, response.finish_reason) == (other.tokens, other.finish_reason)
            assert response.versions == other.versions and all(response.mask)
            if subject.engine.at_once is None:
                assert response.log_probs == other.log_probs
            assert response.log_probs == pytest.approx(other.log_probs, abs=1e-4)


async def three_turns(task: AgentTask, call: Generate) -> AgentResult:
    """Put two tokens behind each turn; the second is the end of a stop string that the model has not written."""
    tokens = list(task.prompt.tokens)
    for turn in range(3):
        tokens += (await call(tokens)).tokens
        tokens += [40 + task.number, 33 + turn]
    return AgentResult()


@torch.no_grad()
def log_probs_of(model: PreTrainedModel, prompt: list[int], response: SampledResponse) -> torch.Tensor:
    """Return the log-probs [tokens, V] before each token of a response, of one pass over everything."""
    logits = model(torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_log_probs_of_many_turns_are_those_of_one_pass(
    subject: Subject, models: Models, temperature: float
) -> None:
    sampling = SamplingConfig(max_new_tokens=60, temperature=temperature, stop_token_ids=[44, 50, 51, 52, 53, 54, 55])
    outputs = run(subject, Program(three_turns), sampling, REQUESTS)
    turns = 0
    for output, request in zip(outputs, REQUESTS):
        for sample, response in enumerate(output.responses):
            expected = log_probs_of(models[0], request.prompt_tokens, response)
            sampled = torch.tensor(response.mask)
            tokens = torch.tensor(response.tokens)
            drawn = expected.gather(-1, tokens[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.log_probs)[sampled], drawn[sampled], atol=1e-4, rtol=0)
            assert not torch.tensor(response.log_probs)[~sampled].any()
            if temperature == 0.0 or request.greedy:
                assert (expected.argmax(-1) == tokens)[sampled].all()
            assert tokens[~sampled].tolist() == [40 + sample, 33, 40 + sample, 34][: int((~sampled).sum())]
            turns += len(response.turns or [])
    assert turns > 6


def test_a_stop_string_that_the_model_has_only_read_ends_no_turn(subject: Subject, folders: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(str(folders[0]))
    text: Any = tokenizer.decode([50, 51])

    async def reads(task: AgentTask, call: Generate) -> AgentResult:
        sampled = await call(task.prompt.tokens)
        await call([*task.prompt.tokens, *sampled.tokens, 50, 51])
        return AgentResult()

    sampling = SamplingConfig(max_new_tokens=60, stop=[text, "never there"], stop_token_ids=list(range(20, 30)))
    requests = [GenerateRequest(group_id=group, prompt_tokens=[5 + group], num_samples=4) for group in range(4)]
    lengths: list[int] = []
    for output in run(subject, Program(reads), sampling, requests):
        for response in output.responses:
            assert response.turns is not None
            *_, last = response.turns
            own = response.tokens[response.call_start :]
            ends = own[-1] in [*END_TOKENS, *sampling.stop_token_ids] or own[-2:] == [50, 51]
            assert ends == (last.finish_reason is FinishReason.stop)
            lengths.append(last.sampled)
    assert max(lengths) > 1
