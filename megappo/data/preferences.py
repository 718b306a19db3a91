"""Preference pairs, and the tokens of a text that a reward model scores.

A text to be scored is what the policy would have read and written: the prompt as it is rendered for sampling
(`data.chat`), the answer, and the end token of the reward model's tokenizer where the answer ended by itself. So what a
reward model is trained on looks like what it scores later.

Rules (asserted by tests/data/test_preferences.py):
1. An end token is at the end once, also where the text has written it already, with or without white space behind.
2. Padding at the end of a text does not count: with a pad token that is the end token, transformers' models read the
   score before it, and so must others.
3. Both texts of a pair are left out together, for one reason.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megappo.batch.fields import fingerprint_of, offsets_of
from megappo.batch.stages import PreferenceBatch, TextBatch
from megappo.config.data import BadRow, SourceConfig
from megappo.data.chat import encode, render
from megappo.data.sources import BAD_ROW_REMEDY, read_source, refusal
from megappo.data.types import LeftOut, Message, Row
from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class PairColumns:
    """Where a row has what; `a.b` reaches into a nested column."""

    chosen: str = "chosen"
    rejected: str = "rejected"
    prompt: str | None = None
    """None: the two are whole texts or conversations."""
    margin: str | None = None
    """None: all margins are 0."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TextLimits:
    """Which token sequences a reward model can score."""

    max_tokens: int | None
    """Of one text; None: any number."""
    pad_token_id: int | None
    """Of its config.json."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PreferenceSet:
    """The pairs that are left and why others are not."""

    pairs: PreferenceBatch
    """The preferred text of pair p is sequence 2 p, the other one 2 p + 1."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Reason (`too_long`, `empty`, `equal`, `bad`: no pair) -> rows; reasons without rows are absent."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of both texts of each pair, [pairs] int64."""
        return self.pairs.lengths.reshape(-1, 2).sum(axis=1) - 2

    @property
    def fingerprint(self) -> str:
        """Digest of texts and margins, in order."""
        return fingerprint_of(self.pairs.offsets, self.pairs.tokens, self.pairs.margins)


def load_preferences(
    source: SourceConfig, columns: PairColumns, tokenizer: PreTrainedTokenizerBase, limits: TextLimits
) -> PreferenceSet:
    """Read, render and tokenise the pairs of a source.

    Raises:
        DataError: a row is no pair and `source.on_bad_row` is `refuse`, or no pair is left.
    """
    found = read_source(replace(source, prompt_column=columns.chosen, answer_column=None))
    total = len(found.rows) + len(found.left_out)
    # An answer without text is no fault of the row, whichever of the two it is.
    bad = [entry for entry in found.left_out if entry.reason != "empty"]
    filtered = Counter({"empty": len(found.left_out) - len(bad)})
    read: list[_Pair] = []
    for row in found.rows:
        try:
            read.append(_pair(row, columns, tokenizer))
        except DataError as error:
            bad.append(LeftOut(row=row.row, reason="no_pair", message=str(error)))
    if bad and source.on_bad_row is BadRow.refuse:
        raise refusal(source, bad, total, remedy=BAD_ROW_REMEDY)
    filtered["bad"] = len(bad)
    texts = [text for pair in read for text in pair.texts]
    encoded = score_tokens(texts, [True] * len(texts), tokenizer, pad_token_id=limits.pad_token_id)
    kept: list[int] = []
    for number, pair in enumerate(read):
        reason = _fault(pair, encoded[2 * number : 2 * number + 2], limits.max_tokens)
        if reason is None:
            kept.append(number)
        else:
            filtered[reason] += 1
    counts = {reason: count for reason, count in filtered.items() if count}
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        raise DataError(
            f"preference pairs ({source.path or source.kind}): 0 of {total} rows left ({reasons}; "
            f"most tokens of a text: {limits.max_tokens}; raise it or give other pairs)"
        )
    tokens = [encoded[text] for pair in kept for text in (2 * pair, 2 * pair + 1)]
    return PreferenceSet(pairs=_batch(tokens, [read[pair].margin for pair in kept]), filtered=counts)


def score_tokens(
    texts: Sequence[str],
    ended: Sequence[bool],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pad_token_id: int | None,
) -> list[list[int]]:
    """Return the tokens of texts to be scored (rules 1 and 2).

    Args:
        ended: whether each came to its end, rather than to a limit.
    """
    end: Any = tokenizer.eos_token
    bare = [text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text for text in texts]
    found = encode(bare, tokenizer)
    for tokens, text, given, done in zip(found, bare, texts, ended):
        if done or text != given:
            tokens.append(int(tokenizer.eos_token_id))  # type: ignore[arg-type]  # one id, as eos_token is one token
        while tokens and tokens[-1] == pad_token_id:
            tokens.pop()
    return found


def text_batch(tokens: Sequence[Sequence[int]]) -> TextBatch:
    """Return texts as a batch; ids are positions."""
    return TextBatch(
        offsets=offsets_of([len(text) + 1 for text in tokens]),
        tokens=np.array([token for text in tokens for token in (*text, 0)], dtype=np.int32),
        sequence_ids=np.arange(len(tokens), dtype=np.int64),
    )


def _batch(tokens: Sequence[Sequence[int]], margins: Sequence[float]) -> PreferenceBatch:
    texts = text_batch(tokens)
    return PreferenceBatch(
        offsets=texts.offsets,
        tokens=texts.tokens,
        sequence_ids=texts.sequence_ids,
        pair_ids=np.repeat(np.arange(len(margins), dtype=np.int64), 2),
        is_chosen=np.tile([True, False], len(margins)),
        margins=np.repeat(np.array(margins, dtype=np.float32), 2),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class _Pair:
    """A row, rendered."""

    texts: list[str]
    """The preferred one first."""
    has_empty_answer: bool
    margin: float


def _pair(row: Row, columns: PairColumns, tokenizer: PreTrainedTokenizerBase) -> _Pair:
    prompt = None if columns.prompt is None else _text_column(row, columns.prompt)
    answers = [row.question, _text_column(row, columns.rejected)]
    margin = 0.0 if columns.margin is None else _margin(row, columns.margin)
    contents = [answer if isinstance(answer, str) else answer[-1].get("content") for answer in answers]
    return _Pair(
        texts=[_rendered(row, prompt, answer, tokenizer) for answer in answers],
        has_empty_answer=not all(isinstance(content, str) and content.strip() for content in contents),
        margin=margin,
    )


def _fault(pair: _Pair, tokens: Sequence[Sequence[int]], limit: int | None) -> str | None:
    """Return why a pair is left out; None: it is not."""
    if pair.has_empty_answer or not all(tokens):
        return "empty"
    if limit is not None and max(len(text) for text in tokens) > limit:
        return "too_long"
    return "equal" if tokens[0] == tokens[1] else None


def _rendered(
    row: Row, prompt: str | list[Message] | None, answer: str | list[Message], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return a whole text: the prompt as it is rendered for sampling, and the answer."""
    if prompt is None and isinstance(answer, str):
        return answer
    before: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    messages = [*before, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]
    last = messages[-1]
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise DataError(
            f"{row.source} row {row.row}: a conversation of a preference pair must end with a text of the assistant, "
            f"found {last!r:.80}"
        )
    if len(messages) == 1:
        raise DataError(
            f"{row.source} row {row.row}: the conversation is one answer to nothing "
            "(set rm.prompt_column, or give the whole conversation)"
        )
    question = prompt if isinstance(prompt, str) and len(messages) == 2 else messages[:-1]
    return render(replace(row, question=question), tokenizer) + last["content"]


def _text_column(row: Row, name: str) -> str | list[Message]:
    value = _column(row, name)
    is_messages = isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value)
    if not isinstance(value, str) and not is_messages:
        raise DataError(
            f"{row.source} row {row.row}: column {name!r} must be text or a list of messages with a role, "
            f"found {value!r:.80}"
        )
    return value


def _margin(row: Row, name: str) -> float:
    value = _column(row, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise DataError(f"{row.source} row {row.row}: column {name!r} must be a finite number, found {value!r:.80}")
    return float(value)


def _column(row: Row, name: str) -> Any:  # Any: the caller checks the value
    value: Any = row.extra
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise DataError(
            f"{row.source} row {row.row}: column {name!r} is missing or null (rm.chosen_column, rm.rejected_column, "
            f"rm.prompt_column and rm.margin_column name columns; the row has {', '.join(row.extra) or 'no others'})"
        )
    return value
