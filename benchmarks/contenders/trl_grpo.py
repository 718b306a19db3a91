"""The peer: TRL's GRPOTrainer with transformers' generate, one process. Runs in the peer's environment.

usage: python -m benchmarks.contenders.trl_grpo CASE FOLDER STEPS
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders.turns import Turns
from benchmarks.contenders.workload import (
    CLIP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    PROMPTS,
    SAMPLES,
    SEED,
    WORKLOADS,
    Workload,
    even_share,
)

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402  the environment comes first
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Phases:
    """CPU seconds of this process in some methods of the trainer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, trainer: Any, method: str, phase: str) -> None:  # Any: methods of the peer
        """Count the time of a method."""
        inner: Callable[..., Any] = getattr(trainer, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start

        setattr(trainer, method, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        found, self.seconds = self.seconds, {}
        return found


class TurnTaking(TrainerCallback):
    """Waits before each step and tells of it after it."""

    def __init__(self, turns: Turns, phases: Phases) -> None:
        self._turns, self._phases = turns, phases
        self.tokens = 0
        self.responses = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._turns.wait()
        self._phases.take()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._turns.tell({"tokens": self.tokens, "response_tokens": self.responses, "phases": self._phases.take()})


def make_trainer(workload: Workload, folder: Path, steps: int) -> GRPOTrainer:
    """Return the trainer of the workload."""
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=workload.new_tokens,
        # The trainer's end token must not come before the last place.
        generation_kwargs={"min_new_tokens": workload.new_tokens} if workload.fixed_length else None,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        epsilon=CLIP,
        beta=0.0,
        loss_type="bnpo",  # mean over the tokens of the batch
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=SEED,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=_reward,
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        # By its class: for the model type of the folder the automatic choice is another one, which finds no tokens.
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [even_share(text) for text in completions]


def main() -> None:
    """Train the named steps, one per turn."""
    turns, phases = Turns(), Phases()
    torch.set_num_threads(1)
    trainer = make_trainer(WORKLOADS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
    phases.watch(trainer, "_generate", "generate")
    phases.watch(trainer, "_calculate_rewards", "score")
    callback = TurnTaking(turns, phases)
    inner = trainer._generate_and_score_completions

    def counted(*arguments: Any, **named: Any) -> Any:
        output = inner(*arguments, **named)
        callback.responses = int(output["completion_mask"].sum())
        callback.tokens = int(output["prompt_mask"].sum()) + callback.responses
        return output

    trainer._generate_and_score_completions = counted
    trainer.add_callback(callback)
    turns.tell({"parameters": sum(parameter.numel() for parameter in trainer.model.parameters())})
    trainer.train()
    turns.wait()  # the process is looked at before it ends


if __name__ == "__main__":
    main()
