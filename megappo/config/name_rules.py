"""Rules about plug-ins named in the configuration. The tables are the registries' own names (a test holds them equal):
this package must not import what the registries import."""

from difflib import get_close_matches

from megappo.config.run import RunConfig
from megappo.errors import Violation

ENGINES = ("hf", "sglang")
REWARDS = ("exact_match", "math_verify", "model", "reasoning_gym")
SOURCES = ("jsonl", "parquet", "reasoning_gym")
TRANSPORTS = ("broadcast", "disk", "ipc")


def plug_ins_are_known(config: RunConfig) -> list[Violation]:
    """Engine, reward, sources and transport are registered, or named `package.module:name`."""
    validation = config.data.validation
    named = [
        ("rollout.engine", config.rollout.engine, ENGINES),
        ("reward.name", config.reward.name, REWARDS),
        ("data.train.kind", config.data.train.kind, SOURCES),
        *([("data.validation.kind", validation.kind, SOURCES)] if validation is not None else []),
        ("weight_sync.transport", config.weight_sync.transport, TRANSPORTS),
    ]
    return [_unknown(key, name, known) for key, name, known in named if name not in known and ":" not in name]


def _unknown(key: str, name: str, known: tuple[str, ...]) -> Violation:
    near = get_close_matches(name, known, n=1)
    choices = f"{', '.join(known)}, or package.module:name"
    remedy = f"did you mean {near[0]}? There are {choices}" if near else f"use one of {choices}"
    return Violation(key=key, value=name, rule="is not there", remedy=remedy)


def in_process_engine_has_one_device(config: RunConfig) -> list[Violation]:
    """The transformers engine is not split over devices."""
    if config.rollout.engine != "hf" or config.rollout.tensor == 1:
        return []
    return [
        Violation(
            key="rollout.tensor",
            value=config.rollout.tensor,
            rule="must be 1 with rollout.engine=hf",
            remedy="use rollout=sglang for an engine over several devices",
        )
    ]


def reward_workers_fit_their_pool(config: RunConfig) -> list[Violation]:
    """Each reward-model worker takes a share of a device of its own."""
    devices = config.cluster.pools.get(config.cluster.reward)
    if config.reward.name != "model" or devices is None or config.reward.workers <= devices:
        return []
    return [
        Violation(
            key="reward.workers",
            value=config.reward.workers,
            rule=f"is more than the {devices} devices of pool {config.cluster.reward!r}",
            remedy=f"use at most {devices}",
        )
    ]
