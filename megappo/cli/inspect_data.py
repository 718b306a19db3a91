"""`megappo inspect data`: what a run would read, leave out and draw, before anything starts.

The tokenizer is that of `model.path`; where `megappo sft` makes the model and has not yet, the one that it would make.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megappo.cli.rollout_program import tools_to_show
from megappo.cli.run_data import RunSource, make_sampler, run_sources, shared_texts
from megappo.config.data import BadRow, Duplicate, SharedPrompt, TooLong
from megappo.config.file_rules import is_made_by_sft
from megappo.config.rules import check_data
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.data.prompts import PromptSet, examine_prompts
from megappo.data.starting_tokenizer import starting_tokenizer
from megappo.data.tokenizer import load_tokenizer, with_chat_template
from megappo.data.types import Prompt
from megappo.errors import ConfigError, DataError, Violation

Facts = dict[str, Any]  # Any: the printed object

_BINS = 12
_BAR_WIDTH = 40
_SHOWN_TEXT = 600
_SHOWN_TOKENS = 40
_SHOWN_VALUE = 100


def inspect_data(overrides: Sequence[str], *, samples: int = 1, as_json: bool = False) -> int:
    """Print what is in the data of a run; return the exit code (1: a run would refuse it).

    Args:
        samples: prompts of each source that are shown.

    Raises:
        ConfigError: the section `data` breaks a rule, or `samples` is negative.
        DataError: a source cannot be read at all.
    """
    if samples < 0:
        rule, remedy = "must not be negative", "use 0 to show none"
        raise ConfigError([Violation(key="--samples", value=samples, rule=rule, remedy=remedy)])
    config = load_run_config(overrides, rules=(check_data,))
    facts = describe_data(config, samples=samples)
    print(json.dumps(facts, indent=1) if as_json else "\n".join(_lines(facts)))
    return 1 if facts["refused"] else 0


def describe_data(config: RunConfig, *, samples: int) -> Facts:
    """Return the printed object. Raises DataError as `inspect_data`."""
    tokenizer, made = _tokenizer(config)
    described: list[Facts] = []
    training: dict[str, list[Prompt]] = {}
    validation: dict[str, list[Prompt]] = {}
    for source in run_sources(config.data, tools_to_show(config.rollout, tokenizer)):
        found = examine_prompts(source.config, tokenizer, source.options)
        (training if source.trains else validation)[source.name] = found.prompts
        described.append(_describe(source, found, samples))
    shared = {name: shared_texts(training, prompts) for name, prompts in validation.items()}
    num_shared = sum(prompt.text in shared[name] for name, prompts in validation.items() for prompt in prompts)
    refused = [f"{facts['key']}: {reason}" for facts in described for reason in facts["refused"]]
    if num_shared and config.data.on_shared is SharedPrompt.refuse:
        refused.append(f"data.on_shared=refuse: {num_shared} validation prompts are training prompts, too")
    try:
        steps = make_sampler(config, training).steps_per_epoch if not refused else None
    except DataError as error:
        refused, steps = [str(error)], None
    return {
        "tokenizer": made or config.model.path,
        "sources": described,
        "shares": _shares(config),
        "prompts_per_step": config.batching.prompts_per_step,
        "steps_per_epoch": steps,
        "validation_prompts_in_training": num_shared,
        "on_shared": config.data.on_shared.value,
        "refused": refused,
    }


def _tokenizer(config: RunConfig) -> tuple[PreTrainedTokenizerBase, str]:
    """Return the tokenizer and, where the run's own does not exist yet, what it is."""
    if is_made_by_sft(config) and config.sft.random_model is not None and not Path(config.model.path).is_dir():
        made = with_chat_template(starting_tokenizer(config.data), config.data.chat_template)
        return made, "characters of the data, as `megappo sft` makes it"
    return load_tokenizer(config.model.path, config.data.chat_template), ""


