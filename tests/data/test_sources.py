import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megappo.config.data import SourceConfig
from megappo.data.sources import SOURCES, read_rows, read_source
from megappo.data.types import Row
from megappo.errors import DataError
from megappo.registry import RegistryError

RECORDS: list[dict[str, Any]] = [
    {"prompt": "one?", "answer": "1", "level": 3},
    {"prompt": "two?", "answer": 2, "level": 4},
    {"prompt": [{"role": "user", "content": "three?"}], "answer": "3", "level": None},
]
SAVED = Path(__file__).parent / "saved_datasets"
"""Written by datasets 5.2.0: `splits` a DatasetDict, `shards` a shuffled and filtered Dataset in two files. Both hold
the prompt `[{"role": "user", "content": "<i>?"}]` and the answer i."""
TEXTS = [record | {"prompt": f"{index}?", "answer": str(index)} for index, record in enumerate(RECORDS)]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return str(path)


def write_parquet(path: Path, records: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def config_of(kind: str, folder: Path, **changes: Any) -> SourceConfig:
    """A working config of every registered source: the registry's contract tests run on these."""
    made = {
        "jsonl": lambda: SourceConfig(kind="jsonl", path=write_jsonl(folder / "rows.jsonl", TEXTS)),
        "parquet": lambda: SourceConfig(kind="parquet", path=write_parquet(folder / "rows.parquet", TEXTS)),
        "datasets": lambda: SourceConfig(kind="datasets", path=str(SAVED / "splits"), split="train"),
        "reasoning_gym": lambda: SourceConfig(kind="reasoning_gym", task="spell_backward", size=3, seed=1),
    }[kind]()
    for key, value in changes.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize("kind", SOURCES.names())
def test_every_source_numbers_its_rows_and_gives_the_same_ones_again(kind, tmp_path):
    rows = read_rows(config_of(kind, tmp_path))
    assert [row.row for row in rows] == [0, 1, 2]
    assert all(row.question and row.answer and row.source for row in rows)
    assert rows == read_rows(config_of(kind, tmp_path))


@pytest.mark.parametrize("kind", SOURCES.names())
def test_size_and_skip_of_every_source_keep_rows_apart(kind, tmp_path):
    everything = read_rows(config_of(kind, tmp_path))
    assert read_rows(config_of(kind, tmp_path, size=2)) == everything[:2]
    assert read_rows(config_of(kind, tmp_path, size=3, skip=2)) == everything[2:]


@pytest.mark.parametrize("kind", SOURCES.names())
def test_every_source_refuses_to_give_nothing(kind, tmp_path):
    with pytest.raises(DataError, match="skip=3"):
        read_rows(config_of(kind, tmp_path, skip=3))


OUTSIDE = """
import numpy as np
from megappo.data.types import Row

def rows(config):
    return [Row(row=i, question=str(i), answer=None, source="mine") for i in range(2)]

def records(config):
    for i in range(config.params["count"]):
        messages = np.array([{"role": "user", "content": f"{i}?"}], dtype=object)
        yield {"prompt": messages, "answer": np.int64(i), "levels": np.array([i, i + 1])}

def nothing(config):
    return None

def words(config):
    return ["one"]

def fails(config):
    yield {"prompt": "a", "answer": "1"}
    raise KeyError("boom")

def wrong(config):
    return [Row(row=0, question=5, answer="1"), Row(row=1, question="a", answer=7)]

def twice(config):
    return [Row(row=0, question="a", answer=None), Row(row=0, question="b", answer=None)]
"""


@pytest.fixture
def outside(monkeypatch, tmp_path):
    (tmp_path / "outside_source.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_source_from_outside_gives_rows(outside):
    rows = read_rows(SourceConfig(kind="outside_source:rows"))
    assert rows[1] == Row(row=1, question="1", answer=None, source="mine")


def test_a_source_from_outside_gives_records_of_numpy_objects(outside):
    rows = read_rows(SourceConfig(kind="outside_source:records", params={"count": 3}))
    assert [row.question for row in rows] == [[{"role": "user", "content": f"{i}?"}] for i in range(3)]
    assert rows[2].answer == "2"
    assert rows[2].extra == {"levels": [2, 3]}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("csv", RegistryError, "datasets, jsonl, parquet, reasoning_gym"),
        ("outside_source:lost", RegistryError, "cannot be imported"),
        ("outside_source:nothing", DataError, "gave None, must give rows or records"),
        ("outside_source:words", DataError, "gave 'one' as record 0, must be a Row or a mapping"),
        ("outside_source:twice", DataError, "gives row 0 twice"),
        ("outside_source:fails", DataError, r"raised KeyError: 'boom' \(.*outside_source\.py:\d+\)"),
        ("outside_source:wrong", DataError, "1 of 2 rows cannot be used(.|\n)*row 0: column 'question' must be text"),
    ],
)
def test_what_is_no_source_is_named(outside, kind, error, message):
    with pytest.raises(error, match=message):
        read_rows(SourceConfig(kind=kind))


