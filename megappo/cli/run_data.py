"""The prompts of `megappo train`, and the faults in them that can be seen before Ray starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megappo.cli.rollout_program import tools_to_show
from megappo.config.data import DataConfig, SharedPrompt, SourceConfig, training_key, validation_key
from megappo.config.run import RunConfig
from megappo.config.validation_rules import source_metric_fault
from megappo.data.curriculum import make_curriculum
from megappo.data.mixture import PromptMixture, WeightedPrompts
from megappo.data.prompts import PromptOptions, examine_prompts, load_prompts
from megappo.data.sampler import PromptDraws, PromptSampler
from megappo.data.tokenizer import load_tokenizer, read_template
from megappo.data.types import Prompt
from megappo.errors import ConfigError, DataError, Violation
from megappo.observability.console import RunConsole

_SHOWN_TEXT = 400
"""Characters of the first prompt at start-up."""
_SHOWN_TOKENS = 24


class RunData(NamedTuple):
    """The prompts of a run, and what turns tokens into text."""

    sampler: PromptDraws
    validation: dict[str, list[Prompt]]
    """By set; a single one is called ""."""
    tokenizer: PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True, frozen=True)
class RunSource:
    """A source of a run, and what its prompts are made with."""

    key: str
    """In the configuration, such as `data.train_sources.math`."""
    name: str
    """Among the sources of its kind; empty where it is alone."""
    config: SourceConfig
    options: PromptOptions
    trains: bool


def settle_data(config: RunConfig) -> RunConfig:
    """Return the configuration with the chat template as text: workers have another working directory. Raises DataError
    where its file cannot be read."""
    template = config.data.chat_template
    read = None if template is None else read_template(template)
    return replace(config, data=replace(config.data, chat_template=read))


def make_data(config: RunConfig, console: RunConsole) -> RunData:
    """Return the training prompts in the order of their draws, and the validation prompts.

    Raises:
        DataError: prompts, tokenizer or curriculum cannot be used.
        ConfigError: the best checkpoint is that of a metric which these prompts have not.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    training: dict[str, list[Prompt]] = {}
    validation: dict[str, list[Prompt]] = {}
    for source in run_sources(config.data, tools_to_show(config.rollout, tokenizer)):
        prompts = _load(source, tokenizer, console)
        if source.trains and not training:
            console.note(first_prompt(source.key, prompts[0]))
        (training if source.trains else validation)[source.name] = prompts
    validation = without_shared(config.data.on_shared, training, validation, console)
    _check_best_metric(config, validation)
    return RunData(make_sampler(config, training), validation, tokenizer)


def make_validation(config: RunConfig, console: RunConsole) -> dict[str, list[Prompt]]:
    """Return the validation prompts by set, for an evaluation without training. Raises as `make_data`."""
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    training: dict[str, list[Prompt]] = {}
    sets: dict[str, list[Prompt]] = {}
    for source in run_sources(config.data, tools_to_show(config.rollout, tokenizer)):
        if source.trains and config.data.on_shared is not SharedPrompt.keep:
            training[source.name] = examine_prompts(source.config, tokenizer, source.options).prompts
        elif not source.trains:
            sets[source.name] = _load(source, tokenizer, console)
            console.note(first_prompt(source.key, sets[source.name][0]))
    return without_shared(config.data.on_shared, training, sets, console)


def _check_best_metric(config: RunConfig, validation: Mapping[str, Sequence[Prompt]]) -> None:
    """Raise ConfigError if `checkpoint.keep_best` is of a source that the validation prompts do not have."""
    best = config.checkpoint.keep_best
    sources = {name: {prompt.source for prompt in prompts} for name, prompts in validation.items()}
    if best is not None and (fault := source_metric_fault(best, sources)) is not None:
        raise ConfigError([Violation(key="checkpoint.keep_best", value=best, rule=fault[0], remedy=fault[1])])


