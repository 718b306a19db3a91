"""The prompts of `megappo train`, and the faults in data and reward that can be seen before Ray starts."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from megappo.config.data import SourceConfig
from megappo.config.run import RunConfig
from megappo.data.prompts import load_prompts
from megappo.data.sampler import PromptSampler
from megappo.data.tokenizer import load_tokenizer
from megappo.data.types import Prompt
from megappo.observability.console import RunConsole
from megappo.rewards import make_reward


class RunData(NamedTuple):
    """The prompts of a run, and what turns tokens into text."""

    sampler: PromptSampler
    validation: list[Prompt]
    tokenizer: PreTrainedTokenizerBase


def make_data(config: RunConfig, console: RunConsole) -> RunData:
    """Return the training sampler and the validation prompts; makes the reward once, so that its faults show here.

    Raises:
        DataError: prompts, tokenizer or reward cannot be used.
    """
    if config.reward.name != "model":
        make_reward(config.reward)
    tokenizer = load_tokenizer(config.model.path)
    train_prompts, validation = [
        [] if source is None else _load(source, tokenizer, config.data.max_prompt_tokens, console)
        for source in (config.data.train, config.data.validation)
    ]
    sampler = PromptSampler(
        train_prompts,
        batch_size=config.batching.prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    return RunData(sampler, validation, tokenizer)


def _load(
    source: SourceConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, console: RunConsole
) -> list[Prompt]:
    loaded = load_prompts(source, tokenizer, max_prompt_tokens=max_prompt_tokens)
    for reason, count in loaded.filtered.items():
        console.note(f"{count} prompts of {source.path or source.task} left out: {reason}")
    return loaded.prompts
