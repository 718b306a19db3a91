"""Prompts of a run: rows of a source, rendered, tokenised and filtered by length."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from megappo.config.data import SourceConfig
from megappo.data.chat import encode, render
from megappo.data.sources import read_rows
from megappo.data.types import Prompt
from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class PromptSet:
    """The prompts that are left and why others are not."""

    prompts: list[Prompt]
    filtered: dict[str, int] = field(default_factory=dict)
    """Reason (`too_long`, `empty`) -> rows; reasons without rows are absent."""


def load_prompts(config: SourceConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> PromptSet:
    """Read, render and tokenise the rows of a source; rows longer than `max_prompt_tokens` are left out and counted.

    Raises:
        DataError: a row cannot be used, or none is left (rows before and after, by reason).
    """
    rows = read_rows(config)
    texts = [render(row, tokenizer) for row in rows]
    prompts: list[Prompt] = []
    filtered: dict[str, int] = {}
    for row, text, tokens in zip(rows, texts, encode(texts, tokenizer)):
        if 0 < len(tokens) <= max_prompt_tokens:
            prompts.append(
                Prompt(row=row.row, text=text, tokens=tokens, answer=row.answer, source=row.source, extra=row.extra)
            )
        else:
            reason = "too_long" if tokens else "empty"
            filtered[reason] = filtered.get(reason, 0) + 1
    if not prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in filtered.items())
        raise DataError(
            f"data source {config.kind} ({config.path or config.task}): 0 of {len(rows)} rows left ({reasons}; "
            f"max_prompt_tokens={max_prompt_tokens}; raise it or give shorter prompts)"
        )
    return PromptSet(prompts=prompts, filtered=filtered)
