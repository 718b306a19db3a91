"""Supervised training: `megappo sft`, and what it shares with other commands that train on rows."""

from dataclasses import dataclass, field
from enum import Enum

from megappo.config.model import RandomModelConfig
from megappo.config.optim import OptimConfig


class OverLong(Enum):
    """What becomes of a row that has more tokens than `max_tokens`."""

    filter = "filter"
    """It is left out, and counted."""
    truncate = "truncate"
    """Its end is cut off, and it is counted; a row of which nothing to train on remains is left out."""


class TrainOn(Enum):
    """Which messages of a conversation the loss is on."""

    assistant = "assistant"
    """All of the assistant's."""
    last_assistant = "last_assistant"
    """The assistant's last one."""
    marked = "marked"
    """Those of the assistant's that have `"train": true`."""


@dataclass(kw_only=True, slots=True)
class SupervisedConfig:
    """A run of supervised training: how long, in which batches, what is measured and kept. Its checkpoints are as
    `checkpoint` says, and `trainer.resume` goes on from them. Frequencies are in steps."""

    output: str = "runs/sft"
    """Folder of the run; the result, a Hugging Face folder, is `<output>/model`."""
    epochs: int = 1
    """Passes over the rows when max_steps is null."""
    max_steps: int | None = None
    """Optimizer steps; null: epochs decide."""
    batch_size: int = 64
    """Rows per optimizer step; the last batches of an epoch may be smaller by a few."""
    batch_tokens: int | None = None
    """Instead of batch_size: most tokens per optimizer step, as many rows as fit; a longer row makes a step alone."""
    max_tokens: int | None = None
    """Most tokens of a row; null: no limit but the model's positions."""
    over_long: OverLong = OverLong.filter
    stop_loss: float | None = None
    """Stop once the running mean (0.9) of the loss falls below this."""
    test_freq: int = -1
    """Measure the loss on data.validation before the first step, every so many steps and at the end; -1: never."""
    save_freq: int = -1
    """Save a checkpoint every so many steps and at the end; -1: never."""
    tracked: bool = True
    """Use the trackers of `tracking`, too; metrics.jsonl is always written."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, warmup_steps=10))


@dataclass(kw_only=True, slots=True)
class SftConfig(SupervisedConfig):
    """`megappo sft`: cross-entropy on the answers of data.train, prompt/answer pairs or conversations."""

    random_model: RandomModelConfig | None = None
    """Start from random weights of this shape; None: start from model.path."""
    train_on: TrainOn = TrainOn.assistant
    """Conversations only: which messages the loss is on."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3, warmup_steps=10, weight_decay=0.01))
