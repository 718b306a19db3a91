"""`megappo train`: builds every object of a run from its configuration, runs the loop, tells what became of it."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megappo.algo.advantages import needs_values
from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import workload_of_model
from megappo.cli.run_data import RunData, make_data
from megappo.cli.run_observer import RunObserver
from megappo.cluster.groups import ActorGroup, CriticGroup
from megappo.cluster.session import Session
from megappo.config.cluster import DeviceKind
from megappo.config.layout_rules import roles
from megappo.config.rules import check_device, start_up_notes
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.controller.evaluate import evaluate
from megappo.controller.loop import PPOController
from megappo.controller.parity import ParitySink
from megappo.controller.step import Components
from megappo.controller.throughput import ModelThroughput, StepThroughput, make_throughput
from megappo.data.tokenizer import decode_response
from megappo.data.types import Prompt
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import ConfigError, MegappoError
from megappo.models.architecture import read_config
from megappo.observability.console import AnswerRow, RunConsole
from megappo.observability.logging import log_to_file
from megappo.observability.mlflow_tracker import MlflowTracker, open_command, store_uri
from megappo.observability.run_directory import RunDirectory, open_run_directory, write_atomically
from megappo.observability.tracker import BackgroundTracker, JsonlTracker, Tracker
from megappo.rewards.types import Sample

_SHOWN_ANSWERS = 5


def train(config: RunConfig) -> int:
    """Run the configured training; returns the exit code (0 done, 1 failed, 2 refused, 130 interrupted)."""
    stored = resolved_yaml(config)
    backend = resolve_backend(config.cluster.device)
    config = settle(config, backend)
    signal.signal(signal.SIGTERM, _interrupt)
    with RunConsole() as console:
        for note in start_up_notes(config):
            console.note(note)
        console.phase("reading prompts")
        data = make_data(config, console)
        directory = open_run_directory(config.run, resume=config.trainer.resume)
        if directory.moved_aside is not None:
            console.note(f"the earlier run of this name is now in {directory.moved_aside}")
        write_atomically(directory.config, stored)
        log_to_file(directory.logs / "controller.log")
        observer = RunObserver(config, directory, console=console, trackers=make_trackers(config, directory, console))
        exit_reason, code = "failed", 1
        try:
            _run(config, backend, directory, console, observer, data)
            exit_reason, code = "completed", 0
        except KeyboardInterrupt:
            exit_reason, code = "interrupted", 130
            console.note(f"interrupted after step {observer.last_step}; {observer.saved}")
        except MegappoError as error:
            exit_reason, code = f"failed: {type(error).__name__}", error.exit_code
            console.note(f"{error}\nended after step {observer.last_step}; {observer.saved}")
        finally:
            report(config, directory, console, observer.finish(exit_reason))
    return code


def settle(config: RunConfig, backend: Backend) -> RunConfig:
    """Return the configuration with the device that `auto` stands for and with absolute paths: workers of a running
    cluster have another working directory.

    Raises:
        ConfigError: the device breaks a rule that `auto` left open.
    """
    settled = replace(
        config,
        cluster=replace(config.cluster, device=DeviceKind(backend.kind)),
        model=replace(config.model, path=str(Path(config.model.path).resolve())),
        critic=replace(config.critic, path=_absolute(config.critic.path)),
        reward=replace(config.reward, model_path=_absolute(config.reward.model_path)),
    )
    if violations := check_device(settled):
        raise ConfigError(violations)
    return settled


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _run(  # the composition root names every part
    config: RunConfig,
    backend: Backend,
    directory: RunDirectory,
    console: RunConsole,
    observer: RunObserver,
    data: RunData,
) -> None:
    """Start the processes, run the loop and stop them."""
    with Session(config, backend=backend, log_dir=directory.logs, report=console.phase, note=console.note) as session:
        session.start_training()
        model = read_config(Path(config.model.path))
        parts = Components(
            config=config,
            sampler=data.sampler,
            rollout=session.rollout,
            reward=session.reward,
            actor=session.actor,
            critic=session.critic,
            weight_sync=session.weight_sync,
            kl_coefficient=KLCoefficient(config.algorithm.kl.in_reward),
            workload=workload_of_model(model),
            throughput=_throughput(config, session, model),
            parity=ParitySink(
                folder=directory.parity,
                warn=console.note,
                decode=partial(decode_response, data.tokenizer),
            ),
        )
        controller = PPOController(
            parts, validation=data.validation, checkpoint_dir=directory.checkpoints.resolve(), observer=observer
        )
        shown = data.validation[:_SHOWN_ANSWERS]
        controller.prepare()
        before = answers(parts, shown)
        controller.fit()
        console.answers(compare_answers(before, answers(parts, shown)))
        console.phase("stopping engines and workers")


def _throughput(config: RunConfig, session: Session, policy: Mapping[str, Any]) -> StepThroughput:
    """Ask the training workers for their devices. `policy`: config.json of the actor's model (Any: what JSON holds)."""
    pools = config.cluster.pools

    def of(role: str, group: ActorGroup | CriticGroup, model: Mapping[str, Any]) -> ModelThroughput:
        return make_throughput(
            config,
            role=role,
            model=model,
            num_devices=group.layout.world_size,
            device_name=group.device_name(),
        )

    critic, path = session.critic, config.critic.path
    return StepThroughput(
        actor=of("actor", session.actor, policy),
        critic=None if critic is None else of("critic", critic, read_config(Path(path)) if path else policy),
        num_devices=sum(pools[pool] for pool in {getattr(config.cluster, role) for role in roles(config)}),
    )


