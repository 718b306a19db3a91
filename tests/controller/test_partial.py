"""Over-sampling with early stop: more prompts under way than a step trains, unfinished ones go on in the next step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, DynamicSamplingConfig
from megappo.config.batching import BatchingConfig
from megappo.config.rollout import PartialConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.controller.ports import Draw, FinishedGroup
from megappo.controller.sampling import StepRollouts, StepSampler
from megappo.data.sampler import PromptSampler
from megappo.observability.metrics import values
from megappo.observability.timing import PhaseTimer
from megappo.rewards.types import Reward, Sample
from tests.controller.test_loop import PROMPTS, VOCAB, make_config, run
from tests.fakes.bigram_rollout import EOS, FakeRollout
from tests.fakes.one_process import FakeReward

TARGET, SAMPLES, LONGEST = 4, 2, 12


def config_of(seed: int, *, extra: int, sampling: DynamicSamplingConfig | None = None, steps: int = 1) -> RunConfig:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), sampling=sampling or DynamicSamplingConfig())
    batching = BatchingConfig(prompts_per_step=TARGET, samples_per_prompt=SAMPLES)
    config = replace(make_config(algorithm, steps=steps, batching=batching), seed=seed)
    config.rollout.sampling.max_new_tokens = LONGEST
    config.rollout.partial = PartialConfig(extra_prompts=extra)
    return config


def even_length(sample: Sample) -> Reward:
    return Reward(score=float(len(sample.response.split()) % 2))


@cache
def table_of(version: int, end: float) -> torch.Tensor:
    """Log-probs of a policy that ends with probability `end` at every token; versions differ in all the others."""
    table = torch.log_softmax(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(version)), dim=-1)
    table[:, EOS] = float(np.log(end))
    return torch.log_softmax(table, dim=-1)


@dataclass
class CountingRollout(FakeRollout):
    """Notes how many groups are wanted."""

    wanted: list[int | None] = field(default_factory=list)

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        self.wanted.append(wanted)
        return super().generate(draws, sampling, seed=seed, wanted=wanted)


@dataclass
class Sampled:
    """What some steps sampled; every step has other weights."""

    rollout: CountingRollout
    sampler: StepSampler
    steps: list[StepRollouts] = field(default_factory=list)
    answers: dict[int, tuple[int, list[int], list[float], list[int]]] = field(default_factory=dict)
    """Of what was trained: sequence id -> last prompt token, tokens, log-probs, the version of each token."""

    @property
    def numbers(self) -> list[dict[str, float]]:
        return [values(step.metrics) for step in self.steps]

    @property
    def trained(self) -> list[list[int]]:
        """Group ids per step."""
        return [sorted(step.train.scores_by_group()) for step in self.steps]


def sample_steps(config: RunConfig, *, steps: int, end: float = 0.2) -> Sampled:
    rollout = CountingRollout(table=table_of(0, end), version=0)
    prompts = PromptSampler(PROMPTS, batch_size=TARGET, seed=config.seed, shuffle=True)
    sampler = StepSampler(config, prompts=prompts, rollout=rollout, reward=FakeReward(even_length))
    found = Sampled(rollout, sampler)
    for step in range(1, steps + 1):
        found.steps.append(sampler.sample(step, PhaseTimer()))
        train = [info.sequence_id for info in found.steps[-1].train.sequences]
        for number in train:
            draw, answer = rollout.stored[number]
            found.answers[number] = (draw.prompt.tokens[-1], answer.tokens, answer.log_probs, answer.versions)
        rollout.pack([train], forget=found.steps[-1].forget)
        assert rollout.stored.keys() == set(sampler.carried_ids), "complete groups that wait, and no others"
        assert rollout.begun.keys() == set(sampler.unfinished_ids), "unfinished groups, and no others"
        rollout.table, rollout.version = table_of(step, end), step
    return found


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    extra=st.sampled_from([1, 2, 5, 20]),
    rounds=st.sampled_from([0, 60]),
    end=st.sampled_from([0.1, 0.5]),
)
def test_steps_are_full_and_nothing_is_lost_or_trained_twice(seed: int, extra: int, rounds: int, end: float) -> None:
    config = config_of(seed, extra=extra, sampling=DynamicSamplingConfig(max_rounds=rounds))
    found = sample_steps(config, steps=5, end=end)
    assert [len(groups) for groups in found.trained] == [TARGET] * 5
    assert all(len(step.train.sequences) == TARGET * SAMPLES for step in found.steps)
    trained = [group for groups in found.trained for group in groups]
    waiting = {number // SAMPLES for number in found.sampler.carried_ids}
    unfinished = {number // SAMPLES for number in found.sampler.unfinished_ids}
    dropped = {number // SAMPLES for step in found.steps for number in step.forget}
    parts = [*trained, *waiting, *unfinished, *dropped]
    position = found.sampler.position()
    assert sorted(parts) == list(range(position.next_group_id)), "every draw is in exactly one place"
    assert {draw.group_id for draw in position.open_draws} == waiting | unfinished
    assert bool(dropped) <= bool(rounds)
    assert all(step["rollout/partial/unfinished"] <= extra + TARGET for step in found.numbers)


def test_answers_go_on_with_their_tokens_log_probs_and_versions_and_what_is_left_of_their_length() -> None:
    found = sample_steps(config_of(3, extra=6), steps=8, end=0.12)
    several = 0
    for last, tokens, log_probs, versions in found.answers.values():
        assert versions == sorted(versions) and len(tokens) <= LONGEST
        assert tokens[-1] == EOS or len(tokens) == LONGEST
        assert EOS not in tokens[:-1]
        several += len(set(versions)) > 1
        for before, token, log_prob, version in zip([last, *tokens], tokens, log_probs, versions):
            assert log_prob == pytest.approx(float(table_of(version, 0.12)[before, token]), abs=1e-6)
    assert several > 0, "some answers were sampled by more than one version"
    infos = {info.sequence_id: info for step in found.steps for info in step.train.sequences}
    assert all(infos[number].policy_version == min(answer[3]) for number, answer in found.answers.items())


def test_a_step_ends_with_its_last_wanted_group_and_not_with_the_slowest() -> None:
    patient, eager = (sample_steps(config_of(3, extra=extra), steps=6, end=0.12) for extra in (0, 6))
    assert "rollout/partial/unfinished" not in patient.numbers[0] and patient.rollout.begun == {}
    assert eager.numbers[0]["rollout/response_tokens/max"] < LONGEST
    assert patient.numbers[0]["rollout/response_tokens/max"] == LONGEST
    assert sum(step["rollout/partial/continued"] for step in eager.numbers) > 0


def test_the_metrics_show_that_who_finishes_first_is_short() -> None:
    numbers = sample_steps(config_of(3, extra=6), steps=20, end=0.12).numbers
    first, continued = (
        np.mean([step[name] for step in numbers if name in step])
        for name in (
            "rollout/partial/first_response_tokens/mean",
            "rollout/partial/continued_response_tokens/mean",
        )
    )
    assert first < continued
    assert "rollout/partial/continued_response_tokens/mean" not in numbers[0], "nothing was begun before"


def test_groups_beyond_those_wanted_wait_and_the_next_step_needs_fewer() -> None:
    found = sample_steps(config_of(0, extra=3), steps=6, end=0.9)  # most groups end in the same moment
    carried = [round(step["rollout/groups_carried"]) for step in found.numbers]
    assert max(carried) > 0
    assert found.rollout.wanted == [TARGET, *(TARGET - count for count in carried[:-1] if count < TARGET)]


def test_the_lag_counts_what_older_weights_sampled(tmp_path: Path) -> None:
    config = config_of(1, extra=6, steps=8)
    _, steps = run(config, tmp_path / "synchronous")
    lags = [step["rollout/policy_lag/max"] for step in steps]
    assert lags[0] == 0 and max(lags) >= 1
    assert all(0 <= step["rollout/policy_lag/mean"] <= step["rollout/policy_lag/max"] for step in steps)
    assert {step["rollout/sequences"] for step in steps} == {TARGET * SAMPLES}
    ahead = replace(config, controller=ControllerKind.one_step_off)
    _, steps = run(ahead, tmp_path / "ahead")
    assert max(step["rollout/policy_lag/max"] for step in steps) >= 2, "one version for the order, more for going on"
    assert {step["rollout/sequences"] for step in steps} == {TARGET * SAMPLES}


def test_another_sampler_goes_on_with_the_tokens_that_were_begun() -> None:
    config = config_of(3, extra=6)
    found = sample_steps(config, steps=3, end=0.12)
    state = found.sampler.state()
    held = found.rollout.read([*found.sampler.carried_ids, *found.sampler.unfinished_ids])
    assert state.position.open_draws and held.begun.num_tokens > 0
    rollout = FakeRollout(table=table_of(3, 0.12), version=3)
    rollout.adopt(held)
    prompts = PromptSampler(PROMPTS, batch_size=TARGET, seed=config.seed, shuffle=True)
    resumed = StepSampler(config, prompts=prompts, rollout=rollout, reward=FakeReward(even_length))
    resumed.restore(state)
    assert resumed.state() == state
    expected, sampled = (sampler.sample(4, PhaseTimer()) for sampler in (found.sampler, resumed))
    assert sampled.train == expected.train and sampled.forget == expected.forget
    assert {name: stat for name, stat in sampled.metrics.items() if not name.startswith("timing/")} == {
        name: stat for name, stat in expected.metrics.items() if not name.startswith("timing/")
    }
    ids = [info.sequence_id for info in expected.train.sequences]
    whole, again = (part.read(ids).complete for part in (found.rollout, rollout))
    for name in ("tokens", "rollout_log_probs", "sequence_ids"):
        assert np.array_equal(getattr(whole, name), getattr(again, name))
