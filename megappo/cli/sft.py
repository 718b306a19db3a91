"""`megappo sft`: supervised training on prompt/answer pairs or conversations, through the actor's trainer.

The result is `<sft.output>/model`, a Hugging Face folder with its tokenizer; metrics, logs and checkpoints lie beside
it (`cli.supervised`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megappo.balance.workload import workload_of_model
from megappo.cli.supervised import SupervisedRun, run_supervised
from megappo.cluster.session import Session
from megappo.config.algorithm import AlgorithmConfig, PolicyLossConfig
from megappo.config.cluster import DeviceKind
from megappo.config.data import SourceConfig
from megappo.config.rollout import SamplingConfig
from megappo.config.rules import check_sft_device
from megappo.config.run import RunConfig
from megappo.controller.epochs import EpochBatches
from megappo.controller.sft import SftTask
from megappo.data.starting_tokenizer import starting_tokenizer
from megappo.data.supervised import SupervisedRows, load_supervised_rows
from megappo.data.tokenizer import load_tokenizer, with_chat_template
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import ConfigError
from megappo.models.architecture import read_config
from megappo.models.random_model import make_random_model
from megappo.observability.console import RunConsole
from megappo.weights.safetensors_io import HuggingFaceWeights

_COUNTS = {
    "bad": "left out: there is nothing to train on, or not exactly",
    "too_long": "left out: longer than the most tokens of a row",
    "cut_off": "cut off at the most tokens of a row",
    "empty_prompt": "left out: the prompt has no token",
    "without_end": "have an answer without a special token at its end, so the model does not learn to end there",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class _Material:
    """What is trained on, read before anything is begun."""

    tokenizer: PreTrainedTokenizerBase
    rows: SupervisedRows
    held_out: SupervisedRows | None
    batches: EpochBatches


def sft(config: RunConfig) -> int:
    """Run the supervised training; returns the exit code, as `megappo train`. Raises MegappoError when it cannot be
    begun."""
    backend = resolve_backend(config.cluster.device)
    config = replace(config, cluster=replace(config.cluster, device=DeviceKind(backend.kind)))
    if violations := check_sft_device(config):
        raise ConfigError(violations)
    with RunConsole() as console:
        console.phase("reading rows")
        material = _read(config, console)
        return run_supervised(
            config,
            config.sft,
            lambda run: _train(run, material, backend),
            console=console,
            section="sft",
            losses=(SftTask.loss, "sft/val_loss"),
            next_steps=lambda model: [f"megappo train ... model.path={model}      # reinforcement learning from there"],
        )


def _train(run: SupervisedRun, material: _Material, backend: Backend) -> bool:
    """Start the processes, run the loop, write the result. Returns whether the loop came to its end."""
    config, console = run.config, run.console
    start = Path(config.model.path).resolve()
    if config.sft.random_model is not None:
        console.phase("making a model with random weights")
        start = run.directory.path.resolve() / "start"
        make_random_model(config.sft.random_model, tokenizer=material.tokenizer, seed=config.seed, output=str(start))
    trained = supervised_config(config, str(start))
    with Session(trained, backend=backend, log_dir=run.directory.logs, report=console.phase) as session:
        session.start_actor()
        task = SftTask(
            material.rows.batch,
            None if material.held_out is None else material.held_out.batch,
            actor=session.actor,
            put=session.put,
            batching=config.batching,
            workload=workload_of_model(read_config(start)),
        )
        complete = run.fit(task, material.batches)
        if complete:
            console.phase(f"writing {run.directory.path / 'model'}")
            session.actor.save_hf(str(run.result))
        return complete


def _read(config: RunConfig, console: RunConsole) -> _Material:
    """Read the rows that are trained on and measured.

    Raises:
        CheckpointError: the model's folder holds no weights.
        DataError: a row cannot be used, or none is left.
    """
    settings, data = config.sft, config.data
    if settings.random_model is None:
        tokenizer = load_tokenizer(config.model.path, data.chat_template)
        HuggingFaceWeights(config.model.path)  # that there are any
        positions: int | None = read_config(Path(config.model.path)).get("max_position_embeddings")
    else:
        tokenizer = with_chat_template(starting_tokenizer(data), data.chat_template)
        positions = settings.random_model.max_position_embeddings

    def load(key: str, source: SourceConfig) -> SupervisedRows:
        rows = load_supervised_rows(
            source,
            tokenizer,
            train_on=settings.train_on,
            max_tokens=settings.max_tokens or positions,
            over_long=settings.over_long,
        )
        trained = int(rows.batch.response_mask.sum())
        console.note(f"{key}: {rows.batch.num_sequences} rows, {rows.batch.num_tokens} tokens, loss on {trained}")
        for what, count in rows.counts.items():
            console.note(f"{key}: {count} rows {_COUNTS[what]}")
        return rows

    rows = load("data.train", data.train)
    batches = EpochBatches(
        lengths=rows.batch.lengths,
        fingerprint=rows.fingerprint,
        batch_size=settings.batch_size,
        batch_tokens=settings.batch_tokens,
        seed=config.seed,
        shuffle=data.shuffle,
    )
    measured = data.validation if settings.test_freq > 0 else None
    held_out = None if measured is None else load("data.validation", measured)
    return _Material(tokenizer=tokenizer, rows=rows, held_out=held_out, batches=batches)


def supervised_config(config: RunConfig, start: str) -> RunConfig:
    """Return the configuration of the actor: starting weights, optimizer, and cross-entropy as the loss (the `gpg` loss
    with advantage 1) at temperature 1."""
    return replace(
        config,
        model=replace(config.model, path=start),
        actor=replace(config.actor, optim=config.sft.optim),
        algorithm=AlgorithmConfig(policy_loss=PolicyLossConfig(name="gpg")),
        rollout=replace(config.rollout, sampling=SamplingConfig()),
    )