def _shares(config: RunConfig) -> dict[str, float]:
    """Return the part of the draws that each of several sources has."""
    weights = {name: source.weight for name, source in config.data.train_sources.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _describe(source: RunSource, found: PromptSet, samples: int) -> Facts:
    """Return everything about one source."""
    reasons = {entry.reason: entry.message for entry in reversed(found.left_out)}
    refuses = {reason: _is_refused(source, reason) for reason in reasons}
    return {
        "key": source.key,
        "kind": source.config.kind,
        "place": source.config.place,
        "rows": found.rows,
        "prompts": len(found.prompts),
        "duplicates": found.duplicates,
        "left_out": {
            reason: {"rows": count, "refused": refuses[reason], "example": reasons[reason]}
            for reason, count in found.filtered.items()
        },
        "refused": [reason for reason, refused in refuses.items() if refused]
        or ([] if found.prompts else ["nothing left"]),
        "columns": _columns(found.prompts),
        "by_source": dict(Counter(prompt.source for prompt in found.prompts)),
        "tokens": _lengths(found.prompts),
        "samples": [_sample(prompt) for prompt in found.prompts[:samples]],
    }


def _is_refused(source: RunSource, reason: str) -> bool:
    """Whether a run ends at a row that is left out for this reason."""
    if reason == "too_long":
        return source.options.on_too_long is TooLong.refuse
    if reason == "duplicate":
        return source.config.on_duplicate is Duplicate.refuse
    return source.config.on_bad_row is BadRow.refuse


def _columns(prompts: Sequence[Prompt]) -> dict[str, dict[str, int]]:
    """Return what a reward sees of the rows: field -> type -> prompts."""
    columns: dict[str, Counter[str]] = {}
    for prompt in prompts:
        fields = {"answer": prompt.answer, "tools": prompt.tools} | {
            f"extra.{name}": value for name, value in prompt.extra.items()
        }
        for name, value in fields.items():
            columns.setdefault(name, Counter())[_type_name(value)] += 1
    return {name: dict(types) for name, types in columns.items() if name != "tools" or set(types) != {"null"}}


def _type_name(value: object) -> str:
    names = {type(None): "null", str: "text", dict: "object", list: "list", bool: "true/false"}
    return names.get(type(value), "number" if isinstance(value, int | float) else type(value).__name__)


def _lengths(prompts: Sequence[Prompt]) -> Facts | None:
    """Return tokens per prompt: a few numbers, and how many prompts are in each range."""
    if not prompts:
        return None
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    low, high = int(lengths.min()), int(lengths.max())
    width = math.ceil((high - low + 1) / _BINS)
    edges = range(low, high + 1, width)
    counts = np.bincount((lengths - low) // width, minlength=len(edges))
    return {
        "total": int(lengths.sum()),
        "mean": float(lengths.mean()),
        "min": low,
        "max": high,
        "median": float(np.median(lengths)),
        "p99": float(np.percentile(lengths, 99)),
        "histogram": [
            {"from": edge, "to": min(edge + width - 1, high), "prompts": int(count)}
            for edge, count in zip(edges, counts)
        ],
    }


def _sample(prompt: Prompt) -> Facts:
    return {
        "row": prompt.row,
        "source": prompt.source,
        "text": prompt.text,
        "tokens": prompt.tokens,
        "answer": prompt.answer,
        "extra": {name: _cut(value) for name, value in prompt.extra.items()},
    }


def _cut(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_VALUE else f"{text[:_SHOWN_VALUE]}... ({len(text)} characters)"


def _lines(facts: Facts) -> list[str]:
    """Return the printed text."""
    lines = [f"tokenizer  {facts['tokenizer']}"]
    for source in facts["sources"]:
        lines += ["", *_source_lines(source)]
    lines.append("")
    if facts["shares"]:
        lines.append(f"mixture    {', '.join(f'{name} {share:.1%}' for name, share in facts['shares'].items())}")
    steps = facts["steps_per_epoch"]
    if steps is not None:
        lines.append(f"epoch      {steps} steps of {facts['prompts_per_step']} prompts")
    if shared := facts["validation_prompts_in_training"]:
        lines.append(
            f"overlap    {shared} validation prompts are training prompts, too (data.on_shared={facts['on_shared']})"
        )
    lines += [f"REFUSED    {reason}" for reason in facts["refused"]]
    return lines


def _source_lines(facts: Facts) -> list[str]:
    lines = [f"{facts['key']}: {facts['kind']} {facts['place']}"]
    lines.append(f"  rows      {facts['rows']} read, {facts['prompts']} prompts, {facts['duplicates']} duplicates kept")
    for reason, entry in facts["left_out"].items():
        then = "a run refuses this" if entry["refused"] else "left out"
        lines += [f"  {reason:<9} {entry['rows']} rows, {then}, for example", f"            {entry['example']}"]
    lines += [f"  {name:<9} {_types(types)}" for name, types in facts["columns"].items()]
    lines.append(f"  by source {', '.join(f'{name} {count}' for name, count in facts['by_source'].items())}")
    if facts["tokens"] is not None:
        lines += _length_lines(facts["tokens"])
    for sample in facts["samples"]:
        lines += _sample_lines(sample)
    return lines


def _types(types: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in types.items())


def _length_lines(tokens: Facts) -> list[str]:
    numbers = ", ".join(f"{name} {tokens[name]:g}" for name in ("min", "median", "p99", "max"))
    lines = [f"  tokens    {tokens['total']} in all, mean {tokens['mean']:.1f}, {numbers}"]
    most, digits = max(entry["prompts"] for entry in tokens["histogram"]), len(str(tokens["max"]))
    for entry in tokens["histogram"]:
        bar = "#" * math.ceil(entry["prompts"] / most * _BAR_WIDTH)
        lines.append(f"  {entry['from']:>{digits}} - {entry['to']:<{digits}}  {entry['prompts']:>7} {bar}".rstrip())
    return lines


def _sample_lines(sample: Facts) -> list[str]:
    text, tokens = sample["text"], sample["tokens"]
    shown = text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}... ({len(text)} characters)"
    ids = " ".join(map(str, tokens[:_SHOWN_TOKENS])) + (" ..." if len(tokens) > _SHOWN_TOKENS else "")
    lines = [f"  row {sample['row']} ({len(tokens)} tokens, source {sample['source']})"]
    lines += [f"    | {line}" for line in shown.split("\n")]
    lines += [f"    token ids {ids}", f"    answer    {sample['answer']!r}"]
    return lines + [f"    {name:<9} {value}" for name, value in sample["extra"].items()]
