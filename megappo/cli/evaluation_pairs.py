"""Two evaluations of the same prompts, prompt by prompt: what one model is better by, and how sure that is.

Prompts differ far more from each other than two models do on one of them. So the interval of the differences, prompt by
prompt (paired bootstrap), is much narrower than two intervals side by side suggest.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megappo.algo.judgement import bootstrap_interval
from megappo.config.run import RunConfig
from megappo.controller.evaluate import Evaluation
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.observability.run_directory import write_atomically

PROMPTS = "prompts.jsonl"
"""The statistics of every prompt, in the folder of an evaluation."""

_NAMED_BY = ("set", "source", "row", "sha256")
"""What says which prompt a line is about."""

_OF_ALL_ANSWERS = ("best", "majority")
"""Statistics that grow with the number of answers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Difference:
    """A statistic of this evaluation minus that of the other one, as a mean over the prompts that both have."""

    set_name: str
    statistic: str
    value: float
    interval: tuple[float, float] | None
    prompts: int


def write_prompts(path: Path, evaluation: Evaluation, *, samples_per_prompt: int) -> None:
    """Write a line for each prompt: which it is, and its statistics (null where it has none)."""
    lines: list[str] = []
    for answered, report in zip(evaluation.answered, evaluation.reports):
        for index, prompt in enumerate(answered.prompts):
            numbers = {name: _or_none(found[index]) for name, found in report.values.items()}
            named = dict(zip(_NAMED_BY, _key_of(answered.name, prompt.prompt)))
            line = named | {"samples": samples_per_prompt} | numbers
            lines.append(json.dumps(line) + "\n")
    write_atomically(path, "".join(lines))


def _key_of(set_name: str, prompt: Prompt) -> tuple[str, str, int, str]:
    return set_name, prompt.source, prompt.row, hashlib.sha256(prompt.text.encode()).hexdigest()


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def read_prompts(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Return what `write_prompts` wrote. Raises DataError."""
    path = folder / PROMPTS
    try:
        lines: list[Any] = [json.loads(text) for text in path.read_text().splitlines()]
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, dict) or not {*_NAMED_BY, "samples"} <= line.keys():
                raise ValueError(f"line {number} of {path} is not that of a prompt")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is no evaluation: {error} (give the --output of an earlier one)") from error
    return lines


def require_shared(sets: Mapping[str, Sequence[Prompt]], other: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError if an earlier evaluation has none of the prompts."""
    theirs = {_key(line) for line in other}
    if not any(_key_of(name, prompt) in theirs for name, prompts in sets.items() for prompt in prompts):
        raise DataError("the two evaluations have no prompt in common (compare evaluations of the same data)")


def compare(
    mine: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    config: RunConfig,
    *,
    left_out: tuple[str, ...] = (),
) -> list[Difference]:
    """Return the differences of two evaluations, set by set, of the prompts that both have.

    Args:
        left_out: how the names of statistics begin that mean something else in the two.
    """
    theirs = {_key(line): line for line in other}
    pairs = [(line, theirs[_key(line)]) for line in mine if _key(line) in theirs]
    found: dict[tuple[str, str], list[float]] = {}
    for ours, its in pairs:
        for statistic in _shared(ours, its, left_out):
            if ours[statistic] is not None and its[statistic] is not None:
                found.setdefault((ours["set"], statistic), []).append(ours[statistic] - its[statistic])
    return [_difference(*key, np.array(values), config) for key, values in found.items()]


def _key(line: Mapping[str, Any]) -> tuple[str, str, int, str]:
    return line["set"], line["source"], line["row"], line["sha256"]


def _shared(ours: Mapping[str, Any], its: Mapping[str, Any], left_out: tuple[str, ...]) -> list[str]:
    """Return the statistics that mean the same in both: the best of 8 answers is no match for the best of 4."""
    own = (*_NAMED_BY, "samples")
    others = own if ours["samples"] == its["samples"] else (*own, *_OF_ALL_ANSWERS)
    return [name for name in ours if name in its and name not in others and not name.startswith(left_out)]


def _difference(set_name: str, statistic: str, values: np.ndarray, config: RunConfig) -> Difference:
    validation = config.validation
    interval = bootstrap_interval(
        values, resamples=validation.bootstrap_samples, confidence=validation.confidence, seed=config.seed
    )
    return Difference(
        set_name=set_name, statistic=statistic, value=float(values.mean()), interval=interval, prompts=len(values)
    )
