"""Files of this machine and of others."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from megappo.config.data import SourceConfig
from megappo.data.sources import read_rows
from megappo.errors import DataError

LINE = json.dumps({"prompt": "ab", "answer": "1"}) + "\n"
SAVED = Path(__file__).parent / "saved_datasets"


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """The file system of this process, which fsspec reaches by URL as it does those of other machines."""
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_globs_of_urls_are_read_by_name(memory):
    for name, count in {"b": 1, "a": 2}.items():
        memory.pipe(f"/rows/{name}.jsonl", (LINE * count).encode())
    assert len(read_rows(SourceConfig(path="memory://rows/*.jsonl"))) == 3
    assert len(read_rows(SourceConfig(path="memory://rows/a.jsonl"))) == 2
    memory.pipe("/rows/c.jsonl", b"{")
    with pytest.raises(DataError, match=r"memory:///rows/c\.jsonl:1: is not JSON"):
        read_rows(SourceConfig(path="memory://rows/*.jsonl"))


def test_parquet_and_saved_data_sets_are_read_from_urls(memory, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": [1]}), tmp_path / "rows.parquet")
    memory.put(str(tmp_path / "rows.parquet"), "/rows.parquet")
    assert read_rows(SourceConfig(kind="parquet", path="memory://rows.parquet"))[0].answer == "1"
    memory.put(str(SAVED / "shards"), "/shards", recursive=True)
    assert len(read_rows(SourceConfig(kind="datasets", path="memory://shards"))) == 2


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("memory://nothing/*.jsonl", {}, "no file matches path=memory://nothing"),
        ("sfs3://bucket/rows.jsonl", {}, "cannot be reached: Protocol not known: sfs3"),
        ("memory://rows.jsonl", {"key": "x"}, None),
        ("file:///nowhere/*.jsonl", {}, "no file matches"),
    ],
)
def test_what_cannot_be_reached_is_named(memory, path, options, message):
    memory.pipe("/rows.jsonl", LINE.encode())
    config = SourceConfig(path=path, storage_options=options)
    if message is None:
        assert len(read_rows(config)) == 1
        return
    with pytest.raises(DataError, match=message):
        read_rows(config)


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch):
    entry = {"class": "absent_package.FileSystem", "err": "Install absent_package to read absent storage"}
    monkeypatch.setitem(known_implementations, "absent", entry)
    with pytest.raises(DataError, match=r"path=absent://bucket/rows\.jsonl: Install absent_package"):
        read_rows(SourceConfig(path="absent://bucket/rows.jsonl"))
