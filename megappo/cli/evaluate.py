"""`megappo evaluate`: answers of a model to the validation sets, judged; no trainer is started.

The engines load the Hugging Face folder of the model. A checkpoint of a run is not one: it is refused with the command
that makes one of it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.checkpoint.names import step_of
from megappo.cli.evaluation_pairs import PROMPTS, compare, read_prompts, require_shared, write_prompts
from megappo.cli.evaluation_report import (
    difference_facts,
    facts_of,
    line_of,
    print_differences,
    print_tables,
    table_rows,
    write_generations,
)
from megappo.cli.rewards import rewards_can_be_made
from megappo.cli.run_data import make_validation
from megappo.cli.run_record import make_trackers
from megappo.cli.settled import settled_for_workers
from megappo.cli.signals import StopSignals
from megappo.cluster.session import Session
from megappo.config.rules import check_evaluation, check_evaluation_device, check_evaluation_files
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config, resolved_yaml
from megappo.config.trainer import RunSection
from megappo.config.validation_rules import is_evaluated
from megappo.controller.evaluate import Evaluation, check_majority, evaluate
from megappo.controller.stopping import StopRequest
from megappo.data.types import Prompt
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import ConfigError, Violation
from megappo.models.description import MODEL_FILE
from megappo.observability.console import RunConsole
from megappo.observability.logging import log_to_file
from megappo.observability.metrics import values
from megappo.observability.run_directory import RunDirectory, open_run_directory, write_atomically
from megappo.observability.tracker import Tracker

EVALUATION = "evaluation.json"
GENERATIONS = "generations.jsonl"


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluateArguments:
    """What the command line asks for."""

    arguments: Sequence[str]
    """Overrides of the configuration, and at most one model: what has no equals sign."""
    output: Path | None
    """Folder of what is written; None: `<run.dir>/<run.name>-evaluation`."""
    against: Path | None
    """Folder of an earlier evaluation to compare with."""
    as_json: bool


def run_evaluate(asked: EvaluateArguments) -> int:
    """Evaluate and print; returns the exit code.

    Raises:
        ConfigError: the overrides or the model are wrong.
        MegappoError: it failed.
    """
    config = _load(asked.arguments)
    other = None if asked.against is None else read_prompts(asked.against)
    stored = resolved_yaml(config)
    # The end of this process alone would leave those of Ray and of the engines.
    StopSignals(StopRequest(), grace_s=0.0)
    backend = resolve_backend(config.cluster.device)
    config = _settle(config, backend)
    with RunConsole(file=sys.stderr if asked.as_json else None) as console:
        console.phase("reading prompts")
        sets = make_validation(config, console)
        if other is not None:
            require_shared(sets, other)
        directory = open_run_directory(_section(config, asked.output))
        write_atomically(directory.config, stored)
        log_to_file(directory.logs / "controller.log")
        evaluation = _evaluate(config, sets, backend, directory, console)
        facts = {"model": config.model.path, "samples_per_prompt": config.validation.samples_per_prompt}
        facts |= {"sets": facts_of(evaluation.reports)}
        write_prompts(directory.path / PROMPTS, evaluation, samples_per_prompt=config.validation.samples_per_prompt)
        differences = [] if other is None else compare(read_prompts(directory.path), other, config)
        if other is not None:
            facts["differences"] = {"against": str(asked.against), "sets": difference_facts(differences)}
        _write(evaluation, facts, config, directory)
        _tell_trackers(evaluation, make_trackers(config, directory, console), directory, config)
        for report in evaluation.reports:
            console.note(line_of(report, config.validation))
        if not asked.as_json:
            print_tables(console, evaluation.reports, config.validation)
            print_differences(console, differences, config.validation, title=f"Minus {asked.against}")
            _say_where(console, directory)
    if asked.as_json:
        print(json.dumps(facts, indent=1))
    return 0


def _load(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration, with the model that is named before or among the overrides."""
    models = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    overrides = [argument for argument in arguments if argument not in models]
    if len(models) > 1:
        remedy = "name one; overrides have an equals sign"
        raise ConfigError([Violation(key="model", value=", ".join(models), rule="are several", remedy=remedy)])
    if models:
        _refuse_checkpoint(Path(models[0]))
        overrides.append(f"model.path='{models[0]}'")
    return load_run_config(overrides, rules=(check_evaluation, check_evaluation_files, _rewards_can_be_made))


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


def _tell_trackers(
    evaluation: Evaluation, trackers: Sequence[Tracker], directory: RunDirectory, config: RunConfig
) -> None:
    for tracker in trackers:
        tracker.log(0, values(evaluation.metrics))
        if config.validation.save_generations:
            tracker.table("generations", table_rows(evaluation))
        for path in (directory.config, directory.path / EVALUATION):
            tracker.artifact(path)
        tracker.close("finished")


def _say_where(console: RunConsole, directory: RunDirectory) -> None:
    files = {"numbers": directory.path / EVALUATION, "answers": directory.path / GENERATIONS, "logs": directory.logs}
    console.lines("Look at", [f"{name:<9}{path}" for name, path in files.items() if path.exists()])
