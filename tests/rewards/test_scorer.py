"""Scoring in a process of its own: every sample gets an answer of its own, whatever others do to the process.

What has to wait for a time limit waits for it at the same time: the fixture `waited`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megappo.config.reward import RewardConfig, RewardTerm, RewardTerms
from megappo.errors import DataError, WorkerError
from megappo.rewards import Failure, Sample
from megappo.rewards.calling import Outcome
from megappo.rewards.scorer import ScoredSamples, Scorer, ScorerSettings

HERE = "tests.rewards.port_rewards"
LIMIT_S = 0.5


def settings_of(name: str, **limits: Any) -> ScorerSettings:
    settings = ScorerSettings(
        sections={"": RewardTerms(name=f"{HERE}:{name}", params=limits.pop("params", {}))},
        concurrency=1,
        timeout_s=LIMIT_S,
        retries=0,
        start_timeout_s=60.0,
    )
    return replace(settings, **limits)


def samples_of(*responses: str, reward: str = "") -> list[Sample]:
    return [Sample(prompt="p", response=response, answer=None, reward=reward) for response in responses]


async def score_all(settings: ScorerSettings, calls: Sequence[Sequence[Sample]]) -> list[ScoredSamples]:
    """Score several calls at a time in one process."""
    scorer = Scorer(settings)
    await scorer.start()
    try:
        return await asyncio.wait_for(asyncio.gather(*map(scorer.score, calls)), 100.0)
    finally:
        await scorer.close()


def run(settings: ScorerSettings, *calls: Sequence[Sample]) -> list[ScoredSamples]:
    return asyncio.run(score_all(settings, calls))


def shown(outcomes: Sequence[Outcome]) -> list[str | float]:
    return [str(one.kind) if isinstance(one, Failure) else one.score for one in outcomes]


HARM: dict[str, str] = {
    "raise x": "raised",
    "exit": "raised",
    "cancel": "raised",
    "speechless": "raised",
    "nan": "not_finite",
    "none": "none",
    "text": "wrong_type",
    "die 7": "died",
    "segfault": "died",
    "loop": "timed_out",
    "hold": "timed_out",
}
"""Response -> what becomes of it."""


KINDS = {"by_word": 4, "by_word_later": 4, "ByWordBatch": 1}
"""Kinds of rewards, and how many samples they score at a time."""
BESIDE = ("a", "hold", "die 7", "raise x", "bb", "ccc")


Waited = dict[str, list[ScoredSamples]]


@pytest.fixture(scope="module")
def child_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reward writes the id of a process that it has started."""
    return tmp_path_factory.mktemp("child") / "pid"


@pytest.fixture(scope="module")
def waited(child_path: Path) -> Waited:
    """What each of several processes has scored, all of them at the same time."""
    work = {name: (settings_of(name, concurrency=count), [samples_of(*BESIDE)]) for name, count in KINDS.items()}
    work["all harm"] = settings_of("by_word"), [samples_of("a", *HARM, "bb", "ccc")]
    work["tried again"] = settings_of("by_word", retries=1), [samples_of("loop", "a")]
    work["coroutines"] = settings_of("by_word_later", concurrency=4), [samples_of("never", "a", "never", "bb")]
    work["several calls"] = settings_of("by_word"), [samples_of("loop", "a"), samples_of("bb"), []]
    work["child"] = settings_of("by_word", timeout_s=2.0), [samples_of(f"child {child_path}")]
    # The batch of the one term is scored once, and of the other only the sample that hangs is lost and tried again.
    word, batch = RewardTerm(name=f"{HERE}:by_word"), RewardTerm(name=f"{HERE}:AsyncBatch", weight=10.0)
    terms = settings_of("length", sections={"": RewardTerms(terms={"word": word, "batch": batch})})
    work["two terms"] = terms, [samples_of("a", "loop", "bb")]

    async def score_everything() -> list[list[ScoredSamples]]:
        return await asyncio.gather(*(score_all(settings, calls) for settings, calls in work.values()))

    return dict(zip(work, asyncio.run(score_everything())))


def test_every_sample_has_an_outcome_of_its_own(waited: Waited) -> None:
    (found,) = waited["all harm"]
    assert shown(found.outcomes) == [1.0, *HARM.values(), 2.0, 3.0]
    assert (found.restarts, found.retries) == (4, 0)
    assert found.busy_s > 2 * LIMIT_S, "two samples hung"
    of = dict(zip(HARM, (one for one in found.outcomes if isinstance(one, Failure))))
    assert "in _loop" in of["loop"].details and of["loop"].message.endswith("response 'loop'")
    # One of a kind is told of in full.
    assert of["hold"].details == ""
    assert "ended with exit code 7" in of["die 7"].message and "was killed by SIGSEGV" in of["segfault"].message


