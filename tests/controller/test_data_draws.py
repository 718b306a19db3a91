"""Steps that draw from a mixture with a curriculum: what it is told, and that a resumed run draws the same."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig
from megappo.config.batching import BatchingConfig
from megappo.config.run import RunConfig
from megappo.controller.rollouts import join
from megappo.controller.sampling import SamplerState, StepSampler
from megappo.controller.state import DrawPosition, OpenDraw
from megappo.data.curriculum import CurriculumError
from megappo.data.mixture import PromptMixture, WeightedPrompts
from megappo.data.types import Prompt
from megappo.observability.metrics import values
from megappo.observability.timing import PhaseTimer
from megappo.rewards.types import Reward, Sample
from tests.controller.test_loop import PROMPTS, VOCAB, make_config
from tests.fakes.bigram_rollout import FakeRollout
from tests.fakes.one_process import FakeReward

TARGET, SAMPLES = 4, 2


class LowestFirst:
    """Rounds of three prompts: those with the lowest scores so far."""

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.seen: list[tuple[list[int], list[list[float]]]] = []

    def order(self, number: int, prompts: Sequence[Prompt]) -> list[int]:
        return sorted(range(len(prompts)), key=lambda index: (self.scores.get(str(index), 0.0), index))[:3]

    def observe(self, indices: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        self.seen.append((list(indices), [list(found) for found in scores]))
        self.scores |= {str(index): sum(found) for index, found in zip(indices, scores)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scores)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = dict(state)


def config_of() -> RunConfig:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))
    batching = BatchingConfig(prompts_per_step=TARGET, samples_per_prompt=SAMPLES)
    return make_config(algorithm, steps=1, batching=batching)


def sampler_of(curricula: dict[str, LowestFirst]) -> StepSampler:
    sources = {
        name: WeightedPrompts(
            prompts=[replace(prompt, origin=name) for prompt in PROMPTS], weight=weight, curriculum=curricula[name]
        )
        for name, weight in {"a": 3.0, "b": 1.0}.items()
    }
    mixture = PromptMixture(sources, batch_size=TARGET, seed=0, shuffle=True)
    table = torch.full((VOCAB, VOCAB), -float(np.log(VOCAB)))
    rollout = FakeRollout(table=table, version=0)
    return StepSampler(config_of(), prompts=mixture, rollout=rollout, reward=FakeReward(first_token))


def first_token(sample: Sample) -> Reward:
    return Reward(score=float(sample.response.split()[0]))


def steps(sampler: StepSampler, numbers: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Sample some steps; returns row and score of every sequence, by step."""
    found: list[list[tuple[int, float]]] = []
    for number in numbers:
        train = sampler.sample(number, PhaseTimer()).train
        found.append([(info.row, reward.score) for info, reward in zip(train.sequences, train.rewards)])
    return found


def test_a_curriculum_is_told_the_scores_of_its_own_prompts() -> None:
    curricula = {"a": LowestFirst(), "b": LowestFirst()}
    timer = PhaseTimer()
    sampled = sampler_of(curricula).sample(1, timer)
    told = [pair for one in curricula.values() for pair in zip(*one.seen[0])]
    assert {name: len(one.seen[0][0]) for name, one in curricula.items()} == {"a": 3, "b": 1}
    assert sorted(scores for _, scores in told) == sorted(sampled.train.scores_by_group().values())
    assert values(sampled.metrics)["data/epoch/a"] == 3 / len(PROMPTS)
    assert timer.seconds("draw") > 0


def test_a_resumed_run_draws_what_would_have_followed() -> None:
    sampler = sampler_of({"a": LowestFirst(), "b": LowestFirst()})
    steps(sampler, [1, 2])
    stored = json.loads(json.dumps(asdict(sampler.position())))
    position = DrawPosition(**(stored | {"open_draws": [OpenDraw(**draw) for draw in stored["open_draws"]]}))
    resumed = sampler_of({"a": LowestFirst(), "b": LowestFirst()})
    resumed.restore(SamplerState(position=position, carried=join([])))
    assert steps(resumed, range(3, 8)) == steps(sampler, range(3, 8))


def test_an_error_of_a_curriculum_names_the_step() -> None:
    class Forgetful(LowestFirst):
        def observe(self, indices: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
            raise KeyError("levels")

    with pytest.raises(CurriculumError, match=r"^step 3: data\.curriculum: .*Forgetful\.observe\(.* raised KeyError"):
        steps(sampler_of({"a": LowestFirst(), "b": Forgetful()}), [3])


def test_an_open_draw_finds_its_prompt_among_equal_rows_of_other_sources() -> None:
    sampler = sampler_of({"a": LowestFirst(), "b": LowestFirst()})
    position = replace(
        sampler.position(),
        open_draws=[OpenDraw(row=0, origin=name, group_id=at, sequence_ids=[at]) for at, name in enumerate("ba")],
    )
    sampler.restore(SamplerState(position=position, carried=join([])))
    assert [(draw.row, draw.origin) for draw in sampler.position().open_draws] == [(0, "b"), (0, "a")]
