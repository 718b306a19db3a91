"""The whole loop in one process: learning, order of calls, invariance to layout, validation, checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.algo.advantages import needs_values
from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import TOKENS
from megappo.checkpoint.health import checkpoint_to_resume
from megappo.checkpoint.store import CheckpointStore
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, KLConfig, KLController, KLInRewardConfig
from megappo.config.batching import BatchingConfig
from megappo.config.memory import RecomputeConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import TrainerConfig
from megappo.controller.evaluate import Evaluation
from megappo.controller.loop import PPOController
from megappo.controller.rollouts import draw_prompts
from megappo.controller.state import DrawIds
from megappo.controller.step import Components, StepResult
from megappo.controller.throughput import ModelThroughput, StepThroughput
from megappo.data.sampler import PromptSampler
from megappo.data.types import Prompt
from megappo.observability.flops import ModelFlops
from megappo.observability.metrics import values
from megappo.observability.run_directory import RunDirectory
from megappo.rewards.types import Reward, Sample
from tests.fakes.bigram_rollout import EOS, FakeRollout
from tests.fakes.one_process import FakeActor, FakeCritic, FakeReward, FakeWeightSync

VOCAB = 6
PROMPTS = [
    Prompt(row=row, text=str(row), tokens=[1 + row % 5, 1 + row % 3], answer=None, source="x") for row in range(12)
]

BIGRAM = ModelThroughput(
    flops=ModelFlops(num_layers=1, projections=10, dense=20, experts=0, per_pair=2, per_prediction=7),
    peak=None,
    num_devices=2,
    recompute=RecomputeConfig(),
    chunks=1,
)
THROUGHPUT = StepThroughput(actor=BIGRAM, critic=BIGRAM, num_devices=4)


def share_of_threes(sample: Sample) -> Reward:
    tokens = [int(token) for token in sample.response.split()]
    return Reward(score=float(np.mean([token == 3 for token in tokens])), parts={"threes": float(tokens.count(3))})


class Recorder:
    """Keeps what the loop tells."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[tuple[int, float]] = []
        self.saved: list[Path] = []
        self.problems: list[str] = []
        self.started: tuple[int, Path | None] = (-1, None)

    def on_phase(self, text: str) -> None: ...

    def on_problem(self, text: str) -> None:
        self.problems.append(text)

    def on_start(self, step: int, checkpoint: Path | None) -> bool:
        self.started = (step, checkpoint)
        return True

    def on_step(self, step: int, total_steps: int, result: StepResult) -> None:
        self.steps.append(values(result.metrics))

    def on_answered(self, done: int, expected: int) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation) -> None:
        self.validations.append((step, values(evaluation.metrics)["val/reward/mean"]))

    def on_checkpoint(self, folder: Path) -> None:
        self.saved.append(folder)


def make_config(algorithm: AlgorithmConfig, *, steps: int, batching: BatchingConfig | None = None) -> RunConfig:
    sampling = SamplingConfig(max_new_tokens=6)
    return RunConfig(
        algorithm=algorithm,
        batching=batching or BatchingConfig(prompts_per_step=4, samples_per_prompt=4, ppo_epochs=2),
        rollout=RolloutConfig(sampling=sampling, validation=replace(sampling, temperature=0.0)),
        trainer=TrainerConfig(total_steps=steps),
    )


