"""Rules of the sections `trace` and `profile`."""

from collections.abc import Sequence

from megappo.config.profile import ProfileConfig, ProfiledPhase
from megappo.config.run import RunConfig
from megappo.errors import Violation


def observed_steps_are_run(config: RunConfig) -> list[Violation]:
    """Steps that are traced or profiled count from 1 to the last one."""
    last = config.trainer.total_steps
    violations: list[Violation] = []
    for key, steps in (("trace.steps", config.trace.steps), ("profile.steps", config.profile.steps)):
        for step in dict.fromkeys(steps):
            if step < 1:
                rule, remedy = "must be positive", "the first step is 1"
            elif last is not None and step > last:
                rule, remedy = f"is after the last step: trainer.total_steps={last}", f"use steps up to {last}"
            else:
                continue
            violations.append(Violation(key=key, value=step, rule=rule, remedy=remedy))
    return violations


def profiled_processes_are_there(config: RunConfig) -> list[Violation]:
    """Profiled ranks and engines exist."""
    profile, cluster = config.profile, config.cluster
    if not profile.steps:
        return []
    sizes = [cluster.pools.get(pool, 0) for pool in (cluster.actor, cluster.critic)]
    ranks = _out_of_range("profile.ranks", profile.ranks, max(sizes), "ranks")
    if ProfiledPhase.generate not in profile.phases:
        return ranks
    return ranks + _out_of_range("profile.engines", profile.engines, config.rollout.num_engines, "engines")


def _out_of_range(key: str, numbers: Sequence[int], count: int, what: str) -> list[Violation]:
    rule, remedy = f"is none of the {count} {what}", f"count from 0: use 0 to {count - 1}"
    wrong = [number for number in numbers if not 0 <= number < count]
    return [Violation(key=key, value=number, rule=rule, remedy=remedy) for number in wrong]


def profile_settings_are_used(config: RunConfig) -> list[Violation]:
    """How to profile is said only where something is profiled, and something is profiled where steps are named."""
    profile, default = config.profile, ProfileConfig()
    if profile.steps and not profile.phases:
        rule, remedy = "leaves nothing to profile", "name one, or set profile.steps=[]"
        return [Violation(key="profile.phases", value="[]", rule=rule, remedy=remedy)]
    if profile.steps:
        return []
    names = ("phases", "ranks", "engines", "stack", "memory", "shapes")
    rule, remedy = "has no use with profile.steps=[]", "leave it out, or set profile.steps=[3]"
    return [
        Violation(key=f"profile.{name}", value=value, rule=rule, remedy=remedy)
        for name in names
        if (value := getattr(profile, name)) != getattr(default, name)
    ]
