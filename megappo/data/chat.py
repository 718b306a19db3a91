"""From a row to the tokens that the engine gets: rendered once, tokenised once.

The same ids serve generation and training, so nothing is ever rendered or tokenised a second time.

Rules (asserted by tests/data/test_chat.py):
1. With a chat template: a plain question is the one user message of a conversation; the template adds its generation
   prompt.
2. Without one (a base model): a plain question is the prompt as it stands; the contents of messages are joined by
   blank lines. Nothing else is added, so the prompt must lead to the answer by itself.
3. Begin token: exactly one, in front, if the template writes it or the tokenizer adds one by default; never two.
   An end token is never added, even by tokenizers that do so by default.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megappo.data.tokenizer import encode_all
from megappo.data.types import Message, Row
from megappo.errors import DataError


def render(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt text of a row, generation prompt included.

    Raises:
        DataError: the conversation ends with an answer, a content is not text where there is no template, or the
            chat template refuses the messages or shows no tools.
    """
    messages = [{"role": "user", "content": row.question}] if isinstance(row.question, str) else row.question
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{row.source} row {row.row}: the messages end with an answer (end with a user message)")
    if tokenizer.chat_template is None:
        return _plain(row, messages)
    tools: Any = row.tools
    if tools and "tools" not in str(tokenizer.chat_template):
        raise DataError(f"{row.source} row {row.row}: has tools, which the chat template does not show")
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is code: it may raise anything
        raise DataError(f"{row.source} row {row.row}: the chat template refuses the messages: {error}") from error
    assert isinstance(text, str)  # tokenize=False
    if any(isinstance(message.get("content"), list) and str(message["content"]) in text for message in messages):
        raise DataError(f"{row.source} row {row.row}: the chat template takes texts, and a message has a list of parts")
    return text


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of rendered prompts (rule 3)."""
    begin = _default_begin(tokenizer)
    return [begin + ids if ids[: len(begin)] != begin else ids for ids in encode_all(tokenizer, texts)]


def _default_begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [begin id] if the tokenizer puts it in front by default, else []."""
    begin: Any = tokenizer.bos_token_id
    added: Any = tokenizer("a")["input_ids"]
    return [begin] if begin is not None and added[:1] == [begin] else []


def _plain(row: Row, messages: list[Message]) -> str:
    if row.tools or not all(isinstance(message.get("content"), str) for message in messages):
        raise DataError(
            f"{row.source} row {row.row}: has tools or a message without text (use a tokenizer with a chat template)"
        )
    return row.text
