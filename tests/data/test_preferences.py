"""The rules listed in megappo/data/preferences.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megappo.config.data import BadRow, SourceConfig
from megappo.data.preferences import PairColumns, TextLimits, load_preferences, score_tokens
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import DataError

LETTERS = character_tokenizer("abcd <eos>")
"""Ids: <pad> 0, <eos> 1; its template writes the messages one after the other and '>' before each answer."""
NO_LIMIT = TextLimits(max_tokens=None, pad_token_id=0)


def source_of(folder: Path, *rows: dict[str, Any]) -> SourceConfig:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(kind="jsonl", path=str(path))


def texts_of(source: SourceConfig, **columns: Any) -> list[str]:
    """The texts of all pairs, as decoded tokens."""
    found = load_preferences(source, PairColumns(**columns), LETTERS, NO_LIMIT).pairs
    assert (found.tokens[found.offsets[1:] - 1] == 0).all()
    spans = zip(found.offsets, found.offsets[1:] - 1)
    return [str(LETTERS.decode(found.tokens[start:stop].tolist())) for start, stop in spans]


def test_whole_texts_are_taken_as_they_stand_and_ended_once(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"chosen": "ab", "rejected": "ba<eos> \n"})
    assert texts_of(source) == ["ab<eos>", "ba<eos>"]


def test_a_prompt_is_rendered_as_for_sampling(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"good": "a", "bad": {"text": "b"}, "question": "cd"})
    assert texts_of(source, chosen="good", rejected="bad.text", prompt="question") == ["cd>a<eos>", "cd>b<eos>"]


@pytest.mark.parametrize("with_prompt", [False, True])
def test_conversations_are_rendered_up_to_the_answer(tmp_path: Path, with_prompt: bool) -> None:
    before = [{"role": "user", "content": "d"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    pair = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "a"), ("rejected", "bb"))}
    if with_prompt:
        source = source_of(tmp_path, {**pair, "prompt": before})
    else:
        source = source_of(tmp_path, {name: before + answer for name, answer in pair.items()})
    texts = texts_of(source, prompt="prompt" if with_prompt else None)
    assert texts == ["d>c<eos>d>a<eos>", "d>c<eos>d>bb<eos>"]


def test_pairs_are_packed_one_behind_the_other(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, {"chosen": "ab", "rejected": "c", "by": 2}, {"chosen": "d", "rejected": "ddd", "by": 0.5}
    )
    pairs = load_preferences(source, PairColumns(margin="by"), LETTERS, NO_LIMIT).pairs
    pairs.validate()
    assert pairs.lengths.tolist() == [4, 3, 3, 5]
    assert pairs.sequence_ids.tolist() == [0, 1, 2, 3]
    assert pairs.pair_ids.tolist() == [0, 0, 1, 1]
    assert pairs.is_chosen.tolist() == [True, False, True, False]
    assert pairs.margins.tolist() == [2, 2, 0.5, 0.5]
    assert np.flatnonzero(pairs.ends).tolist() == [3, 6, 9, 14]


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    source = source_of(
        tmp_path,
        {"chosen": "ab", "rejected": "ab<eos>"},
        {"chosen": "a", "rejected": " "},
        {"chosen": "\n", "rejected": "a"},
        {"chosen": "abc", "rejected": "d"},
        {"chosen": "ab", "rejected": "d"},
    )
    found = load_preferences(source, PairColumns(), LETTERS, TextLimits(max_tokens=3, pad_token_id=0))
    assert found.filtered == {"equal": 1, "empty": 2, "too_long": 1}
    assert found.pairs.lengths.tolist() == [4, 3]
    with pytest.raises(DataError, match=r"0 of 5 rows left \(2 empty, 3 too_long; most tokens of a text: 2;"):
        load_preferences(source, PairColumns(), LETTERS, TextLimits(max_tokens=2, pad_token_id=0))


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"chosen": "a"}, {}, r"row 0: column 'rejected' is missing or null \(.*; the row has no others\)"),
        ({"chosen": "a", "rejected": None}, {}, "column 'rejected' is missing or null"),
        ({"chosen": "a", "rejected": 3}, {}, "column 'rejected' must be text or a list of messages with a role, found"),
        (
            {"chosen": "a", "rejected": "b", "by": "x"},
            {"margin": "by"},
            "column 'by' must be a finite number, found 'x'",
        ),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": "b"},
            {},
            "must end with a text of the assistant, found {'role': 'user'",
        ),
        (
            {"chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
            {},
            r"is one answer to nothing \(set rm.prompt_column",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_preferences(source_of(tmp_path, row), PairColumns(**columns), LETTERS, NO_LIMIT)


def test_rows_that_are_no_pairs_are_told_of_together_or_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"chosen": "a"}, {"chosen": 1, "rejected": "b"}, {"chosen": "a", "rejected": "b"}]
    source = source_of(tmp_path, *rows, {"chosen": "a", "rejected": None})
    with pytest.raises(DataError) as caught:
        load_preferences(source, PairColumns(), LETTERS, NO_LIMIT)
    head, *others = str(caught.value).splitlines()
    assert "3 of 4 rows cannot be used (1 wrong_type, 2 no_pair; mend them, or set on_bad_row=filter" in head
    assert [line.split(": column ")[0].rpartition("/")[2].strip() for line in others] == [
        "pairs.jsonl:2",
        "jsonl row 0",
        "jsonl row 3",
    ]
    found = load_preferences(replace(source, on_bad_row=BadRow.filter), PairColumns(), LETTERS, NO_LIMIT)
    assert found.filtered == {"bad": 3} and len(found.lengths) == 1


def test_only_an_answer_that_ended_gets_an_end_token_and_padding_does_not_count() -> None:
    texts, ended = ["ab", "ab", "ab<eos>", "ab<pad><pad>"], [True, False, False, False]
    found = score_tokens(texts, ended, LETTERS, pad_token_id=0)
    letters = [LETTERS.convert_tokens_to_ids("a"), LETTERS.convert_tokens_to_ids("b")]
    assert found == [[*letters, 1], letters, [*letters, 1], letters]
    # The end token as padding: the score is read before it, as transformers' models do.
    assert score_tokens(["ab"], [True], LETTERS, pad_token_id=1) == [letters]
