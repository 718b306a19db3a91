"""Files of this machine and of others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

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
        ("memory://nothing.jsonl", {}, "no file matches path=memory://nothing.jsonl"),
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


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A web server that answers everything with a status; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ["rows.jsonl", "*.jsonl"])
@pytest.mark.parametrize("status", [403, 404, 500, None])
def test_a_web_server_that_has_no_rows_says_why(status, name):
    with answering(status or 200) as address:
        url = f"{address}/{name}"
        if status is not None:
            with pytest.raises(DataError) as caught:
                read_rows(SourceConfig(path=url))
    if status is None:  # the server is gone
        with pytest.raises(DataError, match=rf"Cannot connect to host {address.removeprefix('http://')}"):
            read_rows(SourceConfig(path=url))
        return
    assert f"path={url} cannot be read: {status}, message=" in str(caught.value)


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch):
    entry = {"class": "absent_package.FileSystem", "err": "Install absent_package to read absent storage"}
    monkeypatch.setitem(known_implementations, "absent", entry)
    with pytest.raises(DataError, match=r"path=absent://bucket/rows\.jsonl: Install absent_package"):
        read_rows(SourceConfig(path="absent://bucket/rows.jsonl"))
