"""`megappo rm`: trains a reward model on preference pairs.

The result is `<rm.output>/model`, a Hugging Face folder that transformers loads as a sequence-classification model with
one label; metrics, logs and checkpoints lie beside it (`cli.supervised`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megappo.balance.workload import workload_of_model
from megappo.cli.supervised import SupervisedRun, run_supervised
from megappo.cluster.session import Session
from megappo.config.cluster import DeviceKind
from megappo.config.data import SourceConfig
from megappo.config.rules import check_rm_device
from megappo.config.run import RunConfig
from megappo.controller.epochs import EpochBatches
from megappo.controller.preference import PreferenceTask
from megappo.data.preferences import PairColumns, PreferenceSet, TextLimits, load_preferences
from megappo.data.tokenizer import load_tokenizer
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import ConfigError, DataError
from megappo.models.architecture import read_config
from megappo.observability.console import RunConsole
from megappo.weights.score_head import check_score_head

_LEFT_OUT = {
    "too_long": "a text is longer than the most tokens",
    "empty": "an answer is empty",
    "equal": "both answers are the same",
    "bad": "the row is no pair",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class _Start:
    """What the training starts from."""

    folder: str
    model: dict[str, Any]  # Any: config.json
    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int


@dataclass(kw_only=True, slots=True, frozen=True)
class _Material:
    """What is trained on, read before anything is begun."""

    start: _Start
    pairs: PreferenceSet
    held_out: PreferenceSet | None
    batches: EpochBatches


def rm(config: RunConfig) -> int:
    """Run the training; returns the exit code, as `megappo train`. Raises MegappoError when it cannot be begun."""
    backend = resolve_backend(config.cluster.device)
    config = replace(config, cluster=replace(config.cluster, device=DeviceKind(backend.kind)))
    if violations := check_rm_device(config):
        raise ConfigError(violations)
    with RunConsole() as console:
        console.phase("reading pairs")
        material = _read(config, console)
        return run_supervised(
            config,
            config.rm,
            lambda run: _train(run, material, backend),
            console=console,
            section="rm",
            losses=(PreferenceTask.loss, "reward_model/val_loss"),
            measures={"accuracy": "reward_model/val_accuracy"},
            next_steps=lambda model: [f"megappo train ... reward.name=reward_model reward_model.path={model}"],
        )


def _train(run: SupervisedRun, material: _Material, backend: Backend) -> bool:
    """Start the processes, run the loop, write the result. Returns whether the loop came to its end."""
    config, console, start, held_out = run.config, run.console, material.start, material.held_out
    trained = replace(config, reward_model=replace(config.reward_model, path=start.folder))
    with Session(trained, backend=backend, log_dir=run.directory.logs, report=console.phase) as session:
        model = session.start_reward_model_training()
        task = PreferenceTask(
            material.pairs.pairs,
            None if held_out is None else held_out.pairs,
            model=model,
            put=session.put,
            batching=config.batching,
            workload=workload_of_model(start.model),
        )
        complete = run.fit(task, material.batches)
        if complete:
            console.phase(f"writing {run.directory.path / 'model'}")
            model.save_scorer(str(run.result), pad_token_id=start.pad_token_id)
        return complete


def _read(config: RunConfig, console: RunConsole) -> _Material:
    """Read the pairs that are trained on and measured. Raises as `_start`; DataError: a row cannot be used, or none is
    left."""
    start, settings = _start(config), config.rm
    pairs = _load("data.train", config.data.train, config, start, console)
    batches = EpochBatches(
        lengths=pairs.lengths,
        fingerprint=pairs.fingerprint,
        batch_size=settings.batch_size,
        batch_tokens=settings.batch_tokens,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )
    measured = config.data.validation if settings.test_freq > 0 else None
    held_out = None if measured is None else _load("data.validation", measured, config, start, console)
    return _Material(start=start, pairs=pairs, held_out=held_out, batches=batches)


def _start(config: RunConfig) -> _Start:
    """Return what the training starts from.

    Raises:
        CheckpointError: the folder holds no weights, or a score head of several labels.
        DataError: nothing says which token is padding, without which transformers' models cannot score a batch.
    """
    folder = str(Path(config.reward_model.path or config.model.path).resolve())
    check_score_head(folder, needed=False)
    model, tokenizer = read_config(Path(folder)), load_tokenizer(folder, config.data.chat_template)
    pad: Any = model.get("pad_token_id")
    pad = tokenizer.pad_token_id if pad is None else pad
    if not isinstance(pad, int):
        raise DataError(
            f"reward model: neither config.json nor the tokenizer of {folder} has a pad token "
            "(set pad_token_id in config.json to a token that no text ends with)"
        )
    return _Start(folder=folder, model=model, tokenizer=tokenizer, pad_token_id=pad)


def _load(key: str, source: SourceConfig, config: RunConfig, start: _Start, console: RunConsole) -> PreferenceSet:
    """Read the pairs of a source and tell what became of them."""
    settings, positions = config.rm, start.model["max_position_embeddings"]
    found = load_preferences(
        source,
        PairColumns(
            chosen=settings.chosen_column,
            rejected=settings.rejected_column,
            prompt=settings.prompt_column,
            margin=settings.margin_column,
        ),
        start.tokenizer,
        TextLimits(max_tokens=min(settings.max_tokens or positions, positions), pad_token_id=start.pad_token_id),
    )
    console.note(f"{key}: {len(found.lengths)} pairs, {int(found.lengths.sum())} tokens")
    for reason, count in found.filtered.items():
        console.note(f"{key}: {count} pairs left out: {_LEFT_OUT[reason]}")
    return found
