"""Rules about plug-ins named in the configuration. The tables are the registries' own names (a test holds them equal):
this package must not import what the registries import."""

from difflib import get_close_matches

from megappo.config.reward_rules import reward_terms
from megappo.config.run import RunConfig
from megappo.errors import Violation

AGENTS = ("single_turn", "tool_loop")
ENGINES = ("hf", "sglang")
REWARDS = (
    "code",
    "exact_match",
    "format",
    "http",
    "length",
    "math_verify",
    "model",
    "multiple_choice",
    "numeric",
    "overlong",
    "reasoning_gym",
    "repetition",
    "reward_model",
)
SOURCES = ("datasets", "jsonl", "parquet", "reasoning_gym")
TOOL_FORMATS = ("hermes", "json", "pythonic")
TRACKERS = ("mlflow", "tensorboard")
TRANSPORTS = ("broadcast", "disk", "ipc")


def plug_ins_are_known(config: RunConfig) -> list[Violation]:
    """What is named (engine, rollout program, rewards, sources, trackers, transport) is registered, or named
    `package.module:name`."""
    named = [
        ("rollout.engine", config.rollout.engine, ENGINES),
        ("rollout.agent", config.rollout.agent, AGENTS),
        ("rollout.tool_loop.format", config.rollout.tool_loop.format, TOOL_FORMATS),
        *((f"{key}.name", term.name, REWARDS) for key, term in reward_terms(config)),
        *((f"{key}.kind", source.kind, SOURCES) for key, source in config.data.by_key().items()),
        *(("tracking.trackers", name, TRACKERS) for name in config.tracking.trackers),
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
