"""What the model reads after its turn: the tools' answers as the chat template shows them, as tokens.

Only what follows the turn is rendered and tokenised, out of a conversation with a stand-in for the turn: what the model
has sampled stays as it is. A template that does not show a conversation and its continuation one behind the other is
refused, since there is then no text that could follow.

Invariants (asserted by tests/rollout/agents/test_observations.py):
1. Where special tokens stand around turns, the tokens are those that the whole conversation has there.
2. No text of a tool becomes a special token.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from megappo.data.tokenizer import encode_all
from megappo.errors import DataError
from megappo.rollout.agents.tools import ToolAnswer

_TURN = "@the-turn@"
_CHARACTERS = 128
"""Most characters of one token: what is cut off of a long answer need not be tokenised first."""
_BROKEN = "\ufffd"
"""What a decoder writes for a part of a character."""


class Observations:
    """Renders the answers of tools.

    Example: of a ChatML template and a turn that ended with <|im_end|>, the tokens of
        "\\n<|im_start|>tool\\n42<|im_end|>\\n<|im_start|>assistant\\n".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> None:
        """`max_tokens`: of one answer; the rest is cut off.

        Raises:
            DataError: there is no chat template, or none that shows tools' answers behind the model's turn.
        """
        if tokenizer.chat_template is None:
            raise _refused("the tokenizer has none")
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        added: dict[str, int] = tokenizer.get_added_vocab()  # type: ignore[operator]  # declared with __getattr__
        self._added_ids = set(added.values())
        self._added = re.compile("|".join(re.escape(text) for text in sorted(added, key=len)[::-1] if len(text) > 1))
        before, after = self._text(0, generation_prompt=False), self._text(1, generation_prompt=True)
        if before.count(_TURN) != 1 or not after.startswith(before):
            raise _refused("it shows a turn in another way once a tool has answered")
        self._as_json = _stand_in(0) not in after
        self._pieces = lru_cache(self._find_pieces)
        self._pieces(1)

    def tokens(self, turn: Sequence[int], answers: Sequence[ToolAnswer]) -> list[int]:
        """Return what follows a turn [tokens] whose calls were answered, up to the model's next turn."""
        pieces = self._pieces(len(answers))
        contents = [self._content(answer.text) for answer in answers]
        shown = [pieces[0], *(part for pair in zip(contents, pieces[1:]) for part in pair)]
        if self._finds_added(contents):
            tokens = [token for part in shown for token in self._encode(*self._broken(part, part in contents))]
        else:
            tokens = self._encode("".join(shown))
        # The template ends the turn; a model that has ended it by itself has sampled that token.
        end = turn[-1] if turn and turn[-1] in self._added_ids else None
        first = self._encode(pieces[0])
        return tokens[first.index(end) + 1 :] if end in first else tokens

    def _text(self, count: int, *, generation_prompt: bool) -> str:
        """Return a conversation with so many stand-ins for tools' answers."""
        # jinja2 comes with transformers' chat templates.
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": "@the-user@"}, {"role": "assistant", "content": _TURN}]
        messages += [{"role": "tool", "name": "tool", "content": _stand_in(number)} for number in range(count)]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, TypeError) as error:
            raise _refused(f"it says: {error}") from error
        assert isinstance(text, str)  # tokenize=False
        return text

    def _find_pieces(self, count: int) -> list[str]:
        """Return what the template writes behind a turn, before, between and behind so many answers."""
        rest = self._text(count, generation_prompt=True).partition(_TURN)[2]
        pieces: list[str] = []
        for number in range(count):
            shown = _json(_stand_in(number)) if self._as_json else _stand_in(number)
            piece, found, rest = rest.partition(shown)
            if not found or shown in rest:
                raise _refused("it does not show the text of a tool's answer once and as it is")
            pieces.append(piece)
        return [*pieces, rest]

    def _content(self, text: str) -> str:
        """Return an answer as it is shown, not longer than it may be."""
        shown = text[: self._max_tokens * _CHARACTERS]
        tokens, limit = self._encode(shown), self._max_tokens
        while len(tokens) > self._max_tokens:
            shown = str(self._tokenizer.decode(tokens[:limit], skip_special_tokens=False)).rstrip(_BROKEN)
            tokens, limit = self._encode(shown), limit - 1  # what is cut may have other tokens than before
        return _json(shown) if self._as_json else shown

    def _finds_added(self, texts: Sequence[str]) -> bool:
        return bool(self._added.pattern) and any(self._added.search(text) for text in texts)

    def _broken(self, text: str, is_content: bool) -> list[str]:
        """Cut the text of a tool inside everything that reads like a special token, so that it becomes none."""
        if not is_content:
            return [text]
        cuts = [0, *(match.start() + 1 for match in self._added.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]

    def _encode(self, *texts: str) -> list[int]:
        return [token for tokens in encode_all(self._tokenizer, [t for t in texts if t]) for token in tokens]


def _stand_in(number: int) -> str:
    return f'@answer"{number}@'  # the quote shows whether the template writes answers as JSON


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refused(why: str) -> DataError:
    return DataError(
        f"rollout.agent=tool_loop needs a chat template that shows the answers of tools: {why} (use a tokenizer whose "
        "template appends messages of the role tool to a conversation)"
    )


def require_shown(tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]) -> None:  # Any: JSON schemas
    """Raise DataError where the chat template writes the same with and without tools."""
    message = [{"role": "user", "content": "x"}]
    tools: Any = list(schemas)
    if tokenizer.chat_template is not None:
        shown = tokenizer.apply_chat_template(message, tools=tools, tokenize=False)
        if shown != tokenizer.apply_chat_template(message, tokenize=False):
            return
    raise DataError(
        "rollout.tool_loop.tools cannot be shown to the model: the tokenizer's chat template takes no tools (use a "
        "template that does, or rollout.tool_loop.show_tools=false for a model that knows them)"
    )
