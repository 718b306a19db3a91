"""`megappo check`: what a run would do and need on a cluster that need not be here. No GPU, no Ray, no process."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from megappo.cli.check_plan import plan_run
from megappo.cli.check_report import report_of
from megappo.cli.check_tables import print_report
from megappo.cli.rewards import rewards_can_be_made
from megappo.cli.starting_model import write_starting_config
from megappo.config.cluster import DeviceKind
from megappo.config.data_rules import data_files_exist
from megappo.config.file_rules import checkpoint_to_resume_exists, is_made_by_sft, reward_model_folder_exists
from megappo.config.layout_rules import needs_critic, pool_of_each_role_exists, roles
from megappo.config.model_shape import read_model_config
from megappo.config.precision_rules import NOT_INSTALLED
from megappo.config.reward_rules import asks_reward_model
from megappo.config.rm_rules import reward_model_folder_fits
from megappo.config.rules import check_config, check_device, start_up_notes
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.errors import ConfigError, Violation
from megappo.planning.cluster import KEYS, ClusterDescription, description_violations
from megappo.planning.model_presets import MODEL_PRESETS
from megappo.planning.placement import pools_fit_cluster

DEVICES_PER_NODE = 8
"""Of GPUs, where nobody says."""

Given = dict[str, Any]  # Any: what a user wrote


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckArguments:
    """What the command line says."""

    overrides: Sequence[str]
    cluster: Path | None = None
    """YAML file that describes the cluster."""
    nodes: int | None = None
    devices_per_node: int | None = None
    device: str | None = None
    device_memory: float | None = None
    """GiB."""
    model_config: str | None = None
    """Preset, config.json or folder that stands for a model that is not here."""
    as_json: bool = False


def check(arguments: CheckArguments) -> int:
    """Print the report; returns the exit code: 0 it can run, 1 it cannot (memory, or engines over several nodes).

    Raises:
        ConfigError: the configuration or the arguments break rules; all of them.
        CheckpointError, CapabilityError: a config.json cannot be used.
    """
    with TemporaryDirectory(prefix="megappo-check-") as folder:
        checked = _Checked(arguments, Path(folder))
        config = checked.load()
        plan = plan_run(config, checked.complete(config))
        plan.notes += [*checked.notes, *start_up_notes(config)]
    report = report_of(plan, missing=checked.missing)
    if arguments.as_json:
        json.dump(report, sys.stdout)
        print()
    else:
        print_report(plan, report)
    return 0 if report["verdict"]["runs"] else 1


class _Checked:
    """A configuration with the cluster and the model that it is checked for."""

    def __init__(self, arguments: CheckArguments, folder: Path) -> None:
        """Args: folder: empty; for the config.json of models that are not here."""
        self._arguments = arguments
        self._folder = folder
        self._faults: list[Violation] = []
        self._given = self._read_cluster()
        self._settled: RunConfig | None = None
        self.notes: list[str] = []
        self.missing: list[str] = []
        """Files that are not on this machine, in words."""

    def load(self) -> RunConfig:
        """Return the configuration, settled for the cluster. Raises ConfigError with every fault of all parts."""
        try:
            load_run_config(self._arguments.overrides, rules=(self._rules, rewards_can_be_made))
        except ConfigError as error:
            raise ConfigError([*self._faults, *error.violations]) from None
        if self._faults:
            raise ConfigError(self._faults)
        assert self._settled is not None
        return self._settled

    def complete(self, config: RunConfig) -> ClusterDescription:
        """Return the cluster; what nobody said follows from the configuration."""
        pools = {getattr(config.cluster, role) for role in roles(config)}
        devices = max(sum(config.cluster.pools.get(pool, 0) for pool in pools), 1)
        given = dict(self._given)
        given.setdefault("device", "cuda" if config.cluster.device is DeviceKind.cuda else "cpu")
        per_node = devices if given["device"] == "cpu" else min(devices, DEVICES_PER_NODE)
        given.setdefault("devices_per_node", -(-devices // given["nodes"]) if "nodes" in given else per_node)
        given.setdefault("nodes", -(-devices // given["devices_per_node"]))
        return ClusterDescription(**given)

    def _read_cluster(self) -> Given:
        """Return what is said of the cluster; faults are kept."""
        arguments = self._arguments
        options = (arguments.nodes, arguments.devices_per_node, arguments.device, arguments.device_memory)
        given = {key: value for key, value in zip(KEYS, options) if value is not None}
        source = "--"
        if arguments.cluster is not None:
            if given:
                names = ", ".join(f"--{key.replace('_gib', '').replace('_', '-')}" for key in given)
                rule, remedy = f"describes the cluster, and so does {names}", "give one of the two"
                self._faults.append(Violation(key="--cluster", value=arguments.cluster, rule=rule, remedy=remedy))
                return {}
            given, source = self._read_file(arguments.cluster), str(arguments.cluster)
        defaults = {"nodes": 1, "devices_per_node": 1, "device": "cpu"}
        faults = description_violations(defaults | given, source=source)
        self._faults += faults
        return {} if faults else given

    def _read_file(self, path: Path) -> Given:
        try:
            content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            content, rule = None, f"cannot be read: {_reason(error)}"
        else:
            rule = f"must hold keys with values, such as nodes: 4, holds {type(content).__name__}"
        if isinstance(content, Mapping):
            return dict(content)
        remedy = f"give a YAML file with {', '.join(KEYS)}"
        self._faults.append(Violation(key="--cluster", value=path, rule=rule, remedy=remedy))
        return {}

    def _rules(self, config: RunConfig) -> list[Violation]:
        """Return what the configuration, the cluster and the model forbid; keeps the settled configuration."""
        kind, violations = self._kind(config)
        config = replace(config, cluster=replace(config.cluster, device=kind))
        violations += check_config(config)
        without_model = self._with_models(config)
        violations += without_model
        if not without_model:
            assert self._settled is not None
            violations += [self._named(config, violation) for violation in check_device(self._settled)]
        if not self._faults and not pool_of_each_role_exists(config):
            violations += pools_fit_cluster(config, self.complete(config))
        for missing in (
            data_files_exist(config),
            reward_model_folder_exists(config),
            checkpoint_to_resume_exists(config),
        ):
            self.missing += [f"{violation.key}={violation.value} {violation.rule}" for violation in missing]
        path = config.reward_model.path
        if path is not None and (Path(path) / "config.json").is_file():
            violations += reward_model_folder_fits(config)
        elif asks_reward_model(config):
            self.missing.append(f"reward_model.path={path} is not a folder with a config.json")
        return [violation for violation in violations if not self._is_of_this_machine(violation, kind)]

    def _kind(self, config: RunConfig) -> tuple[DeviceKind, list[Violation]]:
        """Return the kind of device that is checked for."""
        named, configured = self._given.get("device"), config.cluster.device
        if named is None:
            if configured is DeviceKind.auto:
                self.notes.append("cluster.device=auto is checked as cpu (--device names another device)")
                return DeviceKind.cpu, []
            return configured, []
        kind = DeviceKind.cpu if named == "cpu" else DeviceKind.cuda
        if configured in (DeviceKind.auto, kind):
            return kind, []
        rule = f"contradicts --device {named}" if self._arguments.cluster is None else f"contradicts device: {named}"
        remedy = f"use cluster.device={kind.value}, or another device"
        return configured, [Violation(key="cluster.device", value=configured.value, rule=rule, remedy=remedy)]

    def _with_models(self, config: RunConfig) -> list[Violation]:
        """Put the folders of config.json in the place of models that are not here."""
        wanted = self._arguments.model_config
        place = self._folder / "policy"
        place.mkdir(exist_ok=True)
        path = Path(config.model.path)
        if config.model.path and not (path / "config.json").is_file():
            self.missing.append(f"model.path={config.model.path} is not a folder with a config.json")
        if wanted is not None:
            content, violations = _read_model(wanted)
            if content is None:
                return violations
            (place / "config.json").write_text(json.dumps(content), encoding="utf-8")
        elif config.model.path and (path / "config.json").is_file():
            place = path
        elif config.sft.random_model is not None and is_made_by_sft(config):
            write_starting_config(config.sft.random_model, config.data, place)
        else:
            rule, known = "is not a folder with a config.json", ", ".join(MODEL_PRESETS)
            remedy = f"give --model-config FILE, FOLDER or one of {known}"
            return [Violation(key="model.path", value=config.model.path or "''", rule=rule, remedy=remedy)]
        critic = config.critic.path
        stands_in = critic is not None and wanted is not None and needs_critic(config)
        if stands_in and not (Path(critic or "") / "config.json").is_file():
            self.notes.append(f"critic.path={critic} is not here: taken to be as large as the policy")
            critic = None
        self._settled = replace(
            config, model=replace(config.model, path=str(place)), critic=replace(config.critic, path=critic)
        )
        return []

    def _named(self, config: RunConfig, violation: Violation) -> Violation:
        """Return a violation under the name that the user gave the model."""
        if violation.key != "model.path" or not str(violation.value).startswith(str(self._folder)):
            return violation
        return replace(violation, value=self._arguments.model_config or config.model.path)

    def _is_of_this_machine(self, violation: Violation, kind: DeviceKind) -> bool:
        """Whether a rule is broken here and need not be there; it is then noted."""
        if kind is not DeviceKind.cuda or not violation.rule.endswith(NOT_INSTALLED):
            return False
        self.missing.append(f"{violation.key}={violation.value} needs Transformer Engine, which {NOT_INSTALLED} here")
        return True


def _reason(error: Exception) -> str:
    """Return in one line why a file cannot be read, and where in it."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    return f"{str(error).splitlines()[0]}{place}"


def _read_model(wanted: str) -> tuple[Given | None, list[Violation]]:
    """Return the content of a preset, a config.json or a folder that holds one."""
    if wanted in MODEL_PRESETS:
        return MODEL_PRESETS[wanted], []
    path = Path(wanted)
    try:
        if path.is_dir():
            return dict(read_model_config(path)), []
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content, []
        reason = f"it holds {type(content).__name__}, not an object"
    except (OSError, ValueError) as error:
        reason = str(error)
    rule = f"is no preset, config.json or folder with one: {reason}"
    return None, [
        Violation(key="--model-config", value=wanted, rule=rule, remedy=f"use one of {', '.join(MODEL_PRESETS)}")
    ]
