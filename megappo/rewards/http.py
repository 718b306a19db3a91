"""Scores of a service that is asked over HTTP.

Request: POST, body a JSON list with one object per sample: prompt, response, answer (or null), finish_reason, source,
extra, response_tokens. Answer: status 200, a JSON list of the same length and order; each entry is a number, or an
object `{"score": number, "parts": {name: number}}` whose parts may be absent.

A service that cannot be reached, is late, or answers 429 or 5xx is asked again. What asking again cannot mend (another
status, no JSON, a wrong length, an entry that is no score) is an error at once. Redirects are not followed: a POST
would become a GET.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megappo.errors import DataError, RewardError
from megappo.rewards.checks import check_count, check_number
from megappo.rewards.types import CallLimit, Reward, Sample

_BUSY = 429
_MOST_RETRIES = 20
"""Waits double: with more of them the last one alone would be weeks."""
_SHOWN = 300
"""Characters of an answer that are quoted."""


class _Unanswered(Exception):
    """The service may answer when it is asked again."""


@dataclass(kw_only=True, slots=True)
class HttpReward:
    """Scores and parts as a service gives them, all samples of a call in one request."""

    url: str
    """Where to POST, for example http://judge:8000/score."""
    timeout_s: float = 20.0
    """Longest time of one request. All tries together, with the waits between, must fit into reward.timeout_s."""
    retries: int = 1
    """How often a request is sent again."""
    backoff_s: float = 0.5
    """Wait before the first of them; each further wait is twice as long."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key, sent as `Authorization: Bearer <key>`; null: no key."""
    _headers: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise DataError(f"reward http: params.url={self.url!r} must be http:// or https:// and a host")
        check_number("http", "timeout_s", self.timeout_s, least=0.001)
        check_count("http", "retries", self.retries, least=0, most=_MOST_RETRIES)
        check_number("http", "backoff_s", self.backoff_s, least=0.0)
        self._headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise DataError(
                    f"reward http: params.api_key_env={self.api_key_env}: no such environment variable is set here "
                    "(set it where the reward processes start)"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    @property
    def call_limit(self) -> CallLimit:
        """All tries of a call, with the waits between."""
        waits = self.backoff_s * (2**self.retries - 1)
        return CallLimit(
            seconds=self.timeout_s * (self.retries + 1) + waits,
            param="timeout_s",
            beside=f"retries={self.retries}, backoff_s={self.backoff_s:g}",
        )

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises RewardError: no answer after all tries, or one that is no scores."""
        body = self._body(samples)
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            for attempt in range(self.retries + 1):
                try:
                    return self._rewards(await self._answer(session, body), len(samples))
                except _Unanswered as error:
                    last = str(error)
                if attempt < self.retries:
                    await asyncio.sleep(self.backoff_s * 2**attempt)
        tries = "1 try" if self.retries == 0 else f"{self.retries + 1} tries"
        raise RewardError(f"reward http: {self.url}: {last} ({tries}; is the service up, and are its limits enough?)")

    def _body(self, samples: Sequence[Sample]) -> bytes:
        fields = ("prompt", "response", "answer", "finish_reason", "source", "extra", "response_tokens")
        rows = [{name: getattr(sample, name) for name in fields} for sample in samples]
        try:
            return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            source = samples[0].source or "the data source"
            raise DataError(f"reward http: the rows of {source} cannot be written as JSON: {error}") from error

    async def _answer(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        try:
            async with session.post(self.url, data=body, allow_redirects=False) as response:
                content = await response.read()
        except TimeoutError:
            raise _Unanswered(f"no answer within timeout_s={self.timeout_s:g}") from None
        except aiohttp.InvalidURL as error:
            raise RewardError(f"reward http: params.url={self.url!r} is no address") from error
        except aiohttp.ClientError as error:
            raise _Unanswered(f"{type(error).__name__}: {error}") from None
        if response.status == 200:
            return content
        shown = f"status {response.status}, {content[:_SHOWN].decode(errors='replace')!r}"
        if response.status == _BUSY or response.status >= 500:
            raise _Unanswered(shown)
        raise RewardError(f"reward http: {self.url} refused the request: {shown} (correct url, key or service)")

    def _rewards(self, content: bytes, expected: int) -> list[Reward]:
        try:
            entries = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise self._unusable(f"no JSON: {error}", content) from None
        if not isinstance(entries, list):
            raise self._unusable("no JSON list", content)
        if len(entries) != expected:
            raise self._unusable(f"{len(entries)} scores for {expected} samples", content)
        return [self._reward(entry, content) for entry in entries]

    def _reward(self, entry: Any, content: bytes) -> Reward:  # Any: decoded JSON
        scored = entry if isinstance(entry, dict) else {"score": entry}
        parts = scored.get("parts", {})
        if not isinstance(parts, dict) or not all(map(_is_number, [scored.get("score"), *parts.values()])):
            raise self._unusable(f"an entry {entry!r:.100} that is neither a number nor {{score, parts}}", content)
        return Reward(score=float(scored["score"]), parts={name: float(value) for name, value in parts.items()})

    def _unusable(self, reason: str, content: bytes) -> RewardError:
        return RewardError(
            f"reward http: {self.url} answered with {reason} (the module's docstring says what is asked for): "
            f"{content[:_SHOWN].decode(errors='replace')!r}"
        )


def _is_address(url: object) -> bool:
    try:
        return isinstance(url, str) and url.startswith(("http://", "https://")) and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