def make_trackers(config: RunConfig, directory: RunDirectory, console: RunConsole) -> list[Tracker]:
    """Return metrics.jsonl and, if configured, MLflow in a thread of its own."""
    trackers: list[Tracker] = [JsonlTracker(directory.metrics)]
    if config.tracking.mlflow:
        uri = store_uri(config.tracking.mlflow_uri, directory.database)
        trackers.append(
            BackgroundTracker(
                lambda: MlflowTracker(
                    uri=uri,
                    experiment=config.tracking.experiment,
                    run_name=config.run.name,
                    artifacts=directory.path / "mlflow",
                ),
                name="MLflow",
                warn=console.note,
            )
        )
    return trackers


def answers(parts: Components, prompts: Sequence[Prompt]) -> list[tuple[Sample, float]]:
    """Answer a few validation prompts greedily; returns the texts with their scores."""
    if not prompts:
        return []
    _, rollouts = evaluate(parts, prompts)
    return [
        (rollouts.samples[info.sequence_id], reward.score)
        for info, reward in zip(rollouts.sequences, rollouts.rewards)
        if info.sequence_id in rollouts.samples
    ]


def compare_answers(before: Sequence[tuple[Sample, float]], after: Sequence[tuple[Sample, float]]) -> list[AnswerRow]:
    """Put answers to the same prompts side by side."""
    return [
        AnswerRow(
            prompt=old.prompt, before=old.response, before_score=old_score, after=new.response, after_score=new_score
        )
        for (old, old_score), (new, new_score) in zip(before, after, strict=True)
    ]


def report(config: RunConfig, directory: RunDirectory, console: RunConsole, summary: Mapping[str, object]) -> None:
    """Print the summary, where things are, and what to do next."""
    console.table(f"Run {config.run.name}", [(name, _shown(value)) for name, value in summary.items()])
    files = {"metrics": directory.metrics, "reward curve": directory.curve, "logs": directory.logs}
    places = [f"{name:<13}{path}" for name, path in files.items() if path.exists()]
    if config.tracking.mlflow:
        uri = store_uri(config.tracking.mlflow_uri, directory.database)
        places.append(f"{'in MLflow':<13}{open_command(uri)}")
    console.lines("Look at", places)
    console.lines("Next", next_steps(config, directory, completed=summary["exit"] == "completed"))


def next_steps(config: RunConfig, directory: RunDirectory, *, completed: bool) -> list[str]:
    """Return what to do now, by how the run ended."""
    if not completed:
        steps = [f"look into {directory.logs}/ (a file per process)"]
        if (directory.checkpoints / "latest").exists():
            steps.append("the same command with trainer.resume=auto goes on from the last checkpoint")
        return steps
    steps = [f"megappo train ... run.name={config.run.name} seed=1      # another seed; this run is kept aside"]
    if config.trainer.save_freq < 0:
        steps.append("megappo train ... trainer.save_freq=50             # keep checkpoints")
    if needs_values(config.algorithm):
        return steps
    return [*steps, "megappo train experiment=quickstart_ppo            # the quickstart task with a critic (GAE)"]


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