def make_controller(
    config: RunConfig,
    tmp_path: Path,
    *,
    data: int = 1,
    critic_data: int = 1,
    lr: float = 3.0,
    prompts: list[Prompt] = PROMPTS,
    **more: Any,
) -> tuple[PPOController, Recorder]:
    """Return a loop over the fakes; it resumes as trainer.resume says. `more`: arguments of PPOController."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 0.5
    actor = FakeActor(table, data=data, lr=lr, algorithm=config.algorithm)
    critic = None
    if needs_values(config.algorithm):
        critic = FakeCritic(torch.zeros(VOCAB), data=critic_data, lr=lr, algorithm=config.algorithm)
    rollout = FakeRollout(table=torch.zeros(VOCAB, VOCAB))
    parts = Components(
        config=config,
        sampler=PromptSampler(prompts, batch_size=config.batching.prompts_per_step, seed=0, shuffle=True),
        rollout=rollout,
        reward=FakeReward(share_of_threes),
        actor=actor,
        critic=critic,
        weight_sync=FakeWeightSync(actor=actor, rollout=rollout, pause=config.weight_sync.pause),
        kl_coefficient=KLCoefficient(config.algorithm.kl.in_reward),
        workload=TOKENS,
        throughput=THROUGHPUT,
    )
    recorder = Recorder()
    directory = RunDirectory(path=tmp_path)
    CheckpointStore(directory.checkpoints).clean()
    found = checkpoint_to_resume(config.trainer.resume, directory.checkpoints, config.checkpoint.on_damaged)
    controller = PPOController(
        parts,
        directory=directory,
        resume_from=None if found is None else found.folder,
        **{"observer": recorder, "validation": {"": PROMPTS[:3]}, **more},
    )
    return controller, recorder


def run(config: RunConfig, tmp_path: Path, **layout: int) -> tuple[PPOController, list[dict[str, float]]]:
    controller, recorder = make_controller(config, tmp_path, **layout)
    controller.prepare()
    controller.fit()
    return controller, recorder.steps


def grpo() -> AlgorithmConfig:
    return AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))


def ppo_with_kl() -> AlgorithmConfig:
    kl = KLConfig(in_reward=KLInRewardConfig(coef=0.05, controller=KLController.adaptive, target=0.01, horizon=1000))
    return AlgorithmConfig(advantage=AdvantageConfig(name="gae"), kl=kl)


@pytest.mark.parametrize("algorithm", [grpo(), ppo_with_kl()], ids=["grpo", "ppo"])
def test_the_reward_rises(algorithm: AlgorithmConfig, tmp_path: Path) -> None:
    _, steps = run(make_config(algorithm, steps=30), tmp_path)
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus"])
def test_other_registered_estimators_learn_too(name: str, tmp_path: Path) -> None:
    _, steps = run(make_config(AlgorithmConfig(advantage=AdvantageConfig(name=name)), steps=30), tmp_path)
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


def test_a_step_goes_through_its_hops_in_order(tmp_path: Path) -> None:
    controller, _ = run(make_config(grpo(), steps=2), tmp_path)
    hops = ["generate", "pack", "sleep", "wake_weights", "push", "wake_cache"]
    assert controller.parts.rollout.calls == ["push", *hops, *hops]  # type: ignore[attr-defined]


def test_trainers_leave_the_device_for_engines_and_for_each_other(tmp_path: Path) -> None:
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="gae")), steps=1)
    config.batching.ppo_epochs = 2  # so that old log-probs are recomputed
    controller, _ = run(config, tmp_path)
    hand_over = ["offload all but weights", "push", "offload"]
    actor, critic = controller.parts.actor, controller.parts.critic
    assert actor.phases == [*hand_over, "log-probs", "offload", "update", *hand_over]  # type: ignore[attr-defined]
    assert critic.phases == ["offload", "values", "update", "offload", "offload"]  # type: ignore[union-attr]


def test_every_rollout_carries_the_version_pushed_before_it(tmp_path: Path) -> None:
    _, steps = run(make_config(grpo(), steps=3), tmp_path)
    assert [step["rollout/policy_version/min"] for step in steps] == [0, 1, 2]
    assert [step["weights/version"] for step in steps] == [1, 2, 3]


def test_on_policy_rollouts_have_the_log_probs_of_the_trainer(tmp_path: Path) -> None:
    _, steps = run(make_config(grpo(), steps=5), tmp_path)
    assert max(step["actor/rollout_log_prob_diff/max"] for step in steps) < 1e-6


def numbers(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Metrics that must not depend on the layout."""
    skipped = ("timing/", "perf/", "schedule/")
    return {name: [step[name] for step in steps] for name in steps[0] if not name.startswith(skipped)}


