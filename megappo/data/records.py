"""From a record (a line of a file, a mapping that a function gave) to a row, or to the reason why it is none.

A column name may be a path into nested columns: `reward_model.ground_truth`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megappo.config.data import SourceConfig
from megappo.data.types import LeftOut, Message, Row

Record = Mapping[str, Any]  # Any: a record holds whatever the data holds

_SHOWN = 80
"""Characters of a value in a message."""


class _UnusableError(Exception):
    """The record is no row: (reason, what is wrong)."""


def row_of(config: SourceConfig, number: int, record: Record, place: str) -> Row | LeftOut:
    """Return the row that a record holds by the columns of the configuration.

    Args:
        number: of the record in the source.
        place: file and line, or whatever tells a person where it is.
    """
    try:
        return _row(config, number, record)
    except _UnusableError as error:
        reason, message = error.args
        return LeftOut(row=number, reason=reason, message=f"{place}: {message}")


def checked_row(row: Row, place: str) -> Row | LeftOut:
    """Return a row that foreign code made, with its answer as text, or the reason why it is none."""
    try:
        question = _question(row.question, "question")
        return replace(row, question=question, answer=None if row.answer is None else _answer(row.answer, "answer"))
    except _UnusableError as error:
        reason, message = error.args
        return LeftOut(row=row.row, reason=reason, message=f"{place}: {message}")


def plain(value: Any) -> Any:
    """Return nested data as lists, dicts and plain numbers: numpy arrays of objects are what pandas makes of lists."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Return nested data without the null entries of dicts: a parquet struct has every key of the whole file."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _row(config: SourceConfig, number: int, record: Record) -> Row:
    question = _question(_column(record, config.prompt_column, "prompt_column"), config.prompt_column)
    answer = None
    if config.answer_column is not None:
        answer = _answer(_column(record, config.answer_column, "answer_column"), config.answer_column)
    return Row(
        row=number,
        question=question,
        answer=answer,
        source=_source(_optional(record, config.source_column), config.source_column),
        extra=_extra(config, record),
        tools=_tools(_optional(record, config.tools_column), config.tools_column),
    )


def _extra(config: SourceConfig, record: Record) -> dict[str, Any]:
    """Return the columns for the reward. A nested column that holds prompt or answer stays: it holds more."""
    if config.extra_columns is not None:
        return {name: _column(record, name, "extra_columns") for name in config.extra_columns}
    used = {name.partition(".")[0] for name in (config.prompt_column, config.answer_column) if name}
    return {
        name: value
        for name, value in record.items()
        if name != config.tools_column and (name not in used or isinstance(value, dict))
    }


def _column(record: Record, name: str, key: str) -> Any:  # Any: the caller checks the value
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise _UnusableError("missing_column", f"column {name!r} is missing ({key}; {_has(record)})")
        value = value[part]
    if value is None:
        raise _UnusableError("null", f"column {name!r} is null ({key})")
    return value


def _has(record: Record) -> str:
    return f"the row has {', '.join(record)}" if record else "the row has no columns"


def _optional(record: Record, name: str | None) -> Any:  # Any: as in _column
    if name is None:
        return None
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _question(value: Any, column: str) -> str | list[Message]:
    rule = f"column {column!r} must be text or a list of messages with a role"
    if isinstance(value, str):
        if not value.strip():
            raise _UnusableError("empty", f"column {column!r} is empty")
        return value
    if isinstance(value, list) and not value:
        raise _UnusableError("empty", f"{rule}, found an empty list")
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value):
        _check_contents(value, column)
        return value
    raise _UnusableError("wrong_type", f"{rule}, found {_shown(value)}")


def _check_contents(messages: Sequence[Message], column: str) -> None:
    for number, message in enumerate(messages, start=1):
        content, where = message.get("content"), f"column {column!r}: message {number}"
        # A template would write nothing for a content that is not there, and whatever Python writes for a number.
        if content is None and "tool_calls" not in message:
            raise _UnusableError("null", f"{where} has no content, found {_shown(message)}")
        if not isinstance(content, str | list | None):
            raise _UnusableError("wrong_type", f"{where}: content must be text or parts, found {_shown(content)}")
    if not any(str(message.get("content") or "").strip() or "tool_calls" in message for message in messages):
        raise _UnusableError("empty", f"column {column!r}: the messages hold no text")


def _source(value: Any, column: str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise _UnusableError("wrong_type", f"column {column!r} must be the name of a source, found {_shown(value)}")


def _answer(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):  # as pandas writes what is missing
        raise _UnusableError("null", f"column {column!r} is NaN, no answer")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise _UnusableError("wrong_type", f"column {column!r} must be text or a number, found {_shown(value)}")


def _tools(value: Any, column: str | None) -> list[dict[str, Any]] | None:
    """Return tool schemas; JSON text is what files hold whose columns cannot be of any shape."""
    found = value
    if isinstance(value, str) and value.strip():
        try:
            found = json.loads(value)
        except ValueError as error:
            raise _UnusableError("wrong_type", f"column {column!r} holds text that is not JSON: {error}") from error
    if not found:
        return None
    if isinstance(found, Sequence) and all(isinstance(item, dict) for item in found):
        return list(found)
    rule = f"column {column!r} must be a list of tool schemas"
    raise _UnusableError("wrong_type", f"{rule}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
