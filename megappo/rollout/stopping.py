"""Where a stop string ends a response. The tokens are the truth: a response ends with the token that completes it."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megappo.data.tokenizer import load_tokenizer

_TOKENS_PER_CHARACTER = 4
"""A character of UTF-8 takes up to 4 bytes, and a byte may be a token of its own."""


class StopStringFinder:
    """Makes what finds stop strings; the tokenizer of the model folder is loaded for the first of them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def of(self, strings: Sequence[str]) -> "StopStrings | None":
        """Return what finds these strings; None: there are none."""
        if not strings:
            return None
        self._tokenizer = self._tokenizer or load_tokenizer(self._folder)
        return StopStrings(strings, self._tokenizer)


class StopStrings:
    """Finds the end of responses by their text."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """`strings` are not empty."""
        self._strings = list(strings)
        self._tokenizer = tokenizer
        self.window = _TOKENS_PER_CHARACTER * max(len(string) for string in strings)
        """Tokens at the end of a response that are looked at."""

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string ends in the last token, or not long before it."""
        text = str(self._tokenizer.decode(list(tokens[-self.window :])))
        return any(string in text for string in self._strings)

    def end(self, tokens: Sequence[int], *, start: int = 0) -> int | None:
        """Return the number of tokens, above `start`, at which a stop string is complete; None: there is none."""
        counts = range(start + 1, len(tokens) + 1)
        return next((count for count in counts if self.complete(tokens[:count])), None)
