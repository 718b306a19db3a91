"""Command-line overrides and YAML files -> RunConfig, by Hydra's compose API.

The only module here that knows Hydra. Nothing is written, the working directory stays, and no DictConfig leaves it.
`group=choice` picks a file of a group (`rollout=hf`, `experiment=quickstart`); `key=value` sets one value afterwards.
`resume=auto` is short for `trainer.resume=auto`.
A value given for a whole map (`cluster.pools={a: 1, b: 1}`) replaces the map. Files of one's own, in folders named
like the groups, are found with `hydra.searchpath=[file:///FOLDER]`.
"""

import re
import typing
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megappo.config import schema
from megappo.config.rules import check_config
from megappo.config.run import RunConfig
from megappo.errors import ConfigError, Violation


def _share(count: int, parts: int) -> int:
    """`${share:COUNT,PARTS}` in a configuration file: a whole part of a count, at least 1."""
    return max(1, count // parts)


OmegaConf.register_new_resolver("share", _share, replace=True)

_SHORT_FOR = {"resume": "trainer.resume"}
"""Keys that people type often -> where they are."""

_FAULTS_IN_FILES = (HydraException, OmegaConfBaseException, yaml.YAMLError)

Rule = Callable[[RunConfig], list[Violation]]


def config_folder() -> Path:
    """Return the folder of the YAML files: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "run.yaml").is_file() else package / "configs"


def load_run_config(overrides: Sequence[str], *, rules: Sequence[Rule] = (check_config,)) -> RunConfig:
    """Compose, resolve and check a run configuration.

    Args:
        overrides: as on the command line: `experiment=quickstart`, `trainer.total_steps=20`.
        rules: checks of the composed configuration; `megappo train` adds those that read files.

    Raises:
        ConfigError: with every violation found: overrides, types, missing values and broken rules.
    """
    composed = _compose(overrides)
    violations = composed.violations
    if composed.config is not None:
        for rule in rules:
            violations.extend(found for found in rule(composed.config) if found not in violations)
    if violations or composed.config is None:
        raise ConfigError(violations)
    return composed.config


def override_of(key: str, text: str) -> str:
    """Return an override that sets a key to a text as it stands, whatever characters are in it."""
    # OmegaConf takes ${ for a reference, Hydra a quote for the end; a backslash before either must be doubled.
    literal = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + (r"\'" if found[2] else ""), literal)
    return f"{key}='{quoted}'"


def restore_run_config(text: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a configuration that `resolved_yaml` wrote, with some values changed. Its rules are not checked.

    Raises:
        ConfigError: it is of another version of megappo, or an override cannot be applied; all of them are listed.
    """
    violations: list[Violation] = []
    try:
        tree = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.create(text))
    except _FAULTS_IN_FILES as error:
        key = str(getattr(error, "full_key", None) or "config.yaml")
        remedy = "use the megappo that wrote it"
        reason = str(error).splitlines()[0]
        raise ConfigError([Violation(key=key, value="?", rule=f"cannot be read: {reason}", remedy=remedy)]) from error
    assert isinstance(tree, DictConfig)
    OmegaConf.set_struct(tree, False)
    for override in (_parse(text, violations) for text in overrides):
        if override is not None:
            _apply(tree, override, violations)
    if violations:
        raise ConfigError(violations)
    return cast(RunConfig, OmegaConf.to_object(tree))


def resolved_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML; enums as their names."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@dataclass(slots=True)
class _Composed:
    """What became of the overrides: a configuration without the faulty ones (None: nothing worth checking)."""

    config: RunConfig | None = None
    violations: list[Violation] = field(default_factory=list[Violation])


def _compose(overrides: Sequence[str]) -> _Composed:
    composed = _Composed()
    parsed = [override for text in overrides if (override := _parse(text, composed.violations)) is not None]
    groups = [override for override in parsed if _is_group(override)]
    _register_schema()
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        tree = _compose_groups(groups, composed.violations)
    groups_are_sound = tree is not None
    tree = tree if tree is not None else cast(DictConfig, OmegaConf.structured(RunConfig))
    OmegaConf.set_struct(tree, False)
    for override in parsed:
        if not _is_group(override):
            _apply(tree, override, composed.violations)
    unresolved = _unresolved(tree)
    composed.violations.extend(unresolved)
    if groups_are_sound and not unresolved:
        composed.config = cast(RunConfig, OmegaConf.to_object(tree))
    return composed


