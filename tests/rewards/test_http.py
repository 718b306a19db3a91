import asyncio
import socket

import numpy as np
import pytest

from megappo.errors import DataError, RewardError
from megappo.rewards import Reward, Sample
from megappo.rewards.http import HttpReward
from tests.rewards.scoring_service import Reply, scoring_service

SAMPLES = [
    Sample(prompt="p", response="ab", answer="x", source="s", extra={"k": np.array([1, 2])}, response_tokens=3),
    Sample(prompt="q", response="", answer=None, finish_reason="length"),
]
GOOD = Reply(body=b'[0.5, {"score": 1, "parts": {"style": 0.25}}]')


def score(url: str, **params: object) -> list[Reward]:
    reward = HttpReward(url=url, backoff_s=0.01, **params)  # type: ignore[arg-type]
    return asyncio.run(reward.score(SAMPLES))


def test_samples_go_out_as_one_list_and_scores_come_back_in_order():
    with scoring_service(GOOD) as service:
        assert score(service.url) == [Reward(score=0.5), Reward(score=1.0, parts={"style": 0.25})]
    first = {"prompt": "p", "response": "ab", "answer": "x", "finish_reason": "stop", "source": "s"}
    second = {"prompt": "q", "response": "", "answer": None, "finish_reason": "length", "source": ""}
    assert service.requests == [
        [first | {"extra": {"k": [1, 2]}, "response_tokens": 3}, second | {"extra": {}, "response_tokens": 0}]
    ]
    assert "Authorization" not in service.headers[0]


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with scoring_service(GOOD) as service:
        score(service.url, api_key_env="JUDGE_KEY")
    assert service.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(HttpReward(url="http://a", api_key_env="JUDGE_KEY"))
    for url in ("ftp://a", "http://", "https://[", "http:///score"):
        with pytest.raises(DataError, match=r"params\.url=.* must be http:// or https:// and a host"):
            HttpReward(url=url)


def test_a_key_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(DataError, match="api_key_env=JUDGE_KEY: no such environment variable"):
        HttpReward(url="http://a", api_key_env="JUDGE_KEY")


@pytest.mark.parametrize(
    "passing", [Reply(body=b"", status=503), Reply(body=b"slow down", status=429), Reply(body=b"", hang_up=True)]
)
def test_a_service_that_may_recover_is_asked_again(passing):
    with scoring_service(passing, passing, GOOD) as service:
        assert score(service.url, retries=2)[0].score == 0.5
        assert len(service.requests) == 3


def test_tries_end():
    with scoring_service(Reply(body=b"no model", status=500)) as service:
        with pytest.raises(RewardError, match=r"status 500, 'no model' \(3 tries"):
            score(service.url, retries=2)
        assert len(service.requests) == 3


def test_a_late_answer_is_an_error():
    late = Reply(body=GOOD.body, delay_s=1.0)
    with scoring_service(late) as service, pytest.raises(RewardError, match=r"no answer within timeout_s=0\.05"):
        score(service.url, timeout_s=0.05, retries=0)


def test_a_refused_connection_names_the_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(RewardError, match=rf"http://127\.0\.0\.1:{port}/score: ClientConnectorError: .*2 tries"):
            score(f"http://127.0.0.1:{port}/score")


UNUSABLE = [
    (Reply(body=b"who are you", status=401), "refused the request: status 401, 'who are you'"),
    (Reply(body=b"", status=404), "refused the request: status 404"),
    (Reply(body=b"", status=302), "refused the request: status 302"),
    (Reply(body=b"<html>"), "answered with no JSON"),
    (Reply(body=b""), "answered with no JSON"),
    (Reply(body=b"[NaN, 1]"), "answered with no JSON"),
    (Reply(body=b'{"scores": [1, 2]}'), "answered with no JSON list"),
    (Reply(body=b"[1]"), "1 scores for 2 samples"),
    (Reply(body=b"[1, null]"), "an entry None that is neither"),
    (Reply(body=b'[1, "2"]'), "an entry '2' that is neither"),
    (Reply(body=b"[1, true]"), "an entry True that is neither"),
    (Reply(body=b'[1, {"parts": {}}]'), "that is neither"),
    (Reply(body=b'[1, {"score": 1, "parts": {"a": null}}]'), "that is neither"),
    (Reply(body=b'[1, {"score": 1, "parts": [1]}]'), "that is neither"),
]


@pytest.mark.parametrize(("reply", "message"), UNUSABLE)
def test_an_answer_that_is_no_scores_is_an_error_at_once(reply, message):
    with scoring_service(reply) as service:
        with pytest.raises(RewardError, match=message):
            score(service.url, retries=3)
        assert len(service.requests) == 1


def test_a_row_that_is_no_json_is_an_error():
    sample = Sample(prompt="", response="", answer=None, source="mine", extra={"k": object()})
    with pytest.raises(DataError, match="rows of mine cannot be written as JSON"):
        asyncio.run(HttpReward(url="http://127.0.0.1:9").score([sample]))


@pytest.mark.parametrize(
    "params", [{"url": "judge:80"}, {"url": "http://a", "timeout_s": 0}, {"url": "http://a", "retries": -1}]
)
def test_wrong_parameters_are_refused(params):
    with pytest.raises(DataError, match=r"params\.(url|timeout_s|retries)="):
        HttpReward(**params)