def run_sources(data: DataConfig, tools: list[dict[str, Any]] | None = None) -> list[RunSource]:
    """Return the sources of a run, those of training first.

    Args:
        tools: schemas that rows without their own show (Any: what JSON schemas hold).
    """

    def of(name: str, source: SourceConfig, *, trains: bool) -> RunSource:
        key = training_key(name) if trains else validation_key(name)
        options = PromptOptions(
            max_prompt_tokens=data.max_prompt_tokens,
            on_too_long=data.on_too_long,
            tools=tools,
            name=name,
            origin=name if trains else "",
            reward="" if source.reward is None else key,
        )
        return RunSource(key=key, name=name, config=source, options=options, trains=trains)

    training = [of(name, source, trains=True) for name, source in data.training().items()]
    return training + [of(name, source, trains=False) for name, source in data.validating().items()]


def make_sampler(config: RunConfig, training: Mapping[str, Sequence[Prompt]]) -> PromptDraws:
    """Return the draws of training prompts, by source.

    Raises:
        DataError: a source has too few prompts for a batch, or the curriculum cannot be used.
    """
    data, batch_size = config.data, config.batching.prompts_per_step
    if not data.train_sources:
        return PromptSampler(
            training[""],
            batch_size=batch_size,
            seed=config.seed,
            shuffle=data.shuffle,
            curriculum=make_curriculum(data),
        )
    sources = {
        name: WeightedPrompts(prompts=prompts, weight=data.train_sources[name].weight, curriculum=make_curriculum(data))
        for name, prompts in training.items()
    }
    return PromptMixture(sources, batch_size=batch_size, seed=config.seed, shuffle=data.shuffle)


def first_prompt(key: str, prompt: Prompt) -> str:
    """Return what the engine gets for the first prompt of a source, text and token ids, for a person to check."""
    ids = ", ".join(map(str, prompt.tokens[:_SHOWN_TOKENS]))
    rest = f", ... {len(prompt.tokens) - _SHOWN_TOKENS} more" if len(prompt.tokens) > _SHOWN_TOKENS else ""
    cut = f"... {len(prompt.text) - _SHOWN_TEXT} more characters" if len(prompt.text) > _SHOWN_TEXT else ""
    head = f"first prompt of {key} (row {prompt.row}, {len(prompt.tokens)} tokens)"
    return f"{head}: {prompt.text[:_SHOWN_TEXT]!r}{cut} = [{ids}{rest}]"


def shared_texts(training: Mapping[str, Sequence[Prompt]], validation: Sequence[Prompt]) -> set[str]:
    """Return the texts of the validation prompts that are training prompts, too."""
    asked = {prompt.text for prompt in validation}
    return {prompt.text for prompts in training.values() for prompt in prompts if prompt.text in asked}


def without_shared(
    what: SharedPrompt,
    training: Mapping[str, Sequence[Prompt]],
    validation: Mapping[str, list[Prompt]],
    console: RunConsole,
) -> dict[str, list[Prompt]]:
    """Return the validation prompts that stay. Raises DataError where shared ones are refused, or nothing stays."""
    kept: dict[str, list[Prompt]] = {}
    for name, prompts in validation.items():
        texts, key = shared_texts(training, prompts), validation_key(name)
        alone = [prompt for prompt in prompts if prompt.text not in texts]
        kept[name] = alone if what is SharedPrompt.filter else prompts
        if not texts:
            continue
        found = f"{key}: {len(prompts) - len(alone)} of {len(prompts)} prompts are training prompts, too"
        if what is SharedPrompt.refuse or not kept[name]:
            raise DataError(
                f"{found} (data.on_shared={what.value}; keep their rows apart by skip and size, give other rows, or "
                "set data.on_shared=keep)"
            )
        left = "left out" if what is SharedPrompt.filter else "data.on_shared=filter leaves them out"
        console.note(f"{found}: {left}")
    return kept


def _load(source: RunSource, tokenizer: PreTrainedTokenizerBase, console: RunConsole) -> list[Prompt]:
    loaded = load_prompts(source.config, tokenizer, source.options)
    for reason, count in loaded.filtered.items():
        console.note(f"{source.key}: {count} of {loaded.rows} rows left out: {reason}")
    if loaded.duplicates:
        remedy = "on_duplicate=filter leaves them out"
        console.note(f"{source.key}: {loaded.duplicates} prompts are those of earlier rows, too ({remedy})")
    return loaded.prompts
