import pytest

from megappo.data.supervised import supervised_pairs
from megappo.data.types import Prompt
from megappo.errors import DataError


def prompt(row: int, tokens: list[int], answer: str | None) -> Prompt:
    return Prompt(row=row, text="", tokens=tokens, answer=answer, source="test")


def test_pairs_are_packed_with_the_mask_on_answer_and_end_token(letters):
    batch = supervised_pairs([prompt(0, [4, 5, 3], "ba"), prompt(9, [6, 3], "")], letters)
    batch.validate()
    assert batch.offsets.tolist() == [0, 6, 9]
    assert batch.tokens.tolist() == [4, 5, 3, 5, 4, 1, 6, 3, 1]
    assert batch.response_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True]
    assert batch.sequence_ids.tolist() == batch.group_ids.tolist() == [0, 1]


def test_no_prompts_are_an_empty_batch(letters):
    batch = supervised_pairs([], letters)
    batch.validate()
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)


def test_a_row_without_answer_is_named(letters):
    with pytest.raises(DataError, match="test row 5 has no answer"):
        supervised_pairs([prompt(0, [4], "a"), prompt(5, [4], None)], letters)


def test_a_tokenizer_without_end_token_is_refused(letters):
    letters.eos_token = None
    with pytest.raises(DataError, match="no end token"):
        supervised_pairs([prompt(0, [4], "a")], letters)
