"""Every bad input: how a run refuses it, and under which reason it is counted where bad rows are left out."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megappo.config.data import BadRow, Duplicate, SourceConfig, TooLong
from megappo.data.prompts import PromptOptions, PromptSet, load_prompts
from megappo.data.sampler import PromptSampler
from megappo.data.sources import read_rows
from megappo.errors import DataError

GOOD = b'{"prompt": "ab", "answer": "1"}\n'


def load(config: SourceConfig, tokenizer: Any, **options: Any) -> PromptSet:
    return load_prompts(config, tokenizer, PromptOptions(max_prompt_tokens=options.pop("most", 8), **options))


def jsonl(folder: Path, line: bytes, **changes: Any) -> SourceConfig:
    """A good row, then the line."""
    (folder / "rows.jsonl").write_bytes(GOOD + line + b"\n")
    return SourceConfig(path=str(folder / "rows.jsonl"), **changes)


USER = {"role": "user", "content": "a"}
BAD_LINES: list[tuple[bytes, str, str]] = [
    (b'{"prompt": "a", "answer": "1"', "broken_line", r"rows\.jsonl:2: is not JSON: Expecting ',' delimiter"),
    (b"[" * 100_000, "broken_line", r"rows\.jsonl:2: is not JSON: .*recursion"),
    (b'["a"]', "broken_line", r"rows\.jsonl:2: must be a JSON object, found list"),
    (b'{"prompt": "a\xe9", "answer": "1"}', "not_utf8", r"rows\.jsonl:2: is not UTF-8: byte 0xe9 at byte 14"),
    (b'{"prompt": "a\\ud800", "answer": "1"}', "not_unicode", r"row 1: holds '\\ud800' at character 2"),
    (b'{"prompt": "a"}', "missing_column", r"2: column 'answer' is missing \(answer_column; the row has prompt\)"),
    (b'{"question": "a", "answer": "1"}', "missing_column", r"column 'prompt' is missing.*has question, answer"),
    (b"{}", "missing_column", r"column 'prompt' is missing.*the row has no columns"),
    (b'{"prompt": "a", "answer": null}', "null", r"rows\.jsonl:2: column 'answer' is null"),
    (b'{"prompt": null, "answer": "1"}', "null", r"rows\.jsonl:2: column 'prompt' is null"),
    (b'{"prompt": " ", "answer": "1"}', "empty", r"rows\.jsonl:2: column 'prompt' is empty"),
    (b'{"prompt": [], "answer": "1"}', "empty", r"rows\.jsonl:2: .*found an empty list"),
    (b'{"prompt": 3, "answer": "1"}', "wrong_type", r"column 'prompt' must be text or a list of messages.*found 3"),
    (b'{"prompt": [{"content": "a"}], "answer": "1"}', "wrong_type", r"a list of messages with a role"),
    (b'{"prompt": "a", "answer": ["1"]}', "wrong_type", r"column 'answer' must be text or a number, found \['1'\]"),
    (b'{"prompt": "a", "answer": true}', "wrong_type", r"column 'answer' must be text or a number, found True"),
    (b'{"prompt": "a", "answer": "1", "tools": "f"}', "wrong_type", r"column 'tools' holds text that is not JSON"),
    (b'{"prompt": "a", "answer": "1", "tools": [3]}', "wrong_type", r"column 'tools' must be a list of tool schemas"),
    (b'{"prompt": "a<eos>", "answer": "1"}', "rendered", r"holds the special token '<eos>'.*rendered=true"),
    (
        json.dumps({"prompt": [USER, {"role": "user", "content": "b<eos>"}], "answer": "1"}).encode(),
        "rendered",
        r"row 1: holds the special token '<eos>'",
    ),
    (b'{"prompt": "a", "answer": NaN}', "null", r"rows\.jsonl:2: column 'answer' is NaN"),
    (
        b'{"prompt": "a", "answer": "1", "data_source": {"a": 1}}',
        "wrong_type",
        r"column 'data_source' must be the name of a source, found \{'a': 1\}",
    ),
    (
        json.dumps({"prompt": [USER, {"role": "user", "content": 5}], "answer": "1"}).encode(),
        "wrong_type",
        r"message 2: content must be text or parts, found 5",
    ),
    (
        json.dumps({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "answer": "1"}).encode(),
        "template",
        r"row 1: the chat template takes texts, and a message has a list of parts",
    ),
    (json.dumps({"prompt": [{"role": "user", "content": " "}], "answer": "1"}).encode(), "empty", r"hold no text"),
    (
        json.dumps({"prompt": [USER, {"role": "assistant", "content": "b"}], "answer": "1"}).encode(),
        "template",
        r"jsonl row 1: the messages end with an answer",
    ),
    (
        json.dumps({"prompt": [{"role": "user"}], "answer": "1"}).encode(),
        "null",
        r"rows\.jsonl:2: column 'prompt': message 1 has no content",
    ),
    (
        json.dumps({"prompt": "a", "answer": "1", "tools": [{"name": "f"}]}).encode(),
        "template",
        r"jsonl row 1: has tools, which the chat template does not show",
    ),
]


@pytest.mark.parametrize(("line", "reason", "message"), BAD_LINES)
def test_a_bad_row_is_refused_by_name_or_left_out_and_counted(letters, tmp_path, line, reason, message):
    with pytest.raises(DataError, match=message) as refused:
        load(jsonl(tmp_path, line), letters)
    assert f"1 of 2 rows cannot be used (1 {reason}; mend them, or set on_bad_row=filter" in str(refused.value)
    kept = load(jsonl(tmp_path, line, on_bad_row=BadRow.filter), letters)
    assert [prompt.row for prompt in kept.prompts] == [0]
    assert (kept.rows, kept.filtered) == (2, {reason: 1})


def test_of_many_bad_rows_some_are_named_and_all_are_counted(letters, tmp_path):
    config = jsonl(tmp_path, b'{"prompt": null}\n' * 7 + b"{")
    with pytest.raises(DataError) as refused:
        load(config, letters)
    lines = str(refused.value).splitlines()
    assert "8 of 9 rows cannot be used (7 null, 1 broken_line" in lines[0]
    assert [line.split(":")[1] for line in lines[1:6]] == ["2", "3", "4", "5", "6"]
    assert lines[6] == "  ... and 3 more"


def test_readers_of_bare_rows_refuse_and_leave_out_likewise(tmp_path):
    with pytest.raises(DataError, match="1 of 2 rows cannot be used"):
        read_rows(jsonl(tmp_path, b"{"))
    assert [row.row for row in read_rows(jsonl(tmp_path, b"{\n" + GOOD, on_bad_row=BadRow.filter))] == [0, 2]
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(DataError, match="1 of 1 rows cannot be used"):
        read_rows(SourceConfig(path=str(tmp_path / "rows.jsonl"), on_bad_row=BadRow.filter))


def test_duplicates_are_kept_left_out_or_refused(letters, tmp_path):
    line = b'{"prompt": "a", "answer": "1"}\n' + GOOD + GOOD
    kept = load(jsonl(tmp_path, line), letters)
    assert (len(kept.prompts), kept.duplicates, kept.filtered) == (4, 2, {})
    left = load(jsonl(tmp_path, line, on_duplicate=Duplicate.filter), letters)
    assert ([prompt.row for prompt in left.prompts], left.filtered) == ([0, 1], {"duplicate": 2})
    with pytest.raises(DataError, match=r"2 of 4 rows.*on_duplicate(.|\n)*row 2: has the prompt of row 0"):
        load(jsonl(tmp_path, line, on_duplicate=Duplicate.refuse), letters)


def test_long_prompts_are_left_out_or_refused(letters, tmp_path):
    config = jsonl(tmp_path, b'{"prompt": "abcd", "answer": "1"}')
    left = load(config, letters, most=4)
    assert ([prompt.row for prompt in left.prompts], left.filtered) == ([0], {"too_long": 1})
    with pytest.raises(DataError, match=r"raise data.max_prompt_tokens(.|\n)*row 1: has 5 tokens.*=4: 'abcd>'"):
        load(config, letters, most=4, on_too_long=TooLong.refuse)


def test_prompts_without_tokens_are_bad_rows(bos_tokenizer, tmp_path):
    # This template shows nothing of these messages, and this tokenizer has no begin token to add.
    line = json.dumps({"prompt": [{"role": "tool", "content": "a"}], "answer": "1"}).encode()
    tokenizer = bos_tokenizer("{% if messages[0]['role'] == 'user' %}{{ messages[0]['content'] }}{% endif %}")
    tokenizer.backend_tokenizer.post_processor = None  # type: ignore[union-attr]
    with pytest.raises(DataError, match="row 1: has no tokens"):
        load(jsonl(tmp_path, line), tokenizer)
    assert load(jsonl(tmp_path, line, on_bad_row=BadRow.filter), tokenizer).filtered == {"empty": 1}


def test_rendered_texts_are_taken_as_they_stand_and_messages_are_refused(letters, tmp_path):
    taken = load(jsonl(tmp_path, b'{"prompt": "a<eos>b>", "answer": "1"}', rendered=True), letters)
    assert [(prompt.text, prompt.tokens) for prompt in taken.prompts] == [("ab", [4, 5]), ("a<eos>b>", [4, 1, 5, 3])]
    line = json.dumps({"prompt": [USER], "answer": "1"}).encode()
    with pytest.raises(DataError, match="rendered=true takes texts, found messages"):
        load(jsonl(tmp_path, line, rendered=True), letters)


def test_a_byte_order_mark_and_line_ends_of_other_systems_are_read(letters, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.rstrip() + b"\r\n\r\n" + GOOD)
    assert len(load(SourceConfig(path=str(tmp_path / "rows.jsonl")), letters).prompts) == 2


@pytest.mark.parametrize(
    ("content", "size", "skip", "message"),
    [
        (b"", None, 0, r"has no rows left: 0 rows read \(size=None\), skip=0"),
        (b"\n \n", None, 0, "0 rows read"),
        (GOOD, None, 1, "1 rows read .*skip=1 left out"),
        (GOOD * 3, 2, 2, r"2 rows read \(size=2\), skip=2"),
    ],
)
def test_an_empty_set_is_refused_with_its_numbers(letters, tmp_path, content, size, skip, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(SourceConfig(path=str(tmp_path / "rows.jsonl"), size=size, skip=skip), letters)


def test_a_set_of_which_nothing_is_left_is_refused_with_an_example_of_each_reason(letters, tmp_path):
    config = jsonl(tmp_path, b"{\n[]\n", on_bad_row=BadRow.filter)
    with pytest.raises(
        DataError, match=r"0 of 3 rows left \(1 too_long, 2 broken_line; max_prompt_tokens=1\)"
    ) as error:
        load(config, letters, most=1)
    lines = str(error.value).splitlines()[1:]
    assert sorted("tokens" if "tokens" in line else "JSON" for line in lines) == ["JSON", "tokens"]


def test_fewer_rows_than_a_batch_are_refused(letters, tmp_path):
    prompts = load(jsonl(tmp_path, GOOD), letters).prompts
    with pytest.raises(DataError, match=r"2 prompts are fewer than one batch of 4 \(give more rows, or lower batching"):
        PromptSampler(prompts, batch_size=4, seed=0, shuffle=True)


def parquet_of(folder: Path, table: pyarrow.Table, name: str = "rows.parquet") -> str:
    pyarrow.parquet.write_table(table, folder / name)
    return str(folder / name)


def test_bad_rows_of_parquet_are_named_by_file_and_row(letters, tmp_path):
    path = parquet_of(tmp_path, pyarrow.table({"prompt": ["a", None], "answer": [1, 2]}))
    with pytest.raises(DataError, match=r"rows\.parquet row 2: column 'prompt' is null"):
        load(SourceConfig(kind="parquet", path=path), letters)
    path = parquet_of(tmp_path, pyarrow.table({"text": ["a"]}))
    with pytest.raises(DataError, match=r"row 1: column 'prompt' is missing \(prompt_column; the row has text\)"):
        load(SourceConfig(kind="parquet", path=path), letters)


def test_parquet_that_is_empty_cut_off_or_not_utf8_is_named(letters, tmp_path):
    path = parquet_of(tmp_path, pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}))
    with pytest.raises(DataError, match="0 rows read"):
        load(SourceConfig(kind="parquet", path=path), letters)
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"a\xe9"]).buffers())
    path = parquet_of(tmp_path, pyarrow.table({"prompt": broken, "answer": [1]}))
    with pytest.raises(DataError, match=r"rows\.parquet: a text column is not UTF-8, in rows 1 to 1"):
        load(SourceConfig(kind="parquet", path=path), letters)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(Path(path).read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet: is not a parquet file that can be read"):
        load(SourceConfig(kind="parquet", path=str(cut)), letters)


def test_compressed_lines_are_read_by_the_ending_of_the_name(letters, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD + GOOD))
    assert len(load(SourceConfig(path=str(path)), letters).prompts) == 2
    path.write_bytes(gzip.compress(GOOD * 1000)[:-30])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        load(SourceConfig(path=str(path)), letters)
    path.write_bytes(GOOD)
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz: cannot be read: Not a gzipped file"):
        load(SourceConfig(path=str(path)), letters)