def test_a_saved_data_set_is_read_by_split_and_in_the_order_of_its_files():
    test = read_rows(SourceConfig(kind="datasets", path=str(SAVED / "splits"), split="test"))
    assert [row.answer for row in test] == ["2", "0"]
    shards = read_rows(SourceConfig(kind="datasets", path=str(SAVED / "shards")))
    assert [(row.row, row.text, row.answer) for row in shards] == [(0, "0?", "0"), (1, "2?", "2")]


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        (None, None, "path is missing"),
        ("nowhere", None, "is not a folder"),
        (SAVED / "splits", None, r"holds several splits \(set split to one of train, test"),
        (SAVED / "splits", "dev", "has no split 'dev'"),
        (SAVED / "shards", "train", "without splits"),
        (SAVED, None, "holds no state.json.*kind=parquet"),
    ],
)
def test_what_is_no_saved_data_set_is_named(path, split, message):
    with pytest.raises(DataError, match=message):
        read_rows(SourceConfig(kind="datasets", path=None if path is None else str(path), split=split))


def test_a_damaged_file_of_a_saved_data_set_is_named(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with pytest.raises(DataError, match=r"data\.arrow: cannot be read"):
        read_rows(SourceConfig(kind="datasets", path=str(tmp_path)))
    (tmp_path / "data.arrow").write_text("not arrow")
    with pytest.raises(DataError, match=r"data\.arrow: is not an Arrow file"):
        read_rows(SourceConfig(kind="datasets", path=str(tmp_path)))
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"state\.json: is not what save_to_disk writes"):
        read_rows(SourceConfig(kind="datasets", path=str(tmp_path)))


def test_jsonl_keeps_messages_numbers_and_other_columns(tmp_path):
    rows = read_rows(SourceConfig(path=write_jsonl(tmp_path / "rows.jsonl", RECORDS)))
    assert [row.answer for row in rows] == ["1", "2", "3"]
    assert rows[2].question == [{"role": "user", "content": "three?"}]
    assert rows[1].extra == {"level": 4}


def test_a_glob_reads_files_by_name_and_numbers_rows_through(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", TEXTS[2:])
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:2])
    rows = read_rows(SourceConfig(path=str(tmp_path / "*.jsonl")))
    assert [(row.row, row.question) for row in rows] == [(0, "0?"), (1, "1?"), (2, "2?")]


def test_nested_columns_are_reached_by_a_path(tmp_path):
    record = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    for path, kind in [
        (write_jsonl(tmp_path / "r.jsonl", [record]), "jsonl"),
        (write_parquet(tmp_path / "r.parquet", [record]), "parquet"),
    ]:
        row = read_rows(SourceConfig(kind=kind, path=path, answer_column="reward_model.ground_truth"))[0]
        assert (row.answer, row.source, row.extra["reward_model"]["style"]) == ("4", "gsm8k", "rule")


