"""`megappo evaluate`: answers of a model to the validation sets, judged; no trainer is started.

The engines load the Hugging Face folder of the model. A checkpoint of a run is not one: it is refused with the command
that makes one of it.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megappo.checkpoint.names import step_of
from megappo.cli.evaluation_pairs import PROMPTS, Difference, compare, read_prompts, require_shared, write_prompts
from megappo.cli.evaluation_report import (
    difference_facts,
    facts_of,
    line_of,
    print_differences,
    print_tables,
    write_generations,
)
from megappo.cli.evaluation_settings import (
    SettingDifference,
    incomparable,
    read_settings,
    require_same_rewards,
    setting_differences,
    settings_of,
)
from megappo.cli.rewards import rewards_can_be_made
from megappo.cli.run_data import make_validation
from megappo.cli.run_record import make_trackers
from megappo.cli.settled import settled_for_workers
from megappo.cli.signals import StopSignals
from megappo.cluster.session import Session
from megappo.config.rules import check_evaluation, check_evaluation_device, check_evaluation_files
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config, override_of, resolved_yaml
from megappo.config.trainer import RunSection
from megappo.config.validation_rules import is_evaluated
from megappo.controller.evaluate import Evaluation, check_majority, evaluate
from megappo.controller.stopping import StopRequest
from megappo.data.types import Prompt
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import ConfigError, Violation
from megappo.models.description import MODEL_FILE
from megappo.observability.background_tracker import close_all
from megappo.observability.console import RunConsole
from megappo.observability.logging import log_to_file
from megappo.observability.metrics import values
from megappo.observability.run_directory import RunDirectory, open_run_directory, write_atomically
from megappo.observability.run_files import EVALUATION, GENERATIONS
from megappo.observability.tracker import WALL_TIME, RunTracker


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluateArguments:
    """What the command line asks for."""

    arguments: Sequence[str]
    """Overrides of the configuration, and at most one model: a folder, or what has no equals sign behind a key."""
    output: Path | None
    """Folder of what is written; None: `<run.dir>/<run.name>-evaluation`."""
    against: Path | None
    """Folder of an earlier evaluation to compare with."""
    as_json: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class _Other:
    """An earlier evaluation to compare with."""

    folder: Path
    prompts: list[dict[str, Any]]  # Any: JSON
    settings: list[SettingDifference]
    """What it was made with otherwise."""


def run_evaluate(asked: EvaluateArguments) -> int:
    """Evaluate and print; returns the exit code.

    Raises:
        ConfigError: the overrides or the model are wrong, or another evaluation had other rewards.
        MegappoError: it failed.
    """
    config = _load(asked.arguments)
    stored = resolved_yaml(config)
    other = None if asked.against is None else _read_other(asked.against, stored)
    # The end of this process alone would leave those of Ray and of the engines.
    StopSignals(StopRequest(), grace_s=0.0)
    backend = resolve_backend(config.cluster.device)
    config = _settle(config, backend)
    with RunConsole(file=sys.stderr if asked.as_json else None) as console:
        console.phase("reading prompts")
        sets = make_validation(config, console)
        if other is not None:
            require_shared(sets, other.prompts)
        directory = open_run_directory(_section(config, asked.output))
        if directory.moved_aside is not None:
            console.note(f"the earlier evaluation of this name is now in {directory.moved_aside}")
        if other is not None:
            other = replace(other, folder=_now_at(other.folder, directory))
            _tell_settings(other, console)
        write_atomically(directory.config, stored)
        log_to_file(directory.logs / "controller.log")
        evaluation = _evaluate(config, sets, backend, directory, console)
        facts = {"model": config.model.path, "samples_per_prompt": config.validation.samples_per_prompt}
        facts |= {"sets": facts_of(evaluation.reports)}
        write_prompts(directory.path / PROMPTS, evaluation, samples_per_prompt=config.validation.samples_per_prompt)
        differences = [] if other is None else _compare(directory, other, config)
        if other is not None:
            facts["differences"] = {
                "against": str(other.folder),
                "settings": {one.key: {"here": one.here, "there": one.there} for one in other.settings},
                "sets": difference_facts(differences),
            }
        _write(evaluation, facts, config, directory)
        _tell_trackers(evaluation, make_trackers(config, directory, console))
        for report in evaluation.reports:
            console.note(line_of(report, config.validation))
        if not asked.as_json:
            print_tables(console, evaluation.reports, config.validation)
            if other is not None:
                title = f"Minus {other.folder}" + (", made with other settings" if other.settings else "")
                print_differences(console, differences, config.validation, title=title)
            _say_where(console, directory)
    if asked.as_json:
        print(json.dumps(facts, indent=1))
    return 0


def _read_other(folder: Path, stored: str) -> _Other:
    """Read an earlier evaluation.

    Raises:
        DataError: the folder holds none.
        ConfigError: its answers were scored by other rewards.
    """
    prompts, there, here = read_prompts(folder), read_settings(folder), settings_of(stored)
    require_same_rewards(here, there, folder=folder)
    return _Other(folder=folder, prompts=prompts, settings=setting_differences(here, there))


def _now_at(folder: Path, directory: RunDirectory) -> Path:
    """Return where a folder is, which may be the earlier evaluation that made room for this one."""
    place, here = folder.resolve(), directory.path.resolve()
    if directory.moved_aside is None or not place.is_relative_to(here):
        return folder
    return directory.moved_aside / place.relative_to(here)


def _tell_settings(other: _Other, console: RunConsole) -> None:
    if other.settings:
        console.note(f"{other.folder} was made with other settings: {', '.join(map(str, other.settings))}")


def _compare(directory: RunDirectory, other: _Other, config: RunConfig) -> list[Difference]:
    left_out = incomparable(other.settings)
    return compare(read_prompts(directory.path), other.prompts, config, left_out=left_out)


def _load(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration, with the model that is named before or among the overrides."""
    models = [argument for argument in arguments if _is_model(argument)]
    overrides = [argument for argument in arguments if argument not in models]
    if len(models) > 1:
        remedy = "name one; overrides have an equals sign"
        raise ConfigError([Violation(key="model", value=", ".join(models), rule="are several", remedy=remedy)])
    if models:
        _refuse_checkpoint(Path(models[0]))
        overrides.append(override_of("model.path", models[0]))
    return load_run_config(overrides, rules=(check_evaluation, check_evaluation_files, _rewards_can_be_made))


