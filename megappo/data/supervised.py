"""Rows of supervised training as tokens, with the mask on what is trained on.

A row is a prompt with its answer (`answer_column`), or a conversation: messages with the answers among them, and no
answer column. Of the first kind the answer and the end token are trained on, of the second the chosen messages
(`megappo.data.conversation`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megappo.batch.fields import fingerprint_of, offsets_of
from megappo.batch.stages import RolloutBatch
from megappo.config.data import BadRow, SourceConfig
from megappo.config.supervised import OverLong, TrainOn
from megappo.data.chat import encode, render
from megappo.data.conversation import encode_conversations
from megappo.data.sources import read_rows
from megappo.data.tokenizer import encode_all
from megappo.data.types import Row
from megappo.errors import DataError

_CHUNK = 1000
"""Rows that are tokenised at a time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SupervisedRows:
    """Rows ready for training, and what became of others."""

    batch: RolloutBatch
    """The response mask is True on the tokens to train on. Sequence and group ids are positions, log-probs NaN: no
    engine sampled the tokens."""
    counts: dict[str, int]
    """What happened (`bad`, `too_long`, `cut_off`, `empty_prompt`, `without_end`) -> rows; without rows absent."""

    @property
    def fingerprint(self) -> str:
        """Digest of tokens and mask, in order."""
        return fingerprint_of(self.batch.offsets, self.batch.tokens, self.batch.response_mask)


@dataclass(slots=True)
class _Example:
    """One row as tokens."""

    tokens: np.ndarray
    """[n] int32."""
    mask: np.ndarray
    """[n] bool."""
    has_end: bool = True


def load_supervised_rows(
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn,
    max_tokens: int | None,
    over_long: OverLong,
) -> SupervisedRows:
    """Read and tokenise the rows of a source.

    Args:
        max_tokens: most tokens of a row; None: no limit.

    Raises:
        DataError: a row cannot be used (it has no answer, or an empty one), or none is left.
    """
    rows = read_rows(source)
    counts: Counter[str] = Counter()
    kept: list[_Example] = []
    for start in range(0, len(rows), _CHUNK):
        for example in _usable(rows[start : start + _CHUNK], source, tokenizer, train_on, counts):
            if (fitting := _fit(example, max_tokens, over_long, counts)) is not None:
                kept.append(fitting)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        raise DataError(
            f"data source {source.kind} ({source.place}): 0 of {len(rows)} rows left ({reasons}; at most {max_tokens} "
            "tokens)"
        )
    return SupervisedRows(batch=_packed(kept), counts=dict(counts))


def _usable(
    rows: Sequence[Row],
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    train_on: TrainOn,
    counts: Counter[str],
) -> list[_Example]:
    """Tokenise rows; with on_bad_row=filter, those that can be. A part with a bad row is halved until that is alone."""
    try:
        return _examples(rows, source, tokenizer, train_on)
    except DataError:
        if source.on_bad_row is BadRow.refuse:
            raise
    if len(rows) == 1:
        counts["bad"] += 1
        return []
    half = len(rows) // 2
    parts = (rows[:half], rows[half:])
    return [example for part in parts for example in _usable(part, source, tokenizer, train_on, counts)]


def _examples(
    rows: Sequence[Row], source: SourceConfig, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn
) -> list[_Example]:
    """Tokenise rows of either kind; the order stays."""
    talks = [row.answer is None and not isinstance(row.question, str) for row in rows]
    pairs = iter(_pairs([row for row, talk in zip(rows, talks) if not talk], tokenizer, rendered=source.rendered))
    conversations = [row for row, talk in zip(rows, talks) if talk]
    encoded = iter(encode_conversations(conversations, tokenizer, train_on=train_on))
    examples: list[_Example] = []
    for talk in talks:
        if talk:
            one = next(encoded)
            examples.append(_Example(one.tokens, one.mask, one.has_end))
        else:
            examples.append(next(pairs))
    return examples


def _pairs(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, rendered: bool) -> list[_Example]:
    """Tokenise prompts and, apart from them, answers; the end token closes an answer."""
    for row in rows:
        if row.answer is None:
            raise DataError(
                f"{row.source} row {row.row} has no answer (set answer_column, or give messages with the answers in "
                "prompt_column)"
            )
        if not row.answer:
            raise DataError(f"{row.source} row {row.row} has an empty answer: there is nothing to train on")
    texts = [row.text if rendered else render(row, tokenizer) for row in rows]
    prompts = encode(texts, tokenizer) if rows else []
    answers = encode_all(tokenizer, [str(row.answer) for row in rows])
    examples: list[_Example] = []
    for prompt, answer in zip(prompts, answers):
        tokens = np.array([*prompt, *answer, tokenizer.eos_token_id], np.int32)
        examples.append(_Example(tokens, np.arange(len(tokens)) >= len(prompt)))
    return examples


def _fit(example: _Example, max_tokens: int | None, over_long: OverLong, counts: Counter[str]) -> _Example | None:
    """Return what is left of a row under the limit, and count what is not."""
    tokens, mask = example.tokens, example.mask
    if mask[0]:
        counts["empty_prompt"] += 1  # no token before it predicts the first one
        return None
    if max_tokens is not None and len(tokens) > max_tokens:
        if over_long is OverLong.filter or not mask[:max_tokens].any():
            counts["too_long"] += 1
            return None
        counts["cut_off"] += 1
        tokens, mask = tokens[:max_tokens], mask[:max_tokens]
    if not example.has_end:
        counts["without_end"] += 1
    return _Example(tokens, mask)


def _packed(examples: Sequence[_Example]) -> RolloutBatch:
    ids = np.arange(len(examples), dtype=np.int64)
    tokens = np.concatenate([example.tokens for example in examples])
    return RolloutBatch(
        offsets=offsets_of([len(example.tokens) for example in examples]),
        tokens=tokens,
        response_mask=np.concatenate([example.mask for example in examples]),
        rollout_log_probs=np.full(len(tokens), np.nan, np.float32),
        sequence_ids=ids,
        group_ids=ids,
    )
