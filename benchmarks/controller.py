"""The controller's own CPU seconds of a step of 32,768 sequences, against a step of GPUs.

Run by `make bench NAME=controller`; see benchmarks/README.md. The loop, its hops and the algorithms are those of a run;
fakes stand behind the ports (`benchmarks/control/fakes.py`).
"""

import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.control.fakes import (
    FakeCoinReward,
    FakeMetadataRollout,
    FakeTotalsActor,
    FakeTotalsCritic,
    FakeWeightSync,
    RecordingObserver,
    StepSize,
)
from benchmarks.control.part_clock import PartClock
from benchmarks.harness import Case, Goal, run_program
from benchmarks.training.model_presets import PRESETS
from benchmarks.training.workload import LengthDistribution
from megappo.algo.advantages import needs_values
from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import workload_of_model
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig
from megappo.config.batching import BatchingConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import TrainerConfig
from megappo.controller.loop import PPOController
from megappo.controller.step import Components
from megappo.controller.throughput import StepThroughput, make_throughput
from megappo.data.sampler import PromptSampler
from megappo.data.types import Prompt
from megappo.observability.run_directory import RunDirectory

MODEL = "qwen3_30b_a3b"
DEVICES = 512
TOKENS_PER_S = 1102.0
"""Per H100, of Qwen3-30B-A3B trained on-policy with GRPO, as NeMo-RL publishes it for 32 of them."""
STEPS = 4
"""The first one warms up."""
SAMPLES = 8
MEAN_PROMPT, MEAN_RESPONSE, LONGEST = 340.0, 3070.0, 16384


def make_grpo(quick: bool) -> Case:
    """Advantages from scores and groups, which the controller computes."""
    return _make("grpo", AdvantageConfig(name="grpo"), quick)


def make_ppo(quick: bool) -> Case:
    """With a critic; advantages are computed beside the tokens."""
    return _make("ppo", AdvantageConfig(name="gae"), quick)


def _make(key: str, advantage: AdvantageConfig, quick: bool) -> Case:
    prompts, ranks, engines = (64, 8, 4) if quick else (4096, 128, 64)
    config = RunConfig(
        algorithm=AlgorithmConfig(advantage=advantage),
        batching=BatchingConfig(
            prompts_per_step=prompts,
            samples_per_prompt=SAMPLES,
            mini_batch_prompts=prompts // 4,
            micro_batch_tokens=LONGEST + 1024,
        ),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=LONGEST)),
        trainer=TrainerConfig(total_steps=STEPS),
    )
    size = draw_size(prompts, engines=engines)
    tokens = int(SAMPLES * size.prompt_lengths.sum() + size.response_lengths.sum())
    step_s = tokens / (DEVICES * TOKENS_PER_S)
    return Case(
        key=key,
        question="CPU seconds of the controller in one step, and their share of a step of GPUs",
        sizes={
            "sequences": prompts * SAMPLES,
            "tokens": tokens,
            "data-parallel ranks": ranks,
            "engines": engines,
            "mini-batches": 4,
            "model": MODEL,
            "step": f"{step_s:.0f} s: all tokens at {TOKENS_PER_S:g} tokens/s on each of {DEVICES} H100",
            "seed": 0,
        },
        contenders=[],
        goals=[Goal(figure="share of the step", at_most=0.01)],
        quantities=partial(_figures, config, size, ranks=ranks, step_s=step_s),
    )


def draw_size(prompts: int, *, engines: int) -> StepSize:
    """Return log-normal lengths."""
    asked = LengthDistribution(mean=MEAN_PROMPT, spread=0.5, longest=1024, prompt_share=0).draw(prompts, seed=1)
    answered = LengthDistribution(mean=MEAN_RESPONSE, spread=0.9, longest=LONGEST, prompt_share=0)
    lengths = answered.draw(prompts * SAMPLES, seed=0).reshape(prompts, SAMPLES)
    return StepSize(prompt_lengths=asked, response_lengths=lengths, engines=engines, at_once=256)


def _figures(
    config: RunConfig, size: StepSize, _: Mapping[str, object], *, ranks: int, step_s: float
) -> dict[str, float]:
    """Run the loop; returns medians over its steps."""
    steps = measure_steps(config, size, ranks=ranks)
    parts = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
    whole = statistics.median(sum(step.values()) for step in steps)
    return {
        "controller, CPU s": whole,
        "share of the step": whole / step_s,
        "devices at which it were 1 %": DEVICES * 0.01 * step_s / whole,
        **{f"{part}, CPU s": seconds for part, seconds in sorted(parts.items(), key=lambda item: -item[1])},
    }


def measure_steps(config: RunConfig, size: StepSize, *, ranks: int) -> list[dict[str, float]]:
    """Return the CPU seconds of the controller's parts in every step but the first."""
    clock, algorithm = PartClock(), config.algorithm
    model = PRESETS[MODEL]
    with tempfile.TemporaryDirectory() as folder:
        rates = {
            role: make_throughput(config, role=role, model=model, num_devices=DEVICES, device_name=None)
            for role in ("actor", "critic")
        }
        parts = Components(
            config=config,
            sampler=PromptSampler(_prompts(size), batch_size=len(size.prompt_lengths), seed=0, shuffle=True),
            rollout=FakeMetadataRollout(clock, size),  # type: ignore[arg-type]  # the methods that a step calls
            reward=FakeCoinReward(clock),
            actor=FakeTotalsActor(clock, data=ranks, algorithm=algorithm),  # type: ignore[arg-type]  # likewise
            critic=FakeTotalsCritic(clock, data=ranks, algorithm=algorithm) if needs_values(algorithm) else None,  # type: ignore[arg-type]
            weight_sync=FakeWeightSync(clock),
            kl_coefficient=KLCoefficient(algorithm.kl.in_reward),
            workload=workload_of_model(model),
            throughput=StepThroughput(actor=rates["actor"], critic=rates["critic"], num_devices=DEVICES),
        )
        observer = RecordingObserver(clock, Path(folder))
        directory = RunDirectory(path=Path(folder))
        controller = PPOController(parts, validation={}, directory=directory, observer=observer)
        controller.prepare()
        controller.fit()
    return observer.steps[1:]


def _prompts(size: StepSize) -> list[Prompt]:
    random = np.random.default_rng(2)
    return [
        Prompt(row=row, text="", tokens=random.integers(0, 150000, length).tolist(), answer=None, source="random")
        for row, length in enumerate(size.prompt_lengths.tolist())
    ]


def main() -> None:
    """Measure the chosen cases."""
    run_program("controller", {"grpo": make_grpo, "ppo": make_ppo}, packages=["numpy"], pinned=True)


if __name__ == "__main__":
    main()