def _is_model(argument: str) -> bool:
    """Whether an argument is no override. Names of folders may hold equals signs: `runs/lr=1e-4/model`."""
    key, equals, _ = argument.partition("=")
    return Path(argument).is_dir() or "/" in key or not (equals or argument.startswith("~"))


def _rewards_can_be_made(config: RunConfig) -> list[Violation]:
    return [violation for violation in rewards_can_be_made(config) if is_evaluated(violation.key)]


def _refuse_checkpoint(path: Path) -> None:
    """Raise ConfigError for what training saved: a step, a model in it, or a run."""
    folder = path.parent if (path / MODEL_FILE).exists() and not (path / "config.json").exists() else path
    step = step_of(folder.name)
    if step is not None and folder.parent.name == "checkpoints":
        export = f"megappo export --run {folder.parent.parent} --step {step}"
        model = folder.parent.parent / "hf" / folder.name
    elif (path / "checkpoints").is_dir():
        export, model = f"megappo export --run {path}", path / "hf" / "step_..."
    else:
        return
    rule = "is no Hugging Face folder, which engines load"
    remedy = f"make one with `{export}` and evaluate {model}"
    raise ConfigError([Violation(key="model", value=path, rule=rule, remedy=remedy)])


def _settle(config: RunConfig, backend: Backend) -> RunConfig:
    """Return the configuration as its workers get it.

    Raises:
        ConfigError: the device breaks a rule that `auto` left open.
    """
    settled = settled_for_workers(config, backend)
    if violations := check_evaluation_device(settled):
        raise ConfigError(violations)
    return settled


def _section(config: RunConfig, output: Path | None) -> RunSection:
    if output is None:
        return RunSection(name=f"{config.run.name}-evaluation", dir=config.run.dir)
    absolute = output.resolve()
    return RunSection(name=absolute.name, dir=str(absolute.parent))


def _evaluate(
    config: RunConfig, sets: dict[str, list[Prompt]], backend: Backend, directory: RunDirectory, console: RunConsole
) -> Evaluation:
    with Session(config, backend=backend, log_dir=directory.logs, report=console.phase, note=console.note) as session:
        session.start_evaluation()
        check_majority(config, sets, rollout=session.rollout, reward=session.reward)
        answers = config.validation.samples_per_prompt * sum(map(len, sets.values()))
        console.phase(f"sampling and scoring {answers} answers")
        evaluation = evaluate(
            config,
            sets,
            rollout=session.rollout,
            reward=session.reward,
            on_answered=lambda done, expected: console.counted("answers", done, expected),
        )
        console.phase("stopping the engines")
    return evaluation


def _write(evaluation: Evaluation, facts: dict[str, object], config: RunConfig, directory: RunDirectory) -> None:
    write_atomically(directory.path / EVALUATION, json.dumps(facts, indent=1) + "\n")
    if config.validation.save_generations:
        write_generations(directory.path / GENERATIONS, evaluation.answered)


def _tell_trackers(evaluation: Evaluation, trackers: Sequence[RunTracker]) -> None:
    """Give the trackers the numbers; the rest they read in the folder."""
    numbers = {**values(evaluation.metrics), WALL_TIME: time.time()}
    for tracker in trackers:
        tracker.log(0, numbers)
    close_all(trackers, "finished")


def _say_where(console: RunConsole, directory: RunDirectory) -> None:
    files = {"numbers": directory.path / EVALUATION, "answers": directory.path / GENERATIONS, "logs": directory.logs}
    console.lines("Look at", [f"{name:<9}{path}" for name, path in files.items() if path.exists()])
