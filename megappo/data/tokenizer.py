"""Tokenizers: loading from a folder, text of sampled tokens, and the character tokenizer of small models."""

import json
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

_TOKENIZER_FILE = "tokenizer.json"
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that add nothing to tokenizer.json. AutoTokenizer takes another one in their place for some types of models
(MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in transformers' tokenization_auto.py, qwen2 among them), which splits text
in its own way and leaves out what it then does not know."""

_CHARACTER_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; nothing is downloaded.

    Args:
        chat_template: see `DataConfig.chat_template`.

    Raises:
        DataError: the folder is missing, holds no tokenizer, the tokenizer has no end token, or the chat template is
            none.
    """
    if not Path(path).is_dir():
        raise DataError(f"tokenizer: {path!r} is not a folder (set model.path to a Hugging Face model folder)")
    try:
        tokenizer = _tokenizer_class(Path(path)).from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"tokenizer: {path} holds no tokenizer that can be loaded: {error}") from error
    # Without files transformers makes one of the model's type that knows no text.
    files = sorted({_TOKENIZER_FILE, *tokenizer.vocab_files_names.values()})
    if not any((Path(path) / file).is_file() for file in files):
        raise DataError(f"tokenizer: {path} holds no tokenizer: none of {', '.join(files)} (copy the model's there)")
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer: {path} has no end token (set eos_token in its tokenizer_config.json)")
    return with_chat_template(tokenizer, chat_template)


def _tokenizer_class(folder: Path) -> Any:  # Any: classes that share no more than `from_pretrained`
    """Return what loads the tokenizer as it was saved."""
    config = folder / "tokenizer_config.json"
    saved: Any = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    is_generic = saved.get("tokenizer_class") in _GENERIC and (folder / _TOKENIZER_FILE).is_file()
    return PreTrainedTokenizerFast if is_generic else AutoTokenizer


def with_chat_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> PreTrainedTokenizerBase:
    """Give a tokenizer the template of `DataConfig.chat_template`; None: it keeps its own. Raises DataError where the
    template is none."""
    if given is not None:
        tokenizer.chat_template = read_template(given) or None
        _check_syntax(tokenizer)
    return tokenizer


def read_template(given: str) -> str:
    """Return the text of a chat template that is given as a file or as itself. Raises DataError."""
    if not given.endswith((".jinja", ".jinja2")):
        if given and "{" not in given:
            raise DataError(f"data.chat_template={given} writes no message (give a file *.jinja, or a template)")
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template={given} cannot be read: {error}") from error


def _check_syntax(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError where the chat template is none; that it refuses a conversation is another matter."""
    # jinja2 comes with transformers' chat templates.
    from jinja2 import TemplateSyntaxError

    try:
        if tokenizer.chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise DataError(f"data.chat_template: is no template, line {error.lineno}: {error.message}") from error
    except Exception:  # a template is code: rows that it refuses are told of by themselves
        return


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
