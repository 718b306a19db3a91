"""Rules of the sections `trace` and `profile`."""

from dataclasses import replace

from megappo.config.profile import ProfileConfig, ProfiledPhase, TraceConfig
from megappo.config.profile_rules import (
    observed_steps_are_run,
    profile_settings_are_used,
    profiled_processes_are_there,
)
from megappo.config.run import RunConfig
from megappo.config.trainer import TrainerConfig


def with_profile(**settings: object) -> RunConfig:
    return replace(RunConfig(), profile=ProfileConfig(**settings))  # type: ignore[arg-type]


def test_a_step_is_traced_by_its_number_or_by_the_frequency() -> None:
    assert [step for step in range(1, 10) if TraceConfig(steps=[1], freq=4).covers(step)] == [1, 4, 8]
    assert not any(TraceConfig().covers(step) for step in range(10))


def test_observed_steps_are_those_of_the_run() -> None:
    config = replace(
        RunConfig(),
        trainer=TrainerConfig(total_steps=5),
        trace=TraceConfig(steps=[0, 5]),
        profile=ProfileConfig(steps=[6]),
    )
    assert [(found.key, found.value) for found in observed_steps_are_run(config)] == [
        ("trace.steps", 0),
        ("profile.steps", 6),
    ]


def test_profiled_ranks_and_engines_are_there() -> None:
    phases = [ProfiledPhase.generate]
    config = with_profile(steps=[1], ranks=[0, 7], engines=[-1], phases=phases)
    config.cluster.pools = {config.cluster.actor: 2}
    assert [(found.key, found.value) for found in profiled_processes_are_there(config)] == [
        ("profile.ranks", 7),
        ("profile.engines", -1),
    ]
    config.profile.phases = [ProfiledPhase.update]
    assert [found.key for found in profiled_processes_are_there(config)] == ["profile.ranks"]


def test_how_to_profile_is_said_only_where_something_is() -> None:
    assert [found.key for found in profile_settings_are_used(with_profile(stack=True, ranks=[1]))] == [
        "profile.ranks",
        "profile.stack",
    ]
    assert [found.key for found in profile_settings_are_used(with_profile(steps=[1], phases=[]))] == ["profile.phases"]
    assert profile_settings_are_used(with_profile(steps=[1], stack=True)) == []
