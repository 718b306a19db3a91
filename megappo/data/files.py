"""Rows from jsonl and parquet files and from folders of Hugging Face datasets."""

import json
from collections.abc import Iterator
from typing import Any

from megappo.config.data import SourceConfig
from megappo.data.locations import DataFile, find_files, find_folder, within
from megappo.data.records import row_of, without_nulls
from megappo.data.types import LeftOut, Row
from megappo.errors import DataError


def jsonl(config: SourceConfig) -> Iterator[Row | LeftOut]:
    """Yield the rows of jsonl files, one JSON object a line; blank lines are passed over."""
    row = 0
    for file in find_files(config):
        with file.open(decompress=True) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parsed(config, row, line, f"{file.name}:{number}")
                    row += 1


def _parsed(config: SourceConfig, row: int, line: bytes, place: str) -> Row | LeftOut:
    try:
        # Some editors put a byte-order mark in front of a file.
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        return LeftOut(row=row, reason="not_utf8", message=f"{place}: is not UTF-8: {found} (write the file as UTF-8)")
    except (ValueError, RecursionError) as error:
        return LeftOut(row=row, reason="broken_line", message=f"{place}: is not JSON: {error}")
    if not isinstance(record, dict):
        message = f"{place}: must be a JSON object, found {type(record).__name__}"
        return LeftOut(row=row, reason="broken_line", message=message)
    return row_of(config, row, record, place)


def parquet(config: SourceConfig) -> Iterator[Row | LeftOut]:
    """Yield the rows of parquet files. Nested columns come as plain lists and dicts; keys that are null because
    another row has them are left out, as they were in the data that was written."""
    import pyarrow
    import pyarrow.parquet

    row = 0
    for file in find_files(config):
        with file.open() as opened:
            try:
                batches = pyarrow.parquet.ParquetFile(opened).iter_batches()
                for found in _rows(config, row, batches, file):
                    yield found
                    row += 1
            except pyarrow.ArrowException as error:
                raise DataError(f"{file.name}: is not a parquet file that can be read: {error}") from error


def datasets(config: SourceConfig) -> Iterator[Row | LeftOut]:
    """Yield the rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote. The package
    `datasets` is not needed: the data files are Arrow streams, and state.json lists them in order."""
    import pyarrow

    folder = _split(config, find_folder(config))
    row = 0
    for name in _data_files(folder):
        file = within(folder, name)
        with file.open() as opened:
            try:
                batches = iter(pyarrow.ipc.open_stream(opened))
                for found in _rows(config, row, batches, file):
                    yield found
                    row += 1
            except pyarrow.ArrowException as error:
                raise DataError(f"{file.name}: is not an Arrow file that can be read: {error}") from error


def _rows(config: SourceConfig, first: int, batches: Iterator[Any], file: DataFile) -> Iterator[Row | LeftOut]:
    """Yield the rows of one file. Any: record batches of pyarrow."""
    number = 0
    for batch in batches:
        try:
            records = batch.to_pylist()
        except UnicodeDecodeError as error:
            message = f"{file.name}: a text column is not UTF-8, in rows {number + 1} to {number + batch.num_rows}"
            raise DataError(f"{message}: {error} (write it as UTF-8)") from error
        for record in records:
            yield row_of(config, first + number, _top_level(record), f"{file.name} row {number + 1}")
            number += 1


def _top_level(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its columns, null or not, and without the nulls inside of them."""
    return {name: without_nulls(value) for name, value in record.items()}


def _split(config: SourceConfig, folder: DataFile) -> DataFile:
    """Return the folder of the wanted split."""
    index = within(folder, "dataset_dict.json")
    if not index.system.exists(index.path):
        if config.split is not None:
            raise DataError(f"{folder.name}: holds one data set without splits (set split=null)")
        return folder
    splits = [str(name) for name in _json(index, "splits")]
    if config.split not in splits:
        asked = "holds several splits" if config.split is None else f"has no split {config.split!r}"
        raise DataError(f"{folder.name}: {asked} (set split to one of {', '.join(splits)})")
    return within(folder, config.split)


def _data_files(folder: DataFile) -> list[str]:
    state = within(folder, "state.json")
    if not state.system.exists(state.path):
        raise DataError(
            f"{folder.name}: holds no state.json, so it is not a folder of Dataset.save_to_disk "
            "(parquet files of a downloaded data set: kind=parquet path=FOLDER/**/*.parquet)"
        )
    return [str(entry["filename"]) for entry in _json(state, "_data_files")]


def _json(file: DataFile, key: str) -> list[Any]:  # Any: what JSON holds
    with file.open() as opened:
        content = opened.read()
    try:
        return list(json.loads(content)[key])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file.name}: is not what save_to_disk writes: {error!r}") from error
