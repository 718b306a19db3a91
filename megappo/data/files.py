"""Rows from jsonl and parquet files.

A column name may be a path into nested columns: `reward_model.ground_truth`.
"""

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.config.data import SourceConfig
from megappo.data.types import Row
from megappo.errors import DataError

Record = dict[str, Any]  # Any: a row of a file holds whatever the file holds


def jsonl(config: SourceConfig) -> Iterator[Row]:
    """Yield the rows of jsonl files, one JSON object a line; blank lines are passed over."""
    row = 0
    for path in _files(config):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(config, row, _parsed(line, f"{path}:{number}"), f"{path}:{number}")
                    row += 1


def parquet(config: SourceConfig) -> Iterator[Row]:
    """Yield the rows of parquet files. Nested columns come as plain lists and dicts; keys that are null because
    another row has them are left out, as they were in the data that was written."""
    import pyarrow
    import pyarrow.parquet

    row = 0
    for path in _files(config):
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise DataError(f"{path}: is not a parquet file that can be read: {error}") from error
        number = 0
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield _row(config, row, _without_nulls(record), f"{path} row {number}")
                row += 1


def _files(config: SourceConfig) -> list[Path]:
    """Return the files of a path or glob, sorted by name."""
    if config.path is None:
        raise DataError(f"data source {config.kind}: path is missing (give a file or a glob)")
    found = sorted(glob.glob(config.path, recursive=True))
    if not found:
        raise DataError(f"data source {config.kind}: no file matches path={config.path}")
    return [Path(name) for name in found]


def _parsed(line: str, place: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be a JSON object, found {type(record).__name__}")
    return record


def _row(config: SourceConfig, row: int, record: Record, place: str) -> Row:
    """Build the row. Raises DataError naming file, line and column when prompt, answer or tools cannot be used."""
    question = _column(record, config.prompt_column, "prompt_column", place)
    answer = None
    if config.answer_column is not None:
        answer = _answer(_column(record, config.answer_column, "answer_column", place), config.answer_column, place)
    used = {name.partition(".")[0] for name in (config.prompt_column, config.answer_column) if name}
    extra = {name: value for name, value in record.items() if name not in used or isinstance(value, dict)}
    return Row(
        row=row,
        question=_question(question, config.prompt_column, place),
        answer=answer,
        source=str(record.get("data_source", config.kind)),
        extra=extra,
        tools=_tools(extra.pop("tools", None), place),
    )


def _column(record: Record, name: str, key: str, place: str) -> Any:  # Any: the caller checks the value
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or value.get(part) is None:
            raise DataError(f"{place}: column {name!r} is missing or null ({key}; the row has {', '.join(record)})")
        value = value[part]
    return value


def _question(value: Any, column: str, place: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return value
    raise DataError(f"{place}: column {column!r} must be text or a list of messages with a role, found {value!r:.80}")


def _answer(value: Any, column: str, place: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{place}: column {column!r} must be text or a number, found {value!r:.80}")


def _tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return value
    raise DataError(f"{place}: column 'tools' must be a list of tool schemas, found {value!r:.80}")


def _without_nulls(value: Any) -> Any:
    """Return nested data without the null entries of dicts: a parquet struct has every key of the whole file."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
