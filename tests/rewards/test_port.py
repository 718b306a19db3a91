"""The port: rewards from outside, one sample or a batch, plain or async, and their weighted sum."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from megappo.config.reward import RewardConfig, RewardTerm, RewardTerms
from megappo.errors import DataError, RewardError
from megappo.rewards import Failure, Reward, Sample, make_reward, make_rewards, reward_violations
from megappo.rewards.calling import Caller, Outcome, Term

HERE = "tests.rewards.port_rewards"


def sample_of(response: str, **more: Any) -> Sample:
    return Sample(prompt="p", response=response, answer=None, **more)


def outside(name: str, **params: Any) -> RewardConfig:
    return RewardConfig(name=f"{HERE}:{name}", params=params)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (outside("length"), [1.0, 3.0]),
        (outside("scaled", scale=2.0, offset=1.0), [3.0, 7.0]),
        (outside("length_later"), [1.0, 3.0]),
        (outside("Batch", scale=0.5), [0.5, 1.5]),
        (outside("AsyncBatch"), [2.0, 2.0]),
        (outside("OnePerSample", add=10.0), [11.0, 13.0]),
    ],
)
def test_functions_and_classes_score_one_sample_or_a_batch_plain_or_async(
    config: RewardConfig, expected: list[float]
) -> None:
    found = make_reward(config).score([sample_of("a"), sample_of("abc")])
    assert [reward.score for reward in found] == expected


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (outside("scaled"), r"params\.scale must be given"),
        (outside("scaled", scale=1.0, size=2), r"params\.size is unknown \(use scale, offset, require_stop\)"),
        (outside("length", scale=1.0), r"params\.scale is unknown \(use require_stop\)"),
        (outside("Batch", scales=1.0), r"params\.scales is unknown \(use scale, require_stop\)"),
        (outside("takes_anything", size=1), r"params\.scale must be given"),
        (outside("takes_no_sample"), r"cannot be called with the sample and params=\{\}: too many positional"),
        (outside("Nothing"), r"no method score\(samples\) and cannot be called"),
        (RewardConfig(name="tests.rewards.port_rewards:__doc__"), "a str is no function and no class"),
        (RewardConfig(params={"require_stop": "yes"}), "require_stop='yes' must be true or false"),
    ],
)
def test_what_is_no_reward_or_has_wrong_parameters_is_refused(config: RewardConfig, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make_reward(config)


def test_a_response_that_did_not_end_scores_0_where_it_has_to() -> None:
    reward = make_reward(outside("scaled", scale=2.0, require_stop=True))
    found = reward.score([sample_of("abc", finish_reason=reason) for reason in ("stop", "length")])
    assert [one.score for one in found] == [6.0, 0.0]


TERMS = RewardTerms(
    terms={
        "long": RewardTerm(name=f"{HERE}:length", weight=0.5),
        "later": RewardTerm(name=f"{HERE}:length_later", weight=-1.0),
        "exact": RewardTerm(name="exact_match", weight=0.0),
    }
)


def test_terms_add_up_by_weight_and_each_is_a_part() -> None:
    reward = make_reward(TERMS)
    (found,) = reward.score([Sample(prompt="p", response="abcd", answer="abcd")])
    assert found.score == 0.5 * 4 - 4
    # A term of weight 0 is measured; a term's own part is below its name.
    assert found.parts == {"long": 4.0, "later": 4.0, "later/later": 1.0, "exact": 1.0}


def test_the_only_reward_of_a_section_keeps_its_score_and_parts() -> None:
    (found,) = make_reward(outside("length_later")).score([sample_of("ab")])
    assert found == Reward(score=2.0, parts={"later": 1.0})


def test_a_term_that_fails_is_the_failure_of_the_sample() -> None:
    terms = {"long": RewardTerm(name=f"{HERE}:length"), "word": RewardTerm(name=f"{HERE}:by_word")}
    reward = make_reward(RewardTerms(terms=terms))
    found = asyncio.run(reward.outcomes([sample_of("abc"), sample_of("nan"), sample_of("raise x")], Caller()))
    assert found[0] == Reward(score=6.0, parts={"long": 3.0, "word": 3.0})
    assert [str(one.kind) for one in found[1:] if isinstance(one, Failure)] == ["not_finite", "raised"]
    assert isinstance(found[2], Failure) and found[2].message.startswith("reward term word (tests.rewards")


RESULTS: list[tuple[Any, str | float]] = [
    (1, 1.0),
    (True, 1.0),
    (np.float32(0.5), 0.5),
    (np.bool_(False), 0.0),
    (Reward(score=np.float64(2.0), parts={"x": 1}), 2.0),  # type: ignore[arg-type]
    (None, "none"),
    (float("nan"), "not_finite"),
    (float("-inf"), "not_finite"),
    (10**400, "raised"),
    (1j, "wrong_type"),
    ("1", "wrong_type"),
    ([1.0], "wrong_type"),
    ((1.0, {}), "wrong_type"),
    (np.ones(1), "wrong_type"),
    (Reward(score=None), "wrong_type"),  # type: ignore[arg-type]
    (Reward(score=1.0, parts={"x": None}), "wrong_type"),  # type: ignore[dict-item]
    (Reward(score=1.0, parts={"x": float("nan")}), "not_finite"),
    (Reward(score=1.0, parts=None), "wrong_type"),  # type: ignore[arg-type]
    (Reward(score=1.0, extracted=5), "wrong_type"),  # type: ignore[arg-type]
]


def judged(result: Any) -> str | float:
    async def outcome() -> Outcome:
        (found,) = await Term(label="reward x", score_one=lambda _: result).outcomes([sample_of("a")], Caller())
        return found

    found = asyncio.run(outcome())
    return str(found.kind) if isinstance(found, Failure) else found.score


@pytest.mark.parametrize(("result", "expected"), RESULTS, ids=[repr(result)[:40] for result, _ in RESULTS])
def test_what_a_reward_may_return(result: Any, expected: str | float) -> None:
    assert judged(result) == expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1.0], "wrong_length"),
        ([1.0, 2.0, 3.0], "wrong_length"),
        (None, "none"),
        (1.0, "wrong_type"),
        ("ab", "wrong_type"),
        (iter([1.0, 2.0]), "wrong_type"),
        # A mean over the batch has a length as far as its class is concerned, and a set no order.
        (np.array(0.5), "wrong_type"),
        (torch.tensor(0.5), "wrong_type"),
        ({1.0, 2.0}, "wrong_type"),
        ({"a": 1.0, "b": 2.0}, "wrong_type"),
        ([10**400, 1.0], "raised"),
    ],
)
def test_a_batch_needs_one_reward_each(result: Any, expected: str) -> None:
    term = Term(label="reward x", score=lambda _: result)
    found = asyncio.run(term.outcomes([sample_of("a"), sample_of("b")], Caller()))
    assert [str(one.kind) for one in found if isinstance(one, Failure)] == [expected] * 2


def test_one_bad_entry_of_a_batch_leaves_the_others_alone() -> None:
    term = Term(label="reward x", score=lambda _: [1.0, None])
    one, other = asyncio.run(term.outcomes([sample_of("a"), sample_of("b")], Caller()))
    assert one == Reward(score=1.0)
    assert isinstance(other, Failure) and "returned None for the response 'b'" in other.message


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (outside("TooFew"), "1 rewards for 2 samples"),
        (outside("Batch"), "raised ValueError: a bad one"),
        (outside("by_word"), "score nan is not finite"),
    ],
)
def test_scoring_here_and_now_raises_what_goes_wrong(config: RewardConfig, text: str) -> None:
    word = "bad" if config.name.endswith("Batch") else "nan"
    with pytest.raises(RewardError, match=text):
        make_reward(config).score([sample_of(word), sample_of("b")])


def test_every_fault_of_every_section_is_told_at_once() -> None:
    sections = {
        "reward": RewardTerms(
            terms={
                "a": RewardTerm(name="exact_match", params={"stripp": True}),
                "b": RewardTerm(name="no.such.module:reward"),
                "c": RewardTerm(name=f"{HERE}:NotReady"),
                "d": RewardTerm(name="exact_match"),
                "e": RewardTerm(name="length", params={"both_sides": True}),
            }
        ),
        "data.train.reward": RewardTerms(name=f"{HERE}:scaled"),
    }
    violations = reward_violations(sections, timeout_s=60.0)
    found = {violation.key: violation.rule for violation in violations}
    assert list(found) == [
        "reward.terms.a",
        "reward.terms.b",
        "reward.terms.c",
        "reward.terms.e.params.target_tokens",
        "reward.terms.e.params.scale_tokens",
        "data.train.reward.params.scale",
    ]
    assert "params.stripp is unknown" in found["reward.terms.a"]
    assert "cannot be imported" in found["reward.terms.b"]
    assert "it raised RuntimeError: no licence" in found["reward.terms.c"]
    assert str(violations[3]) == (
        "reward.terms.e.params.target_tokens=null must be given for the reward length "
        "(add reward.terms.e.params.target_tokens=...)"
    )


def test_a_call_may_take_longer_than_what_the_reward_allows_itself() -> None:
    # 3 tries of 20 s with waits of 0.5 s and 1 s.
    judge = RewardTerm(name="http", params={"url": "http://judge:80", "retries": 2})
    terms = {"program": RewardTerm(name="code", params={"total_s": 60}), "judge": judge}
    sections = {"reward": RewardTerms(terms=terms), "data.train.reward": RewardTerms(name="code")}
    assert reward_violations(sections, timeout_s=61.51) == []
    assert [str(violation) for violation in reward_violations(sections, timeout_s=60.0)] == [
        "reward.terms.program.params.total_s=60 lets a call take 60 s, and reward.timeout_s=60 must be longer "
        "(lower it, or raise reward.timeout_s above 60)",
        "reward.terms.judge.params.timeout_s=20 lets a call take 61.5 s with retries=2, backoff_s=0.5, and "
        "reward.timeout_s=60 must be longer (lower it, or raise reward.timeout_s above 61.5)",
    ]
    assert [violation.key for violation in reward_violations(sections, timeout_s=30.0)] == [
        "reward.terms.program.params.total_s",
        "reward.terms.judge.params.timeout_s",
        "data.train.reward.params.total_s",
    ]


def test_rewards_of_several_sections_are_made_by_their_names() -> None:
    made = make_rewards({"": TERMS, "data.train_sources.math": outside("length")})
    assert [set(reward.terms) for reward in made.values()] == [{"long", "later", "exact"}, {""}]
