"""Which tokens of a conversation are the assistant's, exactly.

A span of the rendered text comes from the template itself where it marks what the assistant generates
(`{% generation %}`), else from the difference of two renderings: of the messages before the answer with the generation
prompt, and of the messages up to and with the answer. Either way every edge of a span must be an edge between tokens:
those of the text before it, taken alone, must be the first ones of the conversation's. What is before an answer is then
what a model gets as its prompt, and the answer what it would have to sample. A template of which that does not hold is
refused.

Invariants (asserted by tests/data/test_conversation.py):
1. Tokens before an edge are those that `megappo.data.chat` gives for the text before it.
2. What the template writes after the last special token of an answer (a newline, in most) is not trained on: a model
   that has sampled its end token samples no more.
3. No token of a message that is not chosen is trained on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megappo.config.supervised import TrainOn
from megappo.data.chat import encode
from megappo.data.types import Message, Row
from megappo.errors import DataError

_ASSISTANT = "assistant"
_MARKED = "train"
"""Key of a message by which train_on=marked chooses it."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(kw_only=True, slots=True, frozen=True)
class Conversation:
    """A conversation as tokens."""

    tokens: np.ndarray
    """[n] int32."""
    mask: np.ndarray
    """[n] bool, True on the tokens that are trained on."""
    has_end: bool
    """Whether each answer ends with a special token; if not, the model does not learn to end it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Rendered:
    """The text of a conversation and the answers in it."""

    row: Row
    text: str
    spans: list[tuple[int, int]]
    """Characters of each chosen answer, ascending."""

    @property
    def edges(self) -> list[int]:
        return [edge for span in self.spans for edge in span]


def encode_conversations(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, train_on: TrainOn
) -> list[Conversation]:
    """Return the tokens of conversations, given as the questions of rows, with the mask on the chosen answers.

    Raises:
        DataError: a conversation has no answer to train on or an empty one, or the chat template shows it so that the
            mask would not be exact; names the row.
    """
    rendered = [_render(row, tokenizer, train_on) for row in rows]
    texts = [text for one in rendered for text in (one.text, *(one.text[:edge] for edge in one.edges))]
    encoded = iter(encode(texts, tokenizer))
    special = set(tokenizer.all_special_ids)
    conversations: list[Conversation] = []
    for one in rendered:
        tokens = next(encoded)
        edges = [_edge(one, tokens, next(encoded), edge) for edge in one.edges]
        conversations.append(_masked(tokens, edges, tokenizer, special))
    return conversations


def _render(row: Row, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> _Rendered:
    assert not isinstance(row.question, str)
    chosen = _chosen(row, row.question, train_on)
    messages = [{key: value for key, value in message.items() if key != _MARKED} for message in row.question]
    if tokenizer.chat_template is None:
        raise DataError(f"{_place(row)}: a conversation needs a chat template, and the tokenizer has none")
    template = tokenizer.get_chat_template(tools=_tools(row))
    if row.tools and "tools" not in template:
        raise DataError(f"{_place(row)}: has tools, which the chat template does not show")
    find = _marked_spans if _GENERATION.search(template) else _difference_spans
    text, spans = find(row, messages, chosen, _Template(text=template, special=tokenizer.special_tokens_map))
    return _Rendered(row=row, text=text, spans=spans)


def _chosen(row: Row, messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """Return the positions of the messages to train on."""
    answers = [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
    if train_on is TrainOn.marked:
        marked = [number for number, message in enumerate(messages) if message.get(_MARKED)]
        if others := sorted(set(marked) - set(answers)):
            role = messages[others[0]]["role"]
            raise DataError(f"{_place(row)}: message {others[0]} has train=true and is the {role}'s, no answer")
        answers = marked
    if not answers:
        raise DataError(
            f"{_place(row)}: no message to train on with train_on={train_on.name} (messages with role=assistant, with "
            "train_on=marked those that have train=true, too)"
        )
    chosen = answers[-1:] if train_on is TrainOn.last_assistant else answers
    for number in chosen:
        content = messages[number].get("content")
        if not messages[number].get("tool_calls") and not (content.strip() if isinstance(content, str) else content):
            raise DataError(f"{_place(row)}: message {number}, an answer to train on, is empty")
    return chosen


@dataclass(kw_only=True, slots=True, frozen=True)
class _Template:
    """A chat template and the special tokens that it may write."""

    text: str
    # Any: token names to tokens, as transformers types them.
    special: dict[str, Any]

    def render(
        self, row: Row, messages: Sequence[Message], *, generation_prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and with `marks` the characters of what the template says the assistant generates."""
        # jinja2 comes with transformers' chat templates.
        from jinja2 import TemplateError

        tools: Any = _tools(row)
        # Any: transformers declares another type than it returns.
        rendered: Any
        try:
            rendered = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=marks,
                **self.special,
            )
        except (TemplateError, TypeError) as error:
            raise DataError(f"{_place(row)}: the chat template refuses the messages: {error}") from error
        texts, spans = rendered
        return texts[0], [tuple(span) for span in spans[0]] if marks else []


