"""Prompts and rewards."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Where prompts come from."""

    kind: str = "jsonl"
    """Registry name (`megappo.data.SOURCES`): jsonl, parquet, reasoning_gym, or `package.module:function`."""
    path: str | None = None
    """jsonl, parquet: file or glob."""
    prompt_column: str = "prompt"
    """jsonl, parquet: column of the prompt, text or messages; `a.b` reaches into a nested column."""
    answer_column: str | None = "answer"
    """jsonl, parquet: column of the ground truth, text or number; null: rows have none."""
    task: str | None = None
    """reasoning_gym: task name."""
    # Any: the parameters belong to the task, which checks them itself.
    params: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: parameters of the task."""
    size: int | None = None
    """First rows taken, `skip` counted in (null: all of a file, 1000 of reasoning_gym)."""
    seed: int = 0
    """reasoning_gym: seed of the rows."""
    skip: int = 0
    """First rows left out (to keep validation rows apart from training rows)."""
    question_pattern: str | None = None
    """Regular expression; its first group becomes the prompt (None: the whole question)."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training and validation prompts."""

    train: SourceConfig = field(default_factory=SourceConfig)
    validation: SourceConfig | None = None
    max_prompt_tokens: int = 1024
    """Longer prompts are filtered and counted."""
    shuffle: bool = True


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """How a response is scored."""

    name: str = "exact_match"
    """Registry name (`megappo.rewards.REWARDS`): exact_match, reasoning_gym, math_verify, model,
    or `package.module:name`."""
    workers: int = 1
    """Scoring processes."""
    timeout_s: float = 60.0
    """Longest wait for one scoring call."""
    model_path: str | None = None
    """model: Hugging Face folder of a sequence-classification model (its first label is the score)."""
    # Any: the parameters belong to the reward, which checks them itself.
    params: dict[str, Any] = field(default_factory=dict)
