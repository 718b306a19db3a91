"""Rows of supervised training: prompt/answer pairs and conversations, limits, what is left out and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megappo.config.data import BadRow, SourceConfig
from megappo.config.supervised import OverLong, TrainOn
from megappo.data.supervised import SupervisedRows, load_supervised_rows
from megappo.errors import DataError

PAIR = {"prompt": "ab", "answer": "ba"}
TALK = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]}


def load(
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    max_tokens: int | None = None,
    over_long: OverLong = OverLong.filter,
    on_bad_row: BadRow = BadRow.refuse,
) -> SupervisedRows:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(
        path=str(path), answer_column="answer" if "answer" in rows[0] else None, on_bad_row=on_bad_row
    )
    return load_supervised_rows(
        source, tokenizer, train_on=TrainOn.assistant, max_tokens=max_tokens, over_long=over_long
    )


def test_pairs_are_packed_with_the_mask_on_answer_and_end_token(
    letters: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    batch = load(letters, tmp_path, [PAIR, {"prompt": "c", "answer": "d"}]).batch
    batch.validate()
    assert batch.offsets.tolist() == [0, 6, 10]
    assert batch.tokens.tolist() == [4, 5, 3, 5, 4, 1, 6, 3, 7, 1]
    assert batch.response_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    assert batch.sequence_ids.tolist() == batch.group_ids.tolist() == [0, 1]


def test_conversations_are_rows_without_an_answer_column(letters: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    batch = load(letters, tmp_path, [TALK]).batch
    assert batch.tokens.tolist() == [4, 3, 5, 5, 1]
    assert batch.response_mask.tolist() == [False, False, True, True, True]


LONG = [PAIR, {"prompt": "abcdabcd", "answer": "a"}, {"prompt": "a", "answer": "abcdabcd"}]


def test_longer_rows_are_left_out_and_counted(letters: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = load(letters, tmp_path, LONG, max_tokens=6)
    assert (rows.batch.num_sequences, rows.counts) == (1, {"too_long": 2})


def test_longer_rows_are_cut_off_where_something_to_train_on_remains(
    letters: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = load(letters, tmp_path, LONG, max_tokens=6, over_long=OverLong.truncate)
    assert rows.counts == {"too_long": 1, "cut_off": 1}
    assert rows.batch.tokens.tolist() == [4, 5, 3, 5, 4, 1, 4, 3, 4, 5, 6, 7]
    assert rows.batch.response_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 4


def test_the_fingerprint_tells_other_tokens_and_another_mask(letters: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    first, again = load(letters, tmp_path, [TALK]), load(letters, tmp_path, [TALK])
    pair = load(letters, tmp_path, [{"prompt": "a", "answer": "bb"}])
    other = load(letters, tmp_path, [{"prompt": "b", "answer": "bb"}])
    pair.batch.response_mask[1] = True
    assert first.fingerprint == again.fingerprint
    assert len({first.fingerprint, pair.fingerprint, other.fingerprint}) == 3


BAD: list[tuple[list[dict[str, Any]], str]] = [
    ([{"prompt": "ab"}], "row 0 has no answer"),
    ([PAIR, {"prompt": "a", "answer": ""}], "row 1 has an empty answer"),
    ([{"prompt": [*TALK["prompt"]], "answer": "b"}], "row 0: the messages end with an answer"),
    ([{"prompt": "abcdabcd", "answer": "abcd"}], r"0 of 1 rows left \(1 too_long; at most 6 tokens\)"),
]


@pytest.mark.parametrize(("rows", "message"), BAD)
def test_rows_that_cannot_be_trained_on_are_named(
    rows: list[dict[str, Any]], message: str, letters: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(letters, tmp_path, rows, max_tokens=6)


def test_bad_rows_are_left_out_and_counted_where_that_is_asked_for(
    letters: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    empty = {"prompt": "b", "answer": ""}
    mixed = [PAIR, empty, {"prompt": "c", "answer": "d"}, PAIR, empty]
    rows = load(letters, tmp_path, mixed, on_bad_row=BadRow.filter)
    assert rows.counts == {"bad": 2}
    assert rows.batch.tokens.tolist() == [4, 5, 3, 5, 4, 1, 6, 3, 7, 1, 4, 5, 3, 5, 4, 1]