@cache
def _register_schema() -> None:
    """Tell Hydra of the schema, once per process: it takes a quarter of the time of a composition."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def _parse(text: str, violations: list[Violation]) -> Override | None:
    name, equals, value = text.partition("=")
    if equals and name in _SHORT_FOR:
        text = f"{_SHORT_FOR[name]}={value}"
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        key, equals, value = text.partition("=")
        remedy = f"""quote it: '{key}="{value}"'""" if equals else "write key=value or group=choice"
        violations.append(Violation(key=key, value=value, rule="cannot be read", remedy=remedy))
        return None
    if override.is_sweep_override():
        given = _given(override)
        remedy = f"for a list write [{given}], for text quote it"
        violations.append(Violation(key=override.key_or_group, value=given, rule="holds several values", remedy=remedy))
        return None
    return override


def _is_group(override: Override) -> bool:
    name = override.key_or_group
    is_choice = override.is_delete() or isinstance(override.value(), str)
    return name.startswith("hydra.") or (is_choice and (config_folder() / name).is_dir())


def _compose_groups(groups: Sequence[Override], violations: list[Violation]) -> DictConfig | None:
    lines = [cast(str, override.input_line) for override in groups]
    try:
        return compose("run", overrides=lines)
    except _FAULTS_IN_FILES as error:
        search_path = [line for line in lines if line.startswith("hydra.")]
        found = [violation for override in groups if (violation := _bad_choice(override, search_path)) is not None]
        violations.extend(found or [_fault_in_files(error, lines)])
        return None


def _bad_choice(override: Override, search_path: list[str]) -> Violation | None:
    """Return what is wrong with one group override on its own: a choice that does not exist."""
    try:
        compose("run", overrides=[*search_path, cast(str, override.input_line)])
    except MissingConfigException as error:
        group, choice = override.key_or_group, override.value()
        if error.missing_cfg_file != f"{group}/{choice}":
            return None
        options = ", ".join(error.options or [])
        return Violation(key=group, value=choice, rule="is not there", remedy=f"use one of {options}")
    except _FAULTS_IN_FILES:
        return None
    return None


def _fault_in_files(error: Exception, lines: Sequence[str]) -> Violation:
    """Return the violation for a file that is not YAML, does not fit the schema, or names a file that is not there."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        remedy = f"use one of {', '.join(error.options or [])}"
        return Violation(key=group, value=choice, rule=f"is not there; {' '.join(lines)} asks for it", remedy=remedy)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return Violation(
            key=mark.name, value=f"line {mark.line + 1}", rule=f"is not YAML: {error.problem}", remedy="mend the file"
        )
    # Hydra's messages read `In 'experiment/mine': ConfigKeyError raised while composing config:`, then the reason and
    # lines such as `full_key: rollout.samplin`.
    message = [line.strip() for line in str(error).splitlines() if line.strip()]
    place = re.match(r"In '(.+?)': (.*)", message[0])
    file, reason = place.groups() if place else ("run", message[0])
    if "raised while composing" in reason and len(message) > 1:
        reason = message[1]
    key = next((line.partition("full_key:")[2].strip() for line in message if line.startswith("full_key:")), "")
    remedy = _did_you_mean(key) if key and schema.annotation_of(key) is None else "mend the file"
    return Violation(key=f"{file}.yaml", value=key or "?", rule=f"cannot be composed: {reason}", remedy=remedy)


def _apply(tree: DictConfig, override: Override, violations: list[Violation]) -> None:
    """Set one value, making optional sections on its way. Broken: a violation is added, nothing is set."""
    key, value = override.key_or_group, override.value()
    annotation = schema.annotation_of(key)
    if annotation is None:
        violations.append(
            Violation(
                key=key,
                value=_given(override),
                rule="is not a key of the configuration",
                remedy=_did_you_mean(key),
            )
        )
    elif override.is_delete():
        violations.append(
            Violation(key=key, value="~", rule="cannot be removed", remedy=f"it holds {schema.describe(annotation)}")
        )
    else:
        try:
            _make_sections(tree, key if isinstance(value, dict) else key.rpartition(".")[0])
            if typing.get_origin(schema.without_none(annotation)) is dict:
                _replace_map(tree, key, value)
            else:
                OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            violations.append(_wrong_value(override, annotation, OmegaConf.select(tree, key), error))


def _replace_map(tree: DictConfig, key: str, value: object) -> None:
    """Set a whole map. What stays as it is when that fails: the map."""
    before = deepcopy(OmegaConf.select(tree, key))
    # Merged into an empty one: an entry that is a section gets its type and its defaults.
    OmegaConf.update(tree, key, {}, merge=False)
    try:
        OmegaConf.update(tree, key, value, merge=isinstance(value, dict))
    except OmegaConfBaseException:
        OmegaConf.update(tree, key, before, merge=False)
        raise


def _make_sections(tree: DictConfig, key: str) -> None:
    """Give optional sections on the path that are null their defaults, so that a key inside can be set."""
    parts = key.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        annotation = schema.annotation_of(path)
        section = schema.section_of(annotation)
        if section is not None and OmegaConf.select(tree, path) is None:
            OmegaConf.update(tree, path, OmegaConf.structured(section), merge=False)


def _did_you_mean(key: str) -> str:
    near = schema.nearest_keys(key)
    return f"did you mean {' or '.join(near)}?" if near else "`megappo config` prints all keys"


def _wrong_value(override: Override, annotation: schema.Annotation, now: object, error: Exception) -> Violation:
    key = override.key_or_group
    if type(override.value()) in (dict, list):
        remedy = str(error).splitlines()[0]
    elif section := schema.section_of(annotation):
        remedy = f"set one of its keys, such as {key}.{next(iter(schema.field_types(section)))}"
    else:
        remedy = f"without this it is {_shown(now)}"
    return Violation(key=key, value=_given(override), rule=f"must be {schema.describe(annotation)}", remedy=remedy)


def _given(override: Override) -> str:
    """Return what was written after the equals sign."""
    return cast(str, override.input_line).partition("=")[2]


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value)


def _unresolved(tree: DictConfig, prefix: str = "") -> list[Violation]:
    """Return a violation for every value that must be given and every reference to a key that is not there."""
    found: list[Violation] = []
    for name in cast(dict[str, Any], tree):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(tree, name):
            found.append(Violation(key=key, value="???", rule="must be given", remedy=f"add {key}=..."))
            continue
        try:
            value: object = tree[name]
        except OmegaConfBaseException as error:
            text = OmegaConf.to_container(tree, resolve=False)
            given = cast(dict[str, Any], text)[str(name)]
            message = str(error).splitlines()[0]
            found.append(Violation(key=key, value=given, rule="refers to what is not there", remedy=message))
            continue
        if isinstance(value, DictConfig) and not OmegaConf.is_interpolation(tree, name):
            found.extend(_unresolved(value, f"{key}."))
    return found
