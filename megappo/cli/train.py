"""`megappo train`: builds every object of a run from its configuration, runs the loop, tells what became of it."""

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import workload_of_model
from megappo.cli.run_observer import RunObserver
from megappo.cluster.session import Session
from megappo.config.rules import start_up_notes
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.controller.evaluate import evaluate
from megappo.controller.loop import PPOController
from megappo.controller.step import Components
from megappo.data.prompts import load_prompts
from megappo.data.sampler import PromptSampler
from megappo.data.tokenizer import load_tokenizer
from megappo.data.types import Prompt
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import MegappoError
from megappo.observability.console import AnswerRow, RunConsole
from megappo.observability.logging import log_to_file
from megappo.observability.mlflow_tracker import MlflowTracker, open_command, store_uri
from megappo.observability.run_directory import RunDirectory, open_run_directory, write_atomically
from megappo.observability.tracker import BackgroundTracker, JsonlTracker, Tracker
from megappo.rewards.types import Sample

_SHOWN_ANSWERS = 5


def train(config: RunConfig) -> int:
    """Run the configured training; returns the exit code (0 done, 1 failed, 130 interrupted)."""
    backend = resolve_backend(config.cluster.device)
    directory = open_run_directory(config.run, resume=config.trainer.resume)
    write_atomically(directory.config, resolved_yaml(config))
    log_to_file(directory.logs / "controller.log")
    signal.signal(signal.SIGTERM, _interrupt)
    with RunConsole() as console:
        if directory.moved_aside is not None:
            console.note(f"the earlier run of this name is now in {directory.moved_aside}")
        observer = RunObserver(config, directory, console=console, trackers=make_trackers(config, directory, console))
        for note in start_up_notes(config):
            console.note(note)
        exit_reason, code = "failed", 1
        try:
            _run(config, backend, directory, console, observer)
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


def _run(
    config: RunConfig, backend: Backend, directory: RunDirectory, console: RunConsole, observer: RunObserver
) -> None:
    """Start the processes, run the loop and stop them."""
    console.phase("reading prompts")
    sampler, validation = make_data(config)
    with Session(config, backend=backend, log_dir=directory.logs, report=console.phase) as session:
        session.start_training()
        parts = Components(
            config=config,
            sampler=sampler,
            rollout=session.rollout,
            reward=session.reward,
            actor=session.actor,
            critic=session.critic,
            weight_sync=session.weight_sync,
            kl_coefficient=KLCoefficient(config.algorithm.kl.in_reward),
            workload=workload_of_model(json.loads((Path(config.model.path) / "config.json").read_text())),
        )
        controller = PPOController(
            parts, validation=validation, checkpoint_dir=directory.checkpoints, observer=observer
        )
        shown = validation[:_SHOWN_ANSWERS]
        controller.prepare()
        before = answers(parts, shown)
        controller.fit()
        console.answers(compare_answers(before, answers(parts, shown)))
        console.phase("stopping engines and workers")


def make_data(config: RunConfig) -> tuple[PromptSampler, list[Prompt]]:
    """Return the training sampler and the validation prompts."""
    tokenizer = load_tokenizer(config.model.path)
    loaded = load_prompts(config.data.train, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
    sampler = PromptSampler(
        loaded.prompts,
        batch_size=config.batching.prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    if config.data.validation is None:
        return sampler, []
    held_out = load_prompts(config.data.validation, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
    return sampler, held_out.prompts


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
    places = [f"metrics      {directory.metrics}", f"reward curve {directory.curve}", f"logs         {directory.logs}"]
    if config.tracking.mlflow:
        uri = store_uri(config.tracking.mlflow_uri, directory.database)
        places.append(f"in MLflow    {open_command(uri)}")
    console.lines("Look at", places)
    console.lines(
        "Next",
        [
            "megappo train experiment=quickstart_ppo      # the same task with a critic (GAE)",
            "megappo train experiment=quickstart rollout=hf seed=1 run.name=second",
            "megappo config experiment=quickstart         # every key you can set",
        ],
    )


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
