"""What can be asked of validation answers, and which of its metrics there will be."""

import pytest

from megappo.config.data import SourceConfig
from megappo.config.rollout import SamplingConfig
from megappo.config.rules import check_config, check_evaluation
from megappo.config.run import RunConfig
from megappo.config.validation import SameAnswer, ValidationConfig
from megappo.config.validation_rules import is_evaluated

DRAWN = SamplingConfig(temperature=0.6, max_new_tokens=8)


def broken(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (ValidationConfig(samples_per_prompt=0), "validation.samples_per_prompt=0 must be at least 1"),
        (
            ValidationConfig(samples_per_prompt=4, pass_at=[1, 8]),
            "validation.pass_at=[1, 8] must be between 1 and validation.samples_per_prompt=4 "
            "(leave 8 out, or draw 8 answers)",
        ),
        (ValidationConfig(pass_at=[0]), "validation.pass_at=[0] must be between 1 and"),
        (ValidationConfig(pass_at=[1, 1]), "validation.pass_at=[1, 1] names a number twice (use [1])"),
        (ValidationConfig(bootstrap_samples=-1), "validation.bootstrap_samples=-1 must not be negative (0 is off)"),
        (ValidationConfig(confidence=1.0), "validation.confidence=1.0 must be between 0 and 1 (use 0.95)"),
        (
            ValidationConfig(majority=SameAnswer.response),
            "validation.majority=response has no use with validation.samples_per_prompt=1",
        ),
        (ValidationConfig(correct_from=0.5), "validation.correct_from=0.5 has no use with validation.pass_at=[]"),
        (
            ValidationConfig(bootstrap_samples=0, confidence=0.9),
            "validation.confidence=0.9 has no use with validation.bootstrap_samples=0",
        ),
        (ValidationConfig(correct_from=float("nan"), pass_at=[1]), "validation.correct_from=nan is not a number"),
    ],
)
def test_what_the_answers_cannot_tell_is_one_violation(
    validation: ValidationConfig, message: str, config: RunConfig
) -> None:
    config.validation, config.rollout.validation = validation, DRAWN
    (found,) = broken(config)
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (SamplingConfig(temperature=0.0, max_new_tokens=8), "rollout.validation.temperature=0 is greedy"),
        (SamplingConfig(top_k=1, max_new_tokens=8), "rollout.validation.top_k=1 is greedy"),
    ],
)
def test_several_greedy_answers_are_refused(sampling: SamplingConfig, why: str, config: RunConfig) -> None:
    config.validation, config.rollout.validation = ValidationConfig(samples_per_prompt=4, pass_at=[4]), sampling
    (found,) = broken(config)
    assert found.startswith(f"validation.samples_per_prompt=4 needs answers that differ, and {why} (use 1, or draw")


def test_settings_of_a_validation_that_never_is_are_refused(config: RunConfig) -> None:
    config.data.validation = None
    config.validation = ValidationConfig(pass_at=[1], save_generations=False)
    assert [violation.key for violation in check_config(config)] == [
        "validation.pass_at",
        "validation.save_generations",
    ]


@pytest.mark.parametrize("name", ["math 500", "", "..", "a/b"])
def test_a_set_whose_name_cannot_be_in_a_metric_is_refused(name: str, config: RunConfig) -> None:
    config.data.validation_sets = {name: SourceConfig(kind="reasoning_gym", task="spell_backward", size=10)}
    found = [text for text in broken(config) if "cannot be a part of a metric's name" in text]
    assert len(found) == 1


@pytest.mark.parametrize("name", ["reward", "source", "part"])
def test_a_set_is_not_called_like_a_metric(name: str, config: RunConfig) -> None:
    config.data.validation_sets = {name: SourceConfig(kind="reasoning_gym", task="spell_backward", size=10)}
    assert [text for text in broken(config) if f"is where other metrics are: val/{name}/..." in text]


@pytest.mark.parametrize(
    ("metric", "is_measured"),
    [
        ("val/reward/mean", True),
        ("val/reward/best", True),
        ("val/reward/pass_at_4", True),
        ("val/reward/pass_at_4/low", True),
        ("val/truncated_ratio", True),
        ("val/part/format/mean", True),
        ("val/source/gsm8k/reward/best", True),
        ("val/source/gsm8k/part/format/mean", True),
        ("val/reward/pass_at_8", False),
        ("val/reward/majority", False),
        ("val/source/gsm8k/reward/pass_at_8", False),
        ("val/source/gsm8k/reward/mean/low", False),
        ("val/hard/reward/mean", False),
        ("val/rewards/mean", False),
    ],
)
def test_a_best_metric_of_validation_is_one_that_it_measures(metric: str, is_measured: bool, config: RunConfig) -> None:
    config.validation, config.rollout.validation = ValidationConfig(samples_per_prompt=4, pass_at=[1, 4]), DRAWN
    config.trainer.save_freq = config.trainer.test_freq = 5
    config.checkpoint.keep_best = metric
    found = broken(config)
    assert found == [] if is_measured else found[0].startswith(f"checkpoint.keep_best={metric} is not measured")


def test_a_best_metric_of_a_set_names_the_set(config: RunConfig) -> None:
    config.data.validation_sets = {
        name: SourceConfig(kind="reasoning_gym", task="spell_backward", size=10) for name in ("easy", "hard")
    }
    config.data.validation = None
    config.trainer.save_freq = config.trainer.test_freq = 5
    config.checkpoint.keep_best = "val/hard/reward/mean"
    assert broken(config) == []
    config.checkpoint.keep_best = "val/reward/mean"
    (found,) = broken(config)
    assert "is not measured by this validation (use one of val/" in found


def test_an_evaluation_is_refused_for_what_it_reads_only(config: RunConfig) -> None:
    config.data.train = SourceConfig(kind="jsonl")  # without a path
    config.actor.parallelism.tensor = 3
    config.trainer.save_freq, config.algorithm.advantage.name = 0, "nonsense"
    config.rollout.sampling.max_new_tokens = -1
    assert broken(config)
    assert check_evaluation(config) == []
    config.rollout.validation.top_p = 2.0
    assert [violation.key for violation in check_evaluation(config)] == ["rollout.validation.top_p"]
    config.rollout.validation.top_p, config.data.validation = 1.0, None
    assert [violation.key for violation in check_evaluation(config)] == ["data.validation"]


def test_what_an_evaluation_reads() -> None:
    read = ["model.path", "rollout.validation.top_p", "data.validation_sets.a.path", "reward.terms", "seed"]
    unread = ["rollout.sampling.top_p", "data.train_sources.a.path", "cluster.actor", "actor.optim.lr", "sft.seed"]
    assert [is_evaluated(key) for key in read + unread] == [True] * len(read) + [False] * len(unread)
