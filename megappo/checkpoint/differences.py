"""What a changed configuration means for a run that goes on from a checkpoint.

To add a key whose change must be refused, or is nobody's business: a line in `_VERDICTS`, or in `_SUPERVISED` for the
section of a command of supervised training. Other keys may change.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml

from megappo.checkpoint.reading import readable
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS
from megappo.config.run import RunConfig
from megappo.errors import CheckpointError

CONFIG_FILE = "config.yaml"
"""Name of the resolved configuration in a checkpoint."""

# Any: the values of a configuration as YAML holds them.
Tree = Mapping[str, Any]


class Verdict(Enum):
    """What a difference means."""

    ignored = "ignored"
    """No number of the training depends on the key."""
    allowed = "allowed"
    """The run goes on with the new value."""
    refused = "refused"
    """The state in the checkpoint does not fit the new value."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Difference:
    """One key whose value is not that of the checkpoint."""

    key: str
    saved: object
    """None also where the checkpoint's version had no such key."""
    wanted: object
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={_shown(self.wanted)}, was {_shown(self.saved)}: {self.reason}"


_NO_NUMBER = "no number of the training depends on it"
_NEW_VALUE = "the run goes on with the new value"
_ANY_LAYOUT = "checkpoints load under any layout; where that of a model changes, its ranks draw anew from the seed"
_OTHER_ANSWERS = "other engines may sample other answers to the same prompts"
_SAME_PROMPTS = "the prompts are compared when the run starts, and others are refused"
_POSITION = "the position in the data is one in the order of the checkpoint's seed, or of its curriculum"
_DTYPE = "weights and optimizer state are of another type"
_OPTIMIZER = "the state is another optimizer's"
_LORA = "the checkpoint holds other adapters, or none"

_VERDICTS: dict[str, tuple[Verdict, str]] = {
    "seed": (Verdict.refused, _POSITION),
    "data.shuffle": (Verdict.refused, _POSITION),
    "model.dtype": (Verdict.refused, _DTYPE),
    "actor.lora": (Verdict.refused, _LORA),
    "critic.lora": (Verdict.refused, _LORA),
    "actor.optim.name": (Verdict.refused, _OPTIMIZER),
    "critic.optim.name": (Verdict.refused, _OPTIMIZER),
    "algorithm.kl.in_reward.coef": (
        Verdict.allowed,
        "a fixed coefficient has the new value; an adaptive one goes on from where it was",
    ),
    "model.path": (
        Verdict.allowed,
        "the reference policy comes from there: it must hold the starting weights of the checkpoint's run",
    ),
    "critic.path": (Verdict.allowed, "the critic's weights are those of the checkpoint"),
    "data.curriculum": (Verdict.refused, _POSITION),
    "data.train": (Verdict.allowed, _SAME_PROMPTS),
    "data.train_sources": (Verdict.allowed, _SAME_PROMPTS),
    "data.chat_template": (Verdict.allowed, _SAME_PROMPTS),
    "data.max_prompt_tokens": (Verdict.allowed, _SAME_PROMPTS),
    "actor.parallelism": (Verdict.allowed, _ANY_LAYOUT),
    "critic.parallelism": (Verdict.allowed, _ANY_LAYOUT),
    "reward_model.parallelism": (Verdict.allowed, _ANY_LAYOUT),
    "cluster": (Verdict.allowed, _ANY_LAYOUT),
    "rollout.engine": (Verdict.allowed, _OTHER_ANSWERS),
    "rollout.num_engines": (Verdict.allowed, _OTHER_ANSWERS),
    "rollout.tensor": (Verdict.allowed, _OTHER_ANSWERS),
    "rollout.dtype": (Verdict.allowed, _OTHER_ANSWERS),
    "rollout.sglang": (Verdict.allowed, _OTHER_ANSWERS),
    "rollout.urls": (Verdict.allowed, _OTHER_ANSWERS),
    **dict.fromkeys(
        (
            "run",
            "tracking",
            "record",
            "trace",
            "profile",
            "sft",
            "rm",
            "checkpoint",
            "trainer.resume",
            "trainer.save_freq",
            "trainer.export_hf_freq",
            "trainer.num_rollout_samples",
            "trainer.val_before_train",
            "cluster.address",
            "cluster.num_cpus",
            "cluster.start_timeout_s",
            "cluster.call_timeout_s",
            "cluster.object_store_bytes",
            "reward.workers",
            "reward.concurrency",
            "reward.timeout_s",
            "reward.retries",
            "rollout.api_key_env",
            "rollout.start_timeout_s",
            "rollout.request_timeout_s",
            "rollout.parity",
            "rollout.recovery",
            "weight_sync",
            "watchdog",
            "restart",
        ),
        (Verdict.ignored, _NO_NUMBER),
    ),
}

_STEPS_OF_EPOCHS = (
    "trainer.total_epochs counts steps of one size, and those so far were of another (trainer.total_steps=N says by "
    "itself when the run ends)"
)

_SAME_ROWS = "the rows are compared when the run starts, and others are refused"
_BATCHES = "the position in the data is one in the batches of the checkpoint"

