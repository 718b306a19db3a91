"""The tokenizer of the model that `megappo sft` starts with where it makes one."""

from transformers import PreTrainedTokenizerBase

from megappo.config.data import DataConfig
from megappo.data.sources import read_rows
from megappo.data.tokenizer import character_tokenizer
from megappo.data.types import Row


def starting_tokenizer(data: DataConfig) -> PreTrainedTokenizerBase:
    """Return a tokenizer of all characters in the training and validation rows. Raises DataError."""
    return character_tokenizer(
        {character for source in data.by_key().values() for row in read_rows(source) for character in _text(row)}
    )


def _text(row: Row) -> str:
    """Return everything a row will be tokenised from."""
    question = row.question
    asked = question if isinstance(question, str) else "".join(str(message["content"]) for message in question)
    return asked + (row.answer or "")