def test_parquet_messages_come_back_as_they_were_written(tmp_path):
    # Columns of structs hold every key of the file: absent keys come back as null and must go.
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"xs": ["a"]}}}]},
        {"role": "tool", "content": "done"},
    ]
    path = write_parquet(tmp_path / "rows.parquet", [{"prompt": messages, "answer": "x"}])
    row = read_rows(SourceConfig(kind="parquet", path=path))[0]
    assert row.question == messages
    assert type(row.question[1]["tool_calls"]) is list  # type: ignore[index]


def test_columns_are_chosen_by_name(tmp_path):
    record = {"q": "one?", "a": 1.5, "set": "math", "functions": '[{"name": "f"}]', "level": 3, "notes": "long"}
    path = write_jsonl(tmp_path / "rows.jsonl", [record])
    config = SourceConfig(path=path, prompt_column="q", answer_column="a", source_column="set")
    config.tools_column, config.extra_columns = "functions", ["level"]
    row = read_rows(config)[0]
    assert (row.question, row.answer, row.source, row.tools) == ("one?", "1.5", "math", [{"name": "f"}])
    assert row.extra == {"level": 3}
    config.source_column = config.tools_column = config.extra_columns = None
    row = read_rows(config)[0]
    assert (row.source, row.tools, list(row.extra)) == ("jsonl", None, ["set", "functions", "level", "notes"])


def test_a_row_without_a_source_has_the_name_of_the_section(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [TEXTS[0], TEXTS[1] | {"data_source": "own"}])
    assert [row.source for row in read_source(SourceConfig(path=path), "gsm8k").rows] == ["gsm8k", "own"]


def test_rows_without_answers_are_allowed_when_said(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "one?"}])
    assert read_rows(SourceConfig(path=path, answer_column=None))[0].answer is None


def test_missing_files_and_foreign_files_are_named(tmp_path):
    with pytest.raises(DataError, match="path is missing"):
        read_rows(SourceConfig(kind="jsonl"))
    with pytest.raises(DataError, match="no file matches"):
        read_rows(SourceConfig(path=str(tmp_path / "*.jsonl")))
    with pytest.raises(DataError, match=r"is a folder \(give its files"):
        read_rows(SourceConfig(path=str(tmp_path)))
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: is not a parquet file"):
        read_rows(SourceConfig(kind="parquet", path=str(tmp_path / "rows.parquet")))


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="0 rows read"):
        read_rows(SourceConfig(path=str(tmp_path / "rows.jsonl")))


def test_reasoning_gym_cuts_the_question_by_the_pattern():
    config = SourceConfig(
        kind="reasoning_gym",
        task="spell_backward",
        params={"min_word_len": 3, "max_word_len": 5},
        size=50,
        seed=1,
        question_pattern=r": (\w+)$",
    )
    rows = read_rows(config)
    assert all(row.answer == row.text[::-1] and 3 <= len(row.text) <= 5 for row in rows)
    assert rows[0].extra["entry"]["question"].endswith(f": {rows[0].question}")


def test_rows_of_a_seed_do_not_depend_on_the_size():
    few = SourceConfig(kind="reasoning_gym", task="spell_backward", size=5, seed=1)
    many = SourceConfig(kind="reasoning_gym", task="spell_backward", size=9, seed=1, skip=3)
    assert read_rows(few)[3:] == read_rows(many)[:2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "spell_backwards"}, "did you mean spell_backward"),
        ({"task": None}, "task None is unknown"),
        ({"params": {"min_word": 3}}, "no parameter 'min_word'.*min_word_len"),
        ({"params": {"seed": 3}}, "no parameter 'seed'"),
        ({"params": {"min_word_len": 9, "max_word_len": 3}}, "refuses params"),
        ({"question_pattern": "(unclosed"}, "not a regular expression"),
        ({"question_pattern": "word"}, "has no group"),
        ({"question_pattern": "(zzz)"}, "does not match the question of row 0"),
    ],
)
def test_wrong_reasoning_gym_settings_are_named(changes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_rows(config_of("reasoning_gym", tmp_path, **changes))