_SUPERVISED: dict[str, tuple[Verdict, str]] = {
    "batch_size": (Verdict.refused, _BATCHES),
    "batch_tokens": (Verdict.refused, _BATCHES),
    "optim.name": (Verdict.refused, _OPTIMIZER),
    "lora": (Verdict.refused, _LORA),
    "max_tokens": (Verdict.allowed, _SAME_ROWS),
    "over_long": (Verdict.allowed, _SAME_ROWS),
    "train_on": (Verdict.allowed, _SAME_ROWS),
    **dict.fromkeys(("output", "save_freq", "test_freq", "tracked"), (Verdict.ignored, _NO_NUMBER)),
}
"""Keys of the section that a command of supervised training reads."""
_ONLY_OF_PPO = (
    "controller",
    "algorithm",
    "reward",
    "rollout",
    "weight_sync",
    "trainer",
    "critic",
    "validation",
    "actor.optim",
    "batching.prompts_per_step",
    "batching.samples_per_prompt",
    "batching.ppo_epochs",
    "batching.mini_batch_prompts",
)


def compare_configs(saved: Tree, wanted: Tree, *, section: str | None = None) -> list[Difference]:
    """Return every key whose value differs, in the order of the configuration.

    Args:
        saved: the configuration of the checkpoint (`read_config`).
        wanted: that of the run that is to go on from it, as resolved YAML.
        section: of a command of supervised training, such as `sft`; None: `megappo train`.
    """
    verdicts = _VERDICTS if section is None else _supervised_verdicts(section)
    had_critic, has_critic = _trains_critic(saved), _trains_critic(wanted)
    differences: list[Difference] = []
    for key, old, new in _changes(saved, wanted, _plain(RunConfig())):
        verdict, reason = _verdict(key, verdicts)
        if key.startswith("critic.") and False in (had_critic, has_critic):
            verdict, reason = Verdict.ignored, "no critic goes on"
        elif key == "algorithm.advantage.name" and (had_critic, has_critic) == (False, True):
            verdict, reason = Verdict.refused, "it needs a critic, and the checkpoint holds none"
        elif key == "algorithm.advantage.name" and (had_critic, has_critic) == (True, False):
            verdict, reason = Verdict.allowed, "the critic of the checkpoint is left behind"
        elif key.endswith(".optim.momentum") and bool(old) != bool(new) and verdict is not Verdict.ignored:
            verdict, reason = Verdict.refused, _OPTIMIZER  # SGD has state with momentum only
        elif key == "batching.prompts_per_step" and verdict is Verdict.allowed and _ends_by_epochs(wanted):
            verdict, reason = Verdict.refused, _STEPS_OF_EPOCHS
        differences.append(Difference(key=key, saved=old, wanted=new, verdict=verdict, reason=reason))
    return differences


def read_config(folder: Path) -> dict[str, Any]:  # Any: as in Tree
    """Return the configuration that a checkpoint was made with. Raises CheckpointError when it cannot be read."""
    path = folder / CONFIG_FILE
    with readable(path):
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no configuration")
    return cast(dict[str, Any], content)


def _supervised_verdicts(section: str) -> dict[str, tuple[Verdict, str]]:
    """Return the verdicts of a command that reads this section."""
    unread = dict.fromkeys(_ONLY_OF_PPO, (Verdict.ignored, _NO_NUMBER))
    kept = {key: verdict for key, verdict in _VERDICTS.items() if key.partition(".")[0] not in unread}
    read = {f"{section}.{key}": verdict for key, verdict in _SUPERVISED.items()}
    return kept | unread | {section: (Verdict.allowed, _NEW_VALUE)} | read


def _verdict(key: str, verdicts: Mapping[str, tuple[Verdict, str]]) -> tuple[Verdict, str]:
    """Return the entry of the key or of the innermost section that has one."""
    while key:
        if key in verdicts:
            return verdicts[key]
        key = key.rpartition(".")[0]
    return Verdict.allowed, _NEW_VALUE


def _changes(saved: Tree, wanted: Tree, default: Tree, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (key, saved, wanted). A key that only one version has counts where it is not at its default."""
    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        key, of_default = f"{prefix}{name}", default.get(name)
        old, new = saved.get(name, of_default), wanted.get(name, of_default)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = cast(Tree, of_default) if isinstance(of_default, Mapping) else {}
            yield from _changes(cast(Tree, old), cast(Tree, new), inner, f"{key}.")
        elif old != new:
            yield key, old, new


def _trains_critic(config: Tree) -> bool | None:
    """Whether the configured estimator reads values; None: one from outside the package, which only a run asks."""
    advantage: Tree = config.get("algorithm", {}).get("advantage", {})
    declaration = ESTIMATOR_DECLARATIONS.get(advantage.get("name", RunConfig().algorithm.advantage.name))
    return None if declaration is None else declaration.needs_values


def _ends_by_epochs(config: Tree) -> bool:
    """Whether passes over the prompts say when a run of `megappo train` ends."""
    return config.get("trainer", {}).get("total_steps") is None


def _plain(value: object) -> Any:  # Any: as in Tree
    """Return a configuration as YAML holds it."""
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    return value.name if isinstance(value, Enum) else value


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
