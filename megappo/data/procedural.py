"""Rows of reasoning-gym, a library of procedural tasks with scorers (Stojanovski et al. 2025, arXiv:2505.24760)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from megappo.config.data import SourceConfig
from megappo.data.types import Row
from megappo.errors import DataError

DEFAULT_SIZE = 1000
"""Rows made when `size` is not set."""


def reasoning_gym(config: SourceConfig) -> Iterator[Row]:
    """Yield the rows of a task. `extra["entry"]` is the whole entry, for the task's scorer.

    Raises:
        DataError: unknown task or parameter, a parameter that the task refuses, or a question that does not match
            `question_pattern`.
    """
    size = DEFAULT_SIZE if config.size is None else config.size
    entries = _make_task(config.task, config.params, size=size, seed=config.seed)
    pattern = None if config.question_pattern is None else _compiled(config.question_pattern)
    for row in range(size):
        entry = entries[row]
        question = entry["question"] if pattern is None else _matched(pattern, entry["question"], f"row {row}")
        answer = entry["answer"]
        yield Row(
            row=row,
            question=question,
            answer=None if answer is None else str(answer),
            source=f"reasoning_gym/{config.task}",
            extra={"entry": entry},
        )


def _make_task(task: str | None, params: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """Return the reasoning-gym dataset of a task. Any: the library has no types."""
    import reasoning_gym as library
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = get_close_matches(str(task), DATASETS, n=3) or sorted(DATASETS)[:5]
        raise DataError(f"reasoning_gym: task {task!r} is unknown (did you mean {', '.join(near)}?)")
    known = sorted(field.name for field in fields(DATASETS[task][1]) if field.name not in ("size", "seed"))
    for name in params:
        if name not in known:
            raise DataError(f"reasoning_gym: task {task} has no parameter {name!r} (it has {', '.join(known)})")
    try:
        return library.create_dataset(task, size=size, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym: task {task} refuses params={dict(params)}: {error}") from error


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise DataError(f"question_pattern={pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < 1:
        raise DataError(f"question_pattern={pattern!r} has no group (put what becomes the prompt into parentheses)")
    return compiled


def _matched(pattern: re.Pattern[str], question: str, place: str) -> str:
    found = pattern.search(question)
    if found is None or found.group(1) is None:
        raise DataError(f"question_pattern={pattern.pattern!r} does not match the question of {place}: {question!r}")
    return found.group(1)
