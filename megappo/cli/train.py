"""`megappo train`: builds every object of a run from its configuration, runs the loop, tells what became of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megappo.algo.advantages import needs_values
from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import workload_of_model
from megappo.checkpoint.health import Found
from megappo.cli.memory_check import check_memory
from megappo.cli.resume import earlier_checkpoint, is_finished, open_run
from megappo.cli.run_data import RunData, make_data
from megappo.cli.run_observer import RunObserver
from megappo.cli.run_record import end_early, make_trackers, run_to_end, say_where
from megappo.cli.settled import settled_for_workers
from megappo.cli.signals import StopSignals
from megappo.cluster.groups import ActorGroup, CriticGroup
from megappo.cluster.observation import ClusterObservation
from megappo.cluster.session import Session
from megappo.config.checkpoint_rules import makes_checkpoints
from megappo.config.layout_rules import roles
from megappo.config.rules import check_device, start_up_notes
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.controller.evaluate import check_majority, evaluate
from megappo.controller.loop import PPOController, count_steps, make_time_limit
from megappo.controller.record import RecordSink
from megappo.controller.step import Components
from megappo.controller.stopping import StopRequest, TimeLimit
from megappo.controller.throughput import ModelThroughput, StepThroughput, make_throughput
from megappo.data.tokenizer import decode_response
from megappo.data.types import Prompt
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import ConfigError
from megappo.models.architecture import read_config
from megappo.observability.console import AnswerRow, RunConsole
from megappo.observability.logging import log_to_file
from megappo.observability.run_directory import RunDirectory, write_atomically
from megappo.observability.versions import package_versions
from megappo.rewards.types import Sample

_SHOWN_ANSWERS = 5


@dataclass(kw_only=True, slots=True, frozen=True)
class _Plan:
    """What a run is made of before its processes start."""

    config: RunConfig
    """Settled."""
    stored: str
    """The configuration as it was given, in YAML."""
    backend: Backend
    directory: RunDirectory
    data: RunData
    found: Found | None
    """The checkpoint that it goes on from."""
    stop: StopRequest
    time_limit: TimeLimit

    @property
    def is_finished(self) -> bool:
        """Whether an earlier process did all of it."""
        total_steps = count_steps(self.config, self.data.sampler)
        return self.found is not None and is_finished(self.found, self.directory, total_steps=total_steps)


def train(config: RunConfig) -> int:
    """Run the configured training; returns the exit code (0 done, 1 failed, 2 refused, 85 ended in time to go on later,
    130 interrupted)."""
    stop, time_limit, stored = StopRequest(), make_time_limit(config), resolved_yaml(config)
    signals = StopSignals(stop, grace_s=config.checkpoint.on_signal_s if makes_checkpoints(config) else 0.0)
    backend = resolve_backend(config.cluster.device)
    config = settle(config, backend)
    with RunConsole() as console:
        for note in start_up_notes(config):
            console.note(note)
        check_memory(config, backend, console.note)
        console.phase("reading prompts")
        data = make_data(config, console)
        directory, found = open_run(config, stored, console.note)
        write_atomically(directory.config, stored)
        log_to_file(directory.logs / "controller.log")
        observer = RunObserver(config, directory, console=console, trackers=make_trackers(config, directory, console))
        if found is not None:
            observer.expect(found.manifest.step, found.folder)
        run = _Plan(
            config=config,
            stored=stored,
            backend=backend,
            directory=directory,
            data=data,
            found=found,
            stop=stop,
            time_limit=time_limit,
        )
        _, code = run_to_end(
            partial(_run, run, console, observer, signals),
            observer=observer,
            console=console,
            signals=signals,
            report=partial(report, config, directory, console),
        )
    return code


def settle(config: RunConfig, backend: Backend) -> RunConfig:
    """Return the configuration as its workers get it.

    Raises:
        ConfigError: the device breaks a rule that `auto` left open.
    """
    settled = settled_for_workers(config, backend)
    if violations := check_device(settled):
        raise ConfigError(violations)
    return settled


def _run(run: _Plan, console: RunConsole, observer: RunObserver, signals: StopSignals) -> tuple[str, int]:
    """Do what is left of a run; returns how it ended and its exit code."""
    if run.is_finished:
        assert run.found is not None
        observer.on_start(run.found.manifest.step, run.found.folder)
        done = f"all steps are done already, the last of them is in {run.found.folder}"
        console.note(f"{done} (a larger trainer.total_steps goes on from there)")
        return "completed", 0
    if _train(run, console, observer, signals):
        return "completed", 0
    return end_early(run.stop, observer, console)


def _train(run: _Plan, console: RunConsole, observer: RunObserver, signals: StopSignals) -> bool:
    """Start the processes, run the loop and stop them. Returns whether the loop came to its last step."""
    config, directory, data = run.config, run.directory, run.data
    with Session(
        config, backend=run.backend, log_dir=directory.logs, report=console.phase, note=console.note
    ) as session:
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
            records=RecordSink(
                folder=directory.records,
                checkpoints=directory.checkpoints.resolve(),
                config=run.stored,
                decode=partial(decode_response, data.tokenizer),
                warn=console.note,
            ),
            observation=ClusterObservation(config, directory, session.observed, console.note),
        )
        controller = PPOController(
            parts,
            validation=data.validation,
            directory=directory,
            observer=observer,
            resume_from=None if run.found is None else run.found.folder.resolve(),
            side_files={"config.yaml": run.stored, "versions.json": json.dumps(package_versions(), indent=1)},
            stop=run.stop,
            time_limit=run.time_limit,
        )
        shown = [prompt for prompts in data.validation.values() for prompt in prompts][:_SHOWN_ANSWERS]
        controller.prepare(partial(earlier_checkpoint, run.config, run.stored))
        check_majority(config, data.validation, rollout=parts.rollout, reward=parts.reward)
        before = answers(parts, shown)
        signals.begin_loop()
        try:
            complete = controller.fit()
        finally:
            signals.end_loop()
        if complete:
            console.answers(compare_answers(before, answers(parts, shown)))
        console.phase("stopping engines and workers")
        return complete


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


def answers(parts: Components, prompts: Sequence[Prompt]) -> list[tuple[Sample, float] | None]:
    """Answer a few validation prompts; returns the first answer to each with its score, None where its reward
    failed."""
    if not prompts:
        return []
    config = parts.config
    judged = replace(config, validation=replace(config.validation, save_generations=True, bootstrap_samples=0))
    evaluation = evaluate(judged, {"": prompts}, rollout=parts.rollout, reward=parts.reward)
    first = [next(iter(prompt.answers), None) for prompt in evaluation.answered[0].prompts]
    return [
        None if answer is None or answer.sample is None else (answer.sample, answer.reward.score) for answer in first
    ]


def compare_answers(
    before: Sequence[tuple[Sample, float] | None], after: Sequence[tuple[Sample, float] | None]
) -> list[AnswerRow]:
    """Put answers to the same prompts side by side."""
    return [
        AnswerRow(
            prompt=old[0].prompt, before=old[0].response, before_score=old[1], after=new[0].response, after_score=new[1]
        )
        for old, new in zip(before, after, strict=True)
        if old is not None and new is not None
    ]


def report(config: RunConfig, directory: RunDirectory, console: RunConsole, summary: Mapping[str, object]) -> None:
    """Print the summary, where things are, and what to do next."""
    console.table(f"Run {config.run.name}", [(name, _shown(value)) for name, value in summary.items()])
    files = {"metrics": directory.metrics, "reward curve": directory.curve, "logs": directory.logs}
    there = {name: path for name, path in files.items() if path.exists()}
    say_where(console, directory, there, config.tracking)
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
