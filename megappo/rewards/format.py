"""Whether a response has the form that was asked for.

With `tags`, the response is `<think>...</think><answer>...</answer>`: each tag opens once and closes once, in the
order of the list, none within another, with some text between, and nothing but white space around and between them.
With `pattern`, all of the response matches a regular expression.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megappo.errors import DataError
from megappo.rewards.checks import check_pattern, check_switch
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class Format:
    """Score 1 if the response has the form, else 0. With `tags`, part `tags`: the share of them that open once and,
    behind that, close once."""

    tags: Sequence[str] = field(default_factory=list)
    """Names of the tags, in order, for example [think, answer]."""
    pattern: str | None = None
    """Regular expression that all of the response matches; the dot matches line breaks too."""
    opened_by_prompt: bool = False
    """The chat template writes the first opening tag: the response begins behind it."""

    def __post_init__(self) -> None:
        sound = isinstance(self.tags, list | tuple) and all(
            isinstance(tag, str) and re.fullmatch(r"[\w.-]+", tag) for tag in self.tags
        )
        if not sound or len(set(self.tags)) < len(self.tags):
            raise DataError(
                f"reward format: params.tags={self.tags!r} must be different names (for example [think, answer])"
            )
        if bool(self.tags) == (self.pattern is not None):
            raise DataError(
                f"reward format: give params.tags or params.pattern, and not both (tags={list(self.tags)}, "
                f"pattern={self.pattern!r})"
            )
        if self.pattern is not None:
            check_pattern("format", "pattern", self.pattern, groups=0)
        check_switch("format", "opened_by_prompt", self.opened_by_prompt)
        if self.opened_by_prompt and not self.tags:
            raise DataError("reward format: params.opened_by_prompt=True needs params.tags")

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order."""
        return [self._reward(sample.response) for sample in samples]

    def _reward(self, response: str) -> Reward:
        if self.pattern is not None:
            return Reward(score=float(re.fullmatch(self.pattern, response, re.DOTALL) is not None))
        text = f"<{self.tags[0]}>{response}" if self.opened_by_prompt else response
        paired = [self._is_paired(tag, text) for tag in self.tags]
        parts = {"tags": sum(paired) / len(paired)}
        return Reward(score=float(all(paired) and self._in_order(text)), parts=parts)

    def _is_paired(self, tag: str, text: str) -> bool:
        once = text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1
        return once and text.index(f"<{tag}>") < text.index(f"</{tag}>")

    def _in_order(self, text: str) -> bool:
        """Whether the tags, each of which opens and closes once, follow one another with nothing between."""
        end = 0
        for tag in self.tags:
            opens, closes = text.index(f"<{tag}>"), text.index(f"</{tag}>")
            inside = text[opens + len(tag) + 2 : closes]
            if opens < end or text[end:opens].strip() or not inside.strip():
                return False
            end = closes + len(tag) + 3
        return not text[end:].strip()
