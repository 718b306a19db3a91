"""Where prompts come from."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megappo.config.reward import RewardTerms

FILE_KINDS = ("jsonl", "parquet", "datasets")
"""Kinds of sources that read files."""


class BadRow(Enum):
    """What becomes of a row that cannot be used: broken, not UTF-8, without a prompt or an answer, refused by the chat
    template."""

    refuse = "refuse"
    """The run does not start; the message names file and line."""
    filter = "filter"
    """It is left out and counted by reason."""


class Duplicate(Enum):
    """What becomes of a row whose prompt an earlier row of the source has, too."""

    keep = "keep"
    """It stays; a note tells how many there are."""
    filter = "filter"
    refuse = "refuse"


class SharedPrompt(Enum):
    """What becomes of a validation prompt that is a training prompt, too: its answer may be learned by heart."""

    keep = "keep"
    """It stays; a note tells how many there are."""
    filter = "filter"
    """It is left out of the validation and counted. An evaluation without training reads the training prompts, too."""
    refuse = "refuse"


class TooLong(Enum):
    """What becomes of a prompt of more than `data.max_prompt_tokens` tokens."""

    filter = "filter"
    """It is left out and counted."""
    refuse = "refuse"


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """Where prompts come from."""

    kind: str = "jsonl"
    """Registry name (`megappo.data.SOURCES`): jsonl, parquet, datasets (a folder of Hugging Face's
    `Dataset.save_to_disk`), reasoning_gym, or `package.module:function`."""
    path: str | None = None
    """jsonl, parquet: file, glob, or URL of either for fsspec (`s3://bucket/*.parquet`); compressed by the ending of
    the name (.gz, .bz2, .xz; .zst with the package zstandard). datasets: the folder."""
    # Any: options of an fsspec file system, which checks them itself.
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Options of the file system of a URL, such as {anon: true}. Keys and passwords belong into the environment: the
    configuration is stored with the run."""
    split: str | None = None
    """datasets: which split, where the folder holds several."""
    prompt_column: str = "prompt"
    """Column of the prompt, text or messages; `a.b` reaches into a nested column."""
    answer_column: str | None = "answer"
    """Column of the ground truth, text or number; null: rows have none."""
    source_column: str | None = "data_source"
    """Column of the name under which metrics and rewards know a row's source. null, or a row without it: the name in
    `data.train_sources` or `data.validation_sets`, else the kind."""
    tools_column: str | None = "tools"
    """Column of tool schemas that the chat template shows, a list or JSON text; a row may have none. null: no row
    has."""
    extra_columns: list[str] | None = None
    """Columns that the reward sees, beside the answer, in `Sample.extra`; null: all that have no other use."""
    task: str | None = None
    """reasoning_gym: task name."""
    # Any: the parameters belong to the task, which checks them itself.
    params: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: parameters of the task. `package.module:function`: whatever it reads from them."""
    size: int | None = None
    """First rows taken, `skip` counted in (null: all of a file, 1000 of reasoning_gym)."""
    seed: int = 0
    """reasoning_gym: seed of the rows."""
    skip: int = 0
    """First rows left out (to keep validation rows apart from training rows)."""
    question_pattern: str | None = None
    """reasoning_gym: regular expression; its first group becomes the prompt (None: the whole question)."""
    rendered: bool = False
    """The prompts are texts that went through a chat template already: they are taken as they stand."""
    on_bad_row: BadRow = BadRow.refuse
    on_duplicate: Duplicate = Duplicate.keep
    weight: float = 1.0
    """Of several sources: this one's share of the prompts, relative to the other weights."""
    reward: RewardTerms | None = None
    """How answers to this source's prompts are scored; null: as `reward` says."""

    @property
    def place(self) -> str:
        """What is read, for messages."""
        return self.path or self.task or self.kind


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Training and validation prompts."""

    train: SourceConfig = field(default_factory=SourceConfig)
    """The training prompts, where there is one source."""
    train_sources: dict[str, SourceConfig] = field(default_factory=dict[str, SourceConfig])
    """Several sources of training prompts, by name, mixed by weight; `train` is then not read."""
    validation: SourceConfig | None = None
    """The validation prompts, where there is one set; null: none."""
    validation_sets: dict[str, SourceConfig] = field(default_factory=dict[str, SourceConfig])
    """Several validation sets, by name, each judged apart; `validation` is then not read."""
    on_shared: SharedPrompt = SharedPrompt.keep
    max_prompt_tokens: int = 1024
    """Most tokens of a prompt, chat template and generation prompt included."""
    on_too_long: TooLong = TooLong.filter
    chat_template: str | None = None
    """Chat template that takes the place of the tokenizer's: a file (ending in .jinja) or the text itself; empty: none,
    as with a base model. null: the tokenizer's."""
    curriculum: str | None = None
    """Class that chooses and orders the training prompts, `package.module:Class` (protocol:
    `megappo.data.curriculum.Curriculum`); null: every prompt once per pass."""
    # Any: the parameters belong to the class, which checks them itself.
    curriculum_params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    shuffle: bool = True
    """Draw the prompts of each pass in a new order; a curriculum has its own."""

    def training(self) -> dict[str, SourceConfig]:
        """Return the training sources by name; one alone is called ""."""
        return self.train_sources or {"": self.train}

    def validating(self) -> dict[str, SourceConfig]:
        """Return the validation sets by name; one alone is called ""."""
        return self.validation_sets or ({} if self.validation is None else {"": self.validation})

    def by_key(self) -> dict[str, SourceConfig]:
        """Return every source that is read, by its key: `data.train`, `data.validation_sets.NAME`."""
        return {training_key(name): source for name, source in self.training().items()} | {
            validation_key(name): source for name, source in self.validating().items()
        }


def training_key(name: str) -> str:
    """Return the key of a training source."""
    return f"data.train_sources.{name}" if name else "data.train"


def validation_key(name: str) -> str:
    """Return the key of a validation set."""
    return f"data.validation_sets.{name}" if name else "data.validation"
