"""The reward model that runs as workers, and its training on preference pairs."""

from dataclasses import dataclass, field

from megappo.config.lora import LoraConfig
from megappo.config.memory import OffloadConfig
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.supervised import SupervisedConfig


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """A reward model on Megatron workers: the one that a reward named `reward_model` asks, or that `megappo rm`
    trains. Its pool is cluster.reward, its type of numbers the policy's (model.dtype)."""

    path: str | None = None
    """Hugging Face folder. To score: a `...ForSequenceClassification` with one label. To train: that, or a language
    model, whose score head starts at zero (null: model.path)."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """What leaves device memory once the texts of a step are scored."""


@dataclass(kw_only=True, slots=True)
class RmConfig(SupervisedConfig):
    """`megappo rm`: trains the reward model on the preference pairs of data.train, judged on those of data.validation.
    A row is a pair: batch_size counts pairs, batch_tokens the tokens of both texts, max_tokens those of each."""

    output: str = "runs/rm"
    """Folder of the run; the result, a Hugging Face folder, is `<output>/model`."""
    chosen_column: str = "chosen"
    """Column of the preferred answer, text or messages; `a.b` reaches into a nested column."""
    rejected_column: str = "rejected"
    """Column of the other one."""
    prompt_column: str | None = None
    """Column of what both answer, text or messages; null: chosen and rejected are whole texts or conversations."""
    margin_column: str | None = None
    """Column of the number by which the preferred answer should score higher; null: 0."""
    lora: LoraConfig | None = None
    """Train adapters and the score head instead of all weights; the result has them merged."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, warmup_steps=10, weight_decay=0.01))
