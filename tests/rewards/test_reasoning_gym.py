import pytest
import reasoning_gym

from megappo.config.data import SourceConfig
from megappo.data.sources import read_rows
from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.reasoning_gym import ReasoningGym


def sample(response: str, *, answer: str | None = "pot", entry: object = None) -> Sample:
    return Sample(prompt="", response=response, answer=answer, extra={} if entry is None else {"entry": entry})


def test_answers_right_in_part_get_the_scorers_credit():
    # One letter of three is in its place.
    (reward,) = ReasoningGym(task="spell_backward").score([sample("pxx")])
    assert reward.score == pytest.approx(1 / 3)
    assert reward.parts == {"correct": 0.0}


def test_binary_scores_have_no_credit():
    reward = ReasoningGym(task="spell_backward", binary=True)
    assert reward.score([sample("pxx"), sample("pot")]) == [
        Reward(score=0.0, parts={"correct": 0.0}),
        Reward(score=1.0, parts={"correct": 1.0}),
    ]


def test_the_rows_of_a_source_score_their_own_answers():
    source = SourceConfig(kind="reasoning_gym", task="decimal_arithmetic", params={"max_terms": 3}, size=8)
    samples = [sample(row.answer or "", answer=row.answer, entry=row.extra["entry"]) for row in read_rows(source)]
    rewards = ReasoningGym(task="decimal_arithmetic", params={"max_terms": 3}).score(samples)
    assert [reward.score for reward in rewards] == [1.0] * 8


@pytest.mark.parametrize(
    ("task", "garbage"), [("prime_factorization", "x"), ("game_of_life", '{"a": 1}'), ("boxnet", "5")]
)
def test_a_scorer_that_raises_on_garbage_scores_0(task, garbage):
    (row,) = read_rows(SourceConfig(kind="reasoning_gym", task=task, size=1, seed=1))
    entry = row.extra["entry"]
    library_scorer = reasoning_gym.create_dataset(task, size=1, seed=1).score_answer
    with pytest.raises((KeyError, TypeError, ValueError)):
        library_scorer(garbage, entry)
    assert ReasoningGym(task=task).score([sample(garbage, entry=entry)]) == [Reward(score=0.0, parts={"correct": 0.0})]


def test_a_row_that_the_scorer_cannot_use_is_an_error():
    # This scorer reads the row's metadata, which a row from elsewhere lacks: no response could ever score.
    with pytest.raises(DataError, match="scorer of number_format fails on the answer of a row"):
        ReasoningGym(task="number_format").score([sample("pot")])
