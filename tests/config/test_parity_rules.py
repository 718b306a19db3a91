"""The limits of the parity monitor: positive, ordered, and worth nothing where nothing can be compared."""

import pytest

from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.rules import check_config, start_up_notes
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind


@pytest.mark.parametrize(
    ("parity", "message"),
    [
        (
            ParityConfig(warn=ParityLimits(mean=0.6)),
            "rollout.parity.warn.mean=0.6 must not be above rollout.parity.stop.mean=0.5 (lower it",
        ),
        (
            ParityConfig(warn=ParityLimits(max=2.0), stop=ParityLimits(max=1.0)),
            "rollout.parity.warn.max=2.0 must not be above rollout.parity.stop.max=1.0 (lower it",
        ),
        (
            ParityConfig(stop=ParityLimits(max=0.0)),
            "rollout.parity.stop.max=0.0 must be above 0 nats (use null for no limit",
        ),
        (ParityConfig(dump=-1), "rollout.parity.dump=-1 must not be negative (use 0 or more)"),
        (ParityConfig(dump_tokens=0), "rollout.parity.dump_tokens=0 must be positive (use 1 or more)"),
        (ParityConfig(dump_files=0), "rollout.parity.dump_files=0 must be positive (use 1 or more)"),
    ],
)
def test_a_wrong_limit_is_one_violation(parity: ParityConfig, message: str, config: RunConfig) -> None:
    config.rollout.parity = parity
    (violation,) = check_config(config)
    assert str(violation).startswith(message)


def test_limits_of_one_level_need_none_of_the_other(config: RunConfig) -> None:
    config.rollout.parity = ParityConfig(warn=ParityLimits(max=3.0), stop=ParityLimits(mean=0.01))
    assert check_config(config) == []


def test_a_monitor_that_has_nothing_to_compare_is_told_of(config: RunConfig) -> None:
    assert not [note for note in start_up_notes(config) if "rollout.parity" in note]
    config.controller = ControllerKind.one_step_off
    (note,) = [note for note in start_up_notes(config) if "rollout.parity" in note]
    assert "every rollout is a version old" in note
