"""What two evaluations were made with: a difference of models is one only where the rest is the same.

Scores of different rewards are not compared at all. Other settings may be what one wants to compare; they are told of,
and statistics that mean something else with them are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megappo.config.reward_rules import REWARD_MODEL
from megappo.errors import ConfigError, DataError, Violation

# Any: the values of a configuration as YAML holds them.
Tree = Mapping[str, Any]

_READ = (
    "data.chat_template",
    "model.dtype",
    "reward.on_failure",
    "reward.failed_score",
    "rollout.engine",
    "rollout.dtype",
    "rollout.agent",
    "rollout.tool_loop",
    "rollout.validation",
    "validation.samples_per_prompt",
    "validation.correct_from",
    "validation.majority",
)
"""What answers and statistics depend on, beside model, prompts and rewards."""
_SCORED_BY = ("name", "params", "model_path", "terms")
"""What a section of rewards says of the scores."""
_STATISTICS = {"validation.correct_from": "pass_at_", "validation.majority": "majority"}
"""Setting -> beginning of the names of statistics that mean something else with another one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SettingDifference:
    """A key that was set otherwise."""

    key: str
    here: object
    there: object

    def __str__(self) -> str:
        return f"{self.key}={_shown(self.here)} (there {_shown(self.there)})"


def read_settings(folder: Path) -> Tree:
    """Return the configuration of an evaluation. Raises DataError."""
    path = folder / "config.yaml"
    try:
        return settings_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{folder} is no evaluation: {error} (give the --output of an earlier one)") from error


def settings_of(stored: str) -> Tree:
    """Return a configuration that is given as YAML. Raises ValueError if it is none."""
    tree: object = yaml.safe_load(stored)
    if not isinstance(tree, dict) or not {"data", "reward", "rollout", "validation"} <= tree.keys():
        raise ValueError("config.yaml holds no configuration")
    return tree


def require_same_rewards(here: Tree, there: Tree, *, folder: Path) -> None:
    """Raise ConfigError where a validation set of both was scored by other rewards."""
    violations: list[Violation] = []
    sets = [name for name in _sets(here) if name in _sets(there)]
    for key, ours, theirs in (_scored_by(here, there, name) for name in sets):
        for difference in _differences(ours, theirs, f"{key}."):
            rule = f"is another reward than that of {folder}, {_shown(difference.there)}: scores cannot be compared"
            remedy = "evaluate one of the two with the reward of the other"
            found = Violation(key=difference.key, value=_shown(difference.here), rule=rule, remedy=remedy)
            violations += [found] if found not in violations else []
    if violations:
        raise ConfigError(violations)


def setting_differences(here: Tree, there: Tree) -> list[SettingDifference]:
    """Return what else was set otherwise, in the order of the keys."""
    found: list[SettingDifference] = []
    for key in _READ:
        ours, theirs = _at(here, key), _at(there, key)
        found += _differences({key: ours}, {key: theirs}, "")
    return found


def incomparable(differences: Sequence[SettingDifference]) -> tuple[str, ...]:
    """Return how the names of the statistics begin that mean something else in the two."""
    return tuple(_STATISTICS[one.key] for one in differences if one.key in _STATISTICS)


def _sets(tree: Tree) -> dict[str, Tree]:
    """Return the validation sets by name, as `DataConfig.validating`."""
    data: Tree = tree["data"]
    one = data.get("validation")
    return data.get("validation_sets") or ({} if one is None else {"": one})


def _scored_by(here: Tree, there: Tree, name: str) -> tuple[str, Tree, Tree]:
    """Return the key of the rewards that score a set here, and what they are in both."""
    own = _sets(here)[name].get("reward") is not None
    place = f"data.validation_sets.{name}.reward" if name else "data.validation.reward"
    return place if own else "reward", _rewards(here, name), _rewards(there, name)


def _rewards(tree: Tree, name: str) -> Tree:
    section: Tree = _sets(tree)[name].get("reward") or tree["reward"]
    scored_by = {key: section.get(key) for key in _SCORED_BY}
    terms: Tree = section.get("terms") or {}
    if REWARD_MODEL in [section.get("name"), *(term.get("name") for term in terms.values())]:
        scored_by["reward_model"] = {"model_path": _at(tree, "reward_model.path")}
    return scored_by


def _differences(here: Tree, there: Tree, prefix: str) -> list[SettingDifference]:
    ours, theirs = (dict(_leaves(tree, prefix)) for tree in (here, there))
    return [
        SettingDifference(key=key, here=ours.get(key), there=theirs.get(key))
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key)
    ]


def _leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield every value that is no section with its key; folders of models as absolute paths."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif name == "model_path" and value is not None:
            yield f"{prefix}{name}", str(Path(str(value)).resolve())
        else:
            yield f"{prefix}{name}", value


def _at(tree: Tree, key: str) -> object:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