@pytest.mark.parametrize(
    ("data", "critic_data", "batching"),
    [
        (2, 1, {}),
        (2, 4, {}),
        (3, 2, {"micro_batch_tokens": 16}),
        (1, 1, {"micro_batch_tokens": 12}),
        (4, 4, {"balance": False}),
        (2, 2, {"min_micro_batches": 5}),
    ],
)
@pytest.mark.parametrize("algorithm", [grpo(), ppo_with_kl()], ids=["grpo", "ppo"])
def test_layout_balancing_and_micro_batches_never_change_a_number(
    algorithm: AlgorithmConfig, data: int, critic_data: int, batching: dict[str, int], tmp_path: Path
) -> None:
    base = BatchingConfig(prompts_per_step=4, samples_per_prompt=4, ppo_epochs=2, mini_batch_prompts=2)
    _, one = run(make_config(algorithm, steps=3, batching=base), tmp_path)
    _, other = run(
        make_config(algorithm, steps=3, batching=replace(base, **batching)),
        tmp_path,
        data=data,
        critic_data=critic_data,
    )
    expected, found = numbers(one), numbers(other)
    assert found.keys() == expected.keys()
    for name, series in expected.items():
        assert found[name] == pytest.approx(series, rel=1e-5, abs=1e-6), name


def test_scores_are_bitwise_the_same_with_balancing_on_and_off(tmp_path: Path) -> None:
    batching = BatchingConfig(prompts_per_step=4, samples_per_prompt=4)
    results = []
    for balance in (True, False):
        config = make_config(grpo(), steps=1, batching=replace(batching, balance=balance))
        _, steps = run(config, tmp_path, data=2)
        results.append([steps[0][f"actor/advantages/{stat}"] for stat in ("max", "min")] + [steps[0]["reward/mean"]])
    assert results[0] == results[1]


def test_the_actor_rests_while_the_critic_warms_up_and_the_weights_are_still_pushed(tmp_path: Path) -> None:
    config = make_config(ppo_with_kl(), steps=4)
    config.trainer.critic_warmup = 3
    controller, steps = run(config, tmp_path)
    assert controller.parts.actor.updates == 1  # type: ignore[attr-defined]
    assert controller.parts.critic.updates == 4  # type: ignore[union-attr]
    assert controller.parts.rollout.version == 4  # type: ignore[attr-defined]
    assert "actor/ratio/mean" not in steps[2] and "actor/ratio/mean" in steps[3]


def test_the_adaptive_coefficient_moves_by_the_measured_kl(tmp_path: Path) -> None:
    _, steps = run(make_config(ppo_with_kl(), steps=3), tmp_path)
    coefficient = 0.05
    for step in steps:
        assert step["kl/in_reward/coef"] == pytest.approx(coefficient, rel=1e-9)
        error = np.clip(step["kl/in_reward/mean"] / 0.01 - 1, -0.2, 0.2)
        coefficient *= 1 + error * 16 / 1000


def test_validation_runs_when_due_and_leaves_the_training_draws_alone(tmp_path: Path) -> None:
    _, plain = run(make_config(grpo(), steps=4), tmp_path)
    config = make_config(grpo(), steps=4)
    config.trainer.test_freq, config.trainer.val_before_train = 3, True
    controller, recorder = make_controller(config, tmp_path)
    controller.prepare()
    controller.fit()
    assert [step for step, _ in recorder.validations] == [0, 3, 4]
    assert [step["reward/mean"] for step in recorder.steps] == [step["reward/mean"] for step in plain]


def test_epochs_decide_the_length_when_total_steps_is_null(tmp_path: Path) -> None:
    config = make_config(grpo(), steps=1)
    config.trainer.total_steps, config.trainer.total_epochs = None, 2
    controller, _ = make_controller(config, tmp_path)
    assert controller.total_steps == 6  # 12 prompts, 4 a step, 2 epochs


def test_the_end_token_is_part_of_the_response() -> None:
    assert EOS == 0
    rollout = FakeRollout(table=torch.tensor([[99.0, 0, 0]] * 3), version=0)
    (group,) = rollout.generate(draw_prompts(PROMPTS[:1], DrawIds(), num_samples=1), SamplingConfig(), seed=0)
    assert (group.sequences[0].response_tokens, group.sequences[0].finish_reason) == (1, "stop")
