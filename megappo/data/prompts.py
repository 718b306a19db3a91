"""Prompts of a run: rows of a source, rendered, tokenised and filtered, all before the run begins.

Rows are rendered and tokenised in pieces. Tokenizers of the `tokenizers` library encode a piece in parallel on all
cores, each text by itself, so neither the number of cores nor the size of a piece changes a token.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from megappo.config.data import BadRow, Duplicate, SourceConfig, TooLong
from megappo.data.chat import encode, render
from megappo.data.sources import BAD_ROW_REMEDY, read_source, reasons, refusal
from megappo.data.types import LeftOut, Prompt, Row
from megappo.errors import DataError

_DUPLICATE_REMEDY = "set on_duplicate=keep or filter to go on"
_TOO_LONG_REMEDY = "raise data.max_prompt_tokens, or set data.on_too_long=filter to leave them out"

_PIECE = 2000
"""Rows tokenised at a time: enough for many cores, few enough for their encodings to take little memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptOptions:
    """What prompts of a source are made with, beside its own section."""

    max_prompt_tokens: int
    on_too_long: TooLong = TooLong.filter
    # Any: JSON schemas.
    tools: list[dict[str, Any]] | None = None
    """Tool schemas that rows without their own show."""
    name: str = ""
    """Of the source in the configuration; see `Row.source`."""
    origin: str = ""
    """Name in `data.train_sources`; see `Prompt.origin`."""
    reward: str = ""
    """See `Prompt.reward`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptSet:
    """The prompts that are left and why others are not."""

    prompts: list[Prompt]
    rows: int
    """Rows read."""
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    """In the order of their rows."""
    duplicates: int = 0
    """Prompts that an earlier row has, too, and that stayed."""

    @property
    def filtered(self) -> dict[str, int]:
        """Reason -> rows; reasons without rows are absent."""
        return dict(Counter(entry.reason for entry in self.left_out))


def load_prompts(source: SourceConfig, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> PromptSet:
    """Read, render and tokenise the rows of a source; rows left out are counted by reason.

    Raises:
        DataError: a row cannot be used and the source or `on_too_long` says refuse, or none is left (rows before and
            after, by reason).
    """
    found = examine_prompts(source, tokenizer, options)
    for refused, remedy in (
        (_bad(found) if source.on_bad_row is BadRow.refuse else [], BAD_ROW_REMEDY),
        (_only(found, "duplicate") if source.on_duplicate is Duplicate.refuse else [], _DUPLICATE_REMEDY),
        (_only(found, "too_long") if options.on_too_long is TooLong.refuse else [], _TOO_LONG_REMEDY),
    ):
        if refused:
            raise refusal(source, refused, found.rows, remedy=remedy)
    if not found.prompts:
        examples = {entry.reason: entry.message for entry in reversed(found.left_out)}
        raise DataError(
            f"data source {source.kind} ({source.place}): 0 of {found.rows} rows left ({reasons(found.left_out)}; "
            f"max_prompt_tokens={options.max_prompt_tokens}), for example\n"
            + "\n".join(f"  {message}" for message in examples.values())
        )
    return found


def examine_prompts(source: SourceConfig, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> PromptSet:
    """Do the same and refuse nothing: what a run would refuse is among the rows left out.

    Raises:
        DataError: the source cannot be read, or gives no rows.
    """
    read = read_source(source, options.name)
    maker = _PromptMaker(source, tokenizer, options)
    for start in range(0, len(read.rows), _PIECE):
        maker.add(read.rows[start : start + _PIECE])
    return PromptSet(
        prompts=maker.prompts,
        rows=len(read.rows) + len(read.left_out),
        left_out=sorted([*read.left_out, *maker.left_out], key=lambda entry: entry.row),
        duplicates=maker.duplicates,
    )


def _bad(found: PromptSet) -> list[LeftOut]:
    return [entry for entry in found.left_out if entry.reason not in ("duplicate", "too_long")]


def _only(found: PromptSet, reason: str) -> list[LeftOut]:
    return [entry for entry in found.left_out if entry.reason == reason]


class _PromptMaker:
    """Makes prompts of rows, piece by piece."""

    def __init__(self, source: SourceConfig, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> None:
        self.prompts: list[Prompt] = []
        self.left_out: list[LeftOut] = []
        self.duplicates = 0
        self._source = source
        self._tokenizer = tokenizer
        self._options = options
        self._first: dict[str, int] = {}
        """Text -> first row that has it."""
        self._ids = list(range(len(tokenizer)))
        """One int object per id: 100,000 prompts share them, which makes each token cost 8 bytes and not 36."""
        special = sorted(set(map(str, tokenizer.all_special_tokens)), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special and tokenizer.chat_template else None

    def add(self, rows: Sequence[Row]) -> None:
        """Add what can be used of some rows."""
        texts = [(row, text) for row in map(self._with_tools, rows) if (text := self._rendered(row)) is not None]
        for (row, text), tokens in zip(texts, encode([text for _, text in texts], self._tokenizer)):
            first = self._first.setdefault(text, row.row)
            if (fault := self._fault(text, len(tokens))) is not None:
                self._leave_out(row, *fault)
            elif first != row.row and self._source.on_duplicate is not Duplicate.keep:
                self._leave_out(row, "duplicate", f"has the prompt of row {first}: {text!r:.80}")
            else:
                self.duplicates += first != row.row
                self.prompts.append(self._prompt(row, text, tokens))

    def _with_tools(self, row: Row) -> Row:
        return row if row.tools or not self._options.tools else replace(row, tools=self._options.tools)

    def _prompt(self, row: Row, text: str, tokens: Sequence[int]) -> Prompt:
        return Prompt(
            row=row.row,
            text=text,
            tokens=[self._ids[token] for token in tokens],
            answer=row.answer,
            source=row.source,
            extra=row.extra,
            tools=row.tools,
            reward=self._options.reward,
            origin=self._options.origin,
        )

    def _rendered(self, row: Row) -> str | None:
        """Return the text of a row; None: it is left out."""
        try:
            text = row.text if self._source.rendered else render(row, self._tokenizer)
        except DataError as error:
            self.left_out.append(LeftOut(row=row.row, reason="template", message=str(error)))
            return None
        if (fault := self._rendered_twice(row) or _unicode_fault(text)) is not None:
            self._leave_out(row, *fault)
            return None
        return text

    def _rendered_twice(self, row: Row) -> tuple[str, str] | None:
        """Return reason and message where a text is taken for rendered and is not, or the other way round."""
        if self._source.rendered:
            return (
                None if isinstance(row.question, str) else ("wrong_type", "rendered=true takes texts, found messages")
            )
        # The one text, or any of the messages'.
        found = self._special.search(row.text) if self._special else None
        if found is None:
            return None
        rule = f"holds the special token {found.group()!r}, and the chat template would write its own around it"
        return "rendered", f"{rule} (rendered=true takes texts that are rendered already)"

    def _fault(self, text: str, length: int) -> tuple[str, str] | None:
        if length > self._options.max_prompt_tokens:
            limit = f"max_prompt_tokens={self._options.max_prompt_tokens}"
            return "too_long", f"has {length} tokens, more than {limit}: {text!r:.80}"
        return None if length else ("empty", "has no tokens")

    def _leave_out(self, row: Row, reason: str, message: str) -> None:
        self.left_out.append(LeftOut(row=row.row, reason=reason, message=f"{row.source} row {row.row}: {message}"))


def _unicode_fault(text: str) -> tuple[str, str] | None:
    """JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} at character {error.start + 1}"
        return "not_unicode", f"holds {found}, which is no Unicode character"
    return None