def _marked_spans(
    row: Row, messages: Sequence[Message], chosen: Sequence[int], template: _Template
) -> tuple[str, list[tuple[int, int]]]:
    """Take the spans that the template marks; the k-th is the k-th answer's."""
    text, spans = template.render(row, messages, marks=True)
    answers = [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
    ordered = all(one[1] <= other[0] for one, other in pairwise(spans))
    if len(spans) != len(answers) or not ordered or any(start >= end for start, end in spans):
        raise DataError(
            f"{_place(row)}: the chat template marks {len(spans)} pieces of text for {len(answers)} answers, so it is "
            "not known which is whose (put each answer, its end token included, in one {% generation %} block)"
        )
    return text, [span for number, span in zip(answers, spans) if number in chosen]


def _difference_spans(
    row: Row, messages: Sequence[Message], chosen: Sequence[int], template: _Template
) -> tuple[str, list[tuple[int, int]]]:
    """Find each answer between what is shown before it and what is shown with it."""
    text, _ = template.render(row, messages)
    spans: list[tuple[int, int]] = []
    for number in chosen:
        before, _ = template.render(row, messages[:number], generation_prompt=True)
        with_answer, _ = template.render(row, messages[: number + 1])
        if not (with_answer.startswith(before) and text.startswith(with_answer) and len(before) < len(with_answer)):
            raise DataError(
                f"{_place(row)}: the chat template shows message {number} in another way once others follow, or does "
                "not begin it with its generation prompt, so what to train on is not exact (use "
                "train_on=last_assistant, or a template with {% generation %} blocks)"
            )
        spans.append((len(before), len(with_answer)))
    return text, spans


def _edge(one: _Rendered, tokens: list[int], before: list[int], edge: int) -> int:
    """Return the number of tokens before an edge of the text."""
    if tokens[: len(before)] != before:
        around = one.text[max(0, edge - 10) : edge + 10]
        raise DataError(
            f"{_place(one.row)}: the tokenizer joins text of both sides of an answer's edge ({around!r}), so what to "
            "train on is not exact (use a chat template that writes special tokens there)"
        )
    return len(before)


def _masked(
    tokens: list[int], edges: Sequence[int], tokenizer: PreTrainedTokenizerBase, special: set[int]
) -> Conversation:
    mask = np.zeros(len(tokens), bool)
    has_end = True
    for start, end in zip(edges[::2], edges[1::2]):
        last = max((number for number in range(start, end) if tokens[number] in special), default=None)
        rest = "" if last is None else tokenizer.decode(tokens[last + 1 : end])
        ends = last is not None and isinstance(rest, str) and not rest.strip()
        mask[start : last + 1 if ends and last is not None else end] = True
        has_end = has_end and ends
    return Conversation(tokens=np.array(tokens, np.int32), mask=mask, has_end=has_end)


def _place(row: Row) -> str:
    return f"{row.source} row {row.row}"


def _tools(row: Row) -> Any:  # Any: JSON schemas
    return row.tools or None