@pytest.mark.parametrize("kind", KINDS)
def test_those_that_are_scored_beside_it_do_not_suffer(waited: Waited, kind: str) -> None:
    (found,) = waited[kind]
    assert shown(found.outcomes) == [1.0, *(HARM[word] for word in BESIDE[1:4]), 2.0, 3.0]


def test_a_reward_of_a_class_that_cannot_travel_is_a_reward_like_any_other() -> None:
    (found,) = run(settings_of("by_word"), samples_of("odd", "bb"))
    assert (shown(found.outcomes), found.restarts) == ([1.0, 2.0], 0)


def test_coroutines_that_never_end_cost_no_process(waited: Waited) -> None:
    (found,) = waited["coroutines"]
    assert shown(found.outcomes) == ["timed_out", 1.0, "timed_out", 2.0]
    assert found.restarts == 0


def test_several_calls_wait_at_the_same_time(waited: Waited) -> None:
    one, other, none = waited["several calls"]
    assert (shown(one.outcomes), shown(other.outcomes), none.outcomes) == (["timed_out", 1.0], [2.0], [])


@pytest.mark.parametrize(("retries", "expected"), [(1, "raised"), (2, 1.0)])
def test_a_reward_that_fails_at_times_is_asked_again(retries: int, expected: str | float, tmp_path: Path) -> None:
    (found,) = run(settings_of("flaky", retries=retries), samples_of(f"{tmp_path / 'tries'} 2"))
    assert shown(found.outcomes) == [expected]
    assert found.retries == retries
    assert len((tmp_path / "tries").read_text()) == retries + 1


def test_a_hanging_sample_is_tried_again_as_often_as_configured(waited: Waited) -> None:
    (found,) = waited["tried again"]
    assert shown(found.outcomes) == ["timed_out", 1.0]
    assert (found.retries, found.restarts) == (1, 2)


def test_a_batch_that_fails_is_scored_again_sample_by_sample() -> None:
    (found,) = run(settings_of("Batch"), samples_of("a", "bad", "ccc"))
    assert shown(found.outcomes) == [1.0, "raised", 3.0]
    (found,) = run(settings_of("TooFew"), samples_of("a", "b"))
    assert shown(found.outcomes) == ["wrong_length", "wrong_length"]


def test_a_term_that_takes_batches_makes_none_of_the_others(waited: Waited) -> None:
    (found,) = waited["two terms"]
    assert shown(found.outcomes) == [31.0, "timed_out", 32.0]
    assert found.restarts == 1
    lost = found.outcomes[1]
    assert isinstance(lost, Failure) and lost.message.startswith("reward term word: no answer within")


def test_samples_of_one_call_go_to_the_rewards_of_their_sources() -> None:
    settings = settings_of("length")
    scaled = RewardTerms(name=f"{HERE}:scaled", params={"scale": 10.0})
    settings = replace(settings, sections={**settings.sections, "data.train": scaled})
    mixed = [*samples_of("ab"), *samples_of("ab", reward="data.train"), *samples_of("ab", reward="nowhere")]
    (found,) = run(settings, mixed)
    assert shown(found.outcomes) == [2.0, 20.0, "raised"]
    assert isinstance(found.outcomes[2], Failure) and found.outcomes[2].refused


def test_what_a_hanging_reward_has_started_ends_with_it(waited: Waited, child_path: Path) -> None:
    (found,) = waited["child"]
    assert shown(found.outcomes) == ["timed_out"]
    pid = int(child_path.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (RewardConfig(params={"nonsense": 1}), DataError, "params.nonsense is unknown"),
        (RewardConfig(name=f"{HERE}:NotReady"), DataError, "no licence"),
        (RewardConfig(name=f"{HERE}:DiesAtOnce"), WorkerError, "did not start: it ended with exit code 9"),
    ],
)
def test_a_process_that_cannot_start_is_an_error(config: RewardConfig, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run(replace(settings_of("length"), sections={"": config}))


def test_a_process_that_cannot_start_again_is_an_error_for_all_who_wait(tmp_path: Path) -> None:
    settings = settings_of("StartsOnce", params={"path": str(tmp_path / "started")})
    with pytest.raises(WorkerError, match="did not start: it ended with exit code 9"):
        run(settings, samples_of("die 1"), samples_of("a"))
