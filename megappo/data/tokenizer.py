"""Tokenizers: loading from a folder, text of sampled tokens, and the character tokenizer of small models."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megappo.errors import DataError

GENERATION_PROMPT = ">"
"""What the chat template of the character tokenizer writes before an answer."""
UNKNOWN = "\ufffd"
"""Stands for a sampled id that the tokenizer has no token for (vocabularies of models are often padded)."""

_CHARACTER_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; nothing is downloaded.

    Raises:
        DataError: the folder is missing, holds no tokenizer, or the tokenizer has no end token.
    """
    if not Path(path).is_dir():
        raise DataError(f"tokenizer: {path!r} is not a folder (set model.path to a Hugging Face model folder)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"tokenizer: {path} holds no tokenizer that can be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer: {path} has no end token (set eos_token in its tokenizer_config.json)")
    return tokenizer


def decode_response(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return the text of sampled tokens without a special token at their end.

    Special tokens inside the response stay visible and ids unknown to the tokenizer become U+FFFD: what a reward sees
    must not look right when the tokens are not.
    """
    kept = list(tokens)
    if kept and kept[-1] in tokenizer.all_special_ids:
        kept.pop()
    text, known = "", []
    for token in kept:
        if token < len(tokenizer):
            known.append(token)
        else:
            text += _decode(tokenizer, known) + UNKNOWN
            known = []
    return text + _decode(tokenizer, known)


def character_tokenizer(characters: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character.

    Ids: <pad> 0, <eos> 1, <unk> 2, then the characters (the generation prompt '>' included) in code point order. No
    begin token. The chat template writes the messages one after the other, '>' before each answer.
    """
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>"])}
    for character in sorted(set(characters) | {GENERATION_PROMPT}):
        if len(character) != 1:
            raise DataError(f"character_tokenizer: {character!r} is not one character (give an iterable of characters)")
        vocabulary[character] = len(vocabulary)
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHARACTER_TEMPLATE,
    )


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without any special token added."""
    # A tokenizer refuses an empty list.
    encoded: Any = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    return encoded


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # decode gives a list only for a list of lists
    return text
