"""The section `checkpoint`: what is kept can exist, and nothing is set that has no effect."""

import pytest

from megappo.config.checkpoint import BestMode, CheckpointConfig, OnDamaged, deadline_seconds
from megappo.config.checkpoint_rules import makes_checkpoints
from megappo.config.rules import check_config, start_up_notes
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.errors import ConfigError


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (CheckpointConfig(keep_last=0), "checkpoint.keep_last=0 must be positive"),
        (CheckpointConfig(keep_every=0), "checkpoint.keep_every=0 must be positive"),
        (
            CheckpointConfig(keep_every=35),
            "checkpoint.keep_every=35 must be a multiple of trainer.save_freq=10 (use 40)",
        ),
        (CheckpointConfig(on_signal_s=-1.0), "checkpoint.on_signal_s=-1.0 must not be negative"),
        (CheckpointConfig(on_signal_s=float("nan")), "checkpoint.on_signal_s=nan is not a number"),
        (
            CheckpointConfig(best_mode=BestMode.min),
            "checkpoint.best_mode=min has no use with checkpoint.keep_best=null (leave it out, or name a metric there)",
        ),
        (
            CheckpointConfig(keep_best="reward/men"),
            "checkpoint.keep_best=reward/men is no metric (did you mean reward/mean",
        ),
        (
            CheckpointConfig(keep_best="val/reward/mean"),
            "checkpoint.keep_best=val/reward/mean is never measured: trainer.test_freq=-1",
        ),
        (
            CheckpointConfig(keep_best="critic/value_loss"),
            "checkpoint.keep_best=critic/value_loss is never measured: algorithm.advantage.name=grpo trains no critic",
        ),
        (
            CheckpointConfig(save_before_deadline="90"),
            "checkpoint.save_before_deadline=90 must be HH:MM:SS (write for example 23:30:00",
        ),
    ],
)
def test_a_wrong_key_is_one_violation(checkpoint: CheckpointConfig, message: str, config: RunConfig) -> None:
    config.trainer.save_freq, config.checkpoint = 10, checkpoint
    (violation,) = [found for found in check_config(config) if found.key.startswith("checkpoint.")]
    assert str(violation).startswith(message)


def test_a_run_that_saves_never_refuses_every_key_of_how(config: RunConfig) -> None:
    config.checkpoint = CheckpointConfig(
        asynchronous=True, keep_last=3, keep_best="reward/mean", best_mode=BestMode.min, on_damaged=OnDamaged.refuse
    )
    keys = [f"checkpoint.{name}" for name in ("asynchronous", "keep_last", "keep_best", "best_mode", "on_damaged")]
    violations = check_config(config)
    assert [violation.key for violation in violations] == keys
    assert {violation.rule for violation in violations} == {
        "has no use with trainer.save_freq=-1: no checkpoint is made"
    }


def test_a_run_that_only_resumes_may_refuse_what_is_damaged(config: RunConfig) -> None:
    config.trainer.resume, config.checkpoint.on_damaged = "auto", OnDamaged.refuse
    assert check_config(config) == []


def test_a_deadline_makes_a_checkpoint_without_a_frequency(config: RunConfig) -> None:
    assert not makes_checkpoints(config)
    config.checkpoint = CheckpointConfig(save_before_deadline="23:30:00", asynchronous=True, on_signal_s=0.0)
    assert check_config(config) == []
    assert makes_checkpoints(config)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:01", 1),
        ("1:00:00", 3600),
        ("47:59:59", 172799),
        ("00:00:00", None),
        ("00:60:00", None),
        ("10:00", None),
        ("", None),
        ("-1:00:00", None),
        ("45000", None),
    ],
)
def test_a_deadline_is_hours_minutes_and_seconds_above_zero(text: str, seconds: int | None) -> None:
    assert deadline_seconds(text) == seconds


def test_a_metric_of_the_best_that_few_checkpoints_have_is_told_of(config: RunConfig) -> None:
    config.trainer.save_freq, config.trainer.test_freq = 10, 10
    config.checkpoint.keep_best = "val/reward/mean"
    assert check_config(config) == []
    assert not [note for note in start_up_notes(config) if "keep_best" in note]
    config.trainer.test_freq = 15
    (note,) = [note for note in start_up_notes(config) if "keep_best" in note]
    assert "one in 3" in note


def test_resume_is_short_for_the_key_of_the_trainer() -> None:
    assert load_run_config(["experiment=quickstart", "resume=auto"]).trainer.resume == "auto"
    with pytest.raises(ConfigError) as caught:
        load_run_config(["experiment=quickstart", "resume=newest"])
    assert str(caught.value).startswith("config error: trainer.resume=newest must be auto, never or a path with a /")
