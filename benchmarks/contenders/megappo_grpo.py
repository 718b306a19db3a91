"""megappo: driver, one training process, one engine and one scoring process, as `megappo train` starts them.

usage: python -m benchmarks.contenders.megappo_grpo CASE FOLDER STEPS ENGINE
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders.turns import Turns
from benchmarks.contenders.workload import (
    CLIP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLES,
    WORKLOADS,
    Workload,
)
from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import workload_of_model
from megappo.cli.rewards import rewards_can_be_made
from megappo.cli.run_data import make_data
from megappo.cli.settled import settled_for_workers
from megappo.cluster.session import Session
from megappo.config.rules import check_config, check_files
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.controller.evaluate import Evaluation
from megappo.controller.loop import PPOController
from megappo.controller.step import Components, StepResult
from megappo.controller.throughput import StepThroughput, make_throughput
from megappo.device.backend import CPU
from megappo.models.architecture import read_config
from megappo.observability.console import RunConsole
from megappo.observability.metrics import values
from megappo.observability.run_directory import RunDirectory

_MICRO_BATCH_TOKENS = 16384


def make_config(workload: Workload, folder: Path, *, steps: int, engine: str) -> RunConfig:
    """Return the checked configuration of the workload."""
    return load_run_config(
        [
            "model=float32",
            "algorithm=grpo",
            f"rollout={engine}",
            "cluster.pools={main: 1}",
            f"model.path='{folder}'",
            f"data.train.path='{folder / 'prompts.jsonl'}'",
            "data.train.answer_column=null",
            "data.train.rendered=true",
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            "reward.name=benchmarks.contenders.even_share:score",
            f"actor.optim.lr={LEARNING_RATE}",
            f"actor.optim.clip_grad={MAX_GRAD_NORM}",
            f"algorithm.policy_loss.clip.low={CLIP}",
            f"algorithm.policy_loss.clip.high={CLIP}",
            f"batching.prompts_per_step={PROMPTS}",
            f"batching.samples_per_prompt={SAMPLES}",
            f"batching.micro_batch_tokens={_MICRO_BATCH_TOKENS}",
            f"rollout.sampling.max_new_tokens={workload.new_tokens}",
            f"rollout.validation.max_new_tokens={workload.new_tokens}",
            f"rollout.sglang.max_total_tokens={PROMPTS * SAMPLES * (PROMPT_TOKENS + workload.new_tokens)}",
            f"trainer.total_steps={steps}",
        ],
        rules=(check_config, check_files, rewards_can_be_made),
    )


@dataclass
class TurnTaking:
    """The observer of the loop: tells of each step, and waits before the next one."""

    turns: Turns

    def on_phase(self, text: str) -> None:
        print(text, file=sys.stderr)

    def on_problem(self, text: str) -> None:
        print(text, file=sys.stderr)

    def on_start(self, step: int, checkpoint: Path | None) -> bool:
        return True

    def on_step(self, step: int, total_steps: int, result: StepResult) -> None:
        found = values(result.metrics)
        self.turns.tell(
            {
                "tokens": int(result.rollouts.lengths.sum()),
                "response_tokens": int(result.rollouts.response_lengths.sum()),
                "difference": found["actor/rollout_log_prob_diff/max"],
                "wall": {name: value for name, value in found.items() if name.startswith("timing/")},
            }
        )
        if step < total_steps:
            self.turns.wait()

    def on_answered(self, done: int, expected: int) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation) -> None: ...

    def on_checkpoint(self, folder: Path) -> None: ...


def main() -> None:
    """Train the named steps, one per turn."""
    turns = Turns()
    case, folder, steps, engine = sys.argv[1:]
    config = settled_for_workers(
        make_config(WORKLOADS[case], Path(folder).resolve(), steps=int(steps), engine=engine), CPU
    )
    directory = RunDirectory(path=Path(folder).resolve() / f"megappo-{engine}")
    directory.logs.mkdir(parents=True, exist_ok=True)
    observer = TurnTaking(turns)
    with RunConsole() as console:
        sampler = make_data(config, console).sampler
    with Session(config, backend=CPU, log_dir=directory.logs, report=observer.on_phase) as session:
        session.start_training()
        model = read_config(Path(config.model.path))
        throughput = make_throughput(config, role="actor", model=model, num_devices=1, device_name=None)
        parts = Components(
            config=config,
            sampler=sampler,
            rollout=session.rollout,
            reward=session.reward,
            actor=session.actor,
            critic=None,
            weight_sync=session.weight_sync,
            kl_coefficient=KLCoefficient(config.algorithm.kl.in_reward),
            workload=workload_of_model(model),
            throughput=StepThroughput(actor=throughput, critic=None, num_devices=1),
        )
        controller = PPOController(parts, validation={}, directory=directory, observer=observer)
        controller.prepare()
        turns.tell({})
        turns.wait()
        controller.fit()
        turns.wait()  # the processes are looked at before they end


if __name__ == "__main__":
    main()
