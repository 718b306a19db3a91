"""`megappo sft`: makes a starting model by supervised training on prompt/answer pairs, through the actor's trainer.

`<sft.output>/model` is the result, a Hugging Face folder with its tokenizer; `logs/` and `metrics.jsonl` lie beside it.
"""

from dataclasses import replace
from pathlib import Path

from megappo.cluster.session import Session
from megappo.config.algorithm import AlgorithmConfig, PolicyLossConfig
from megappo.config.cluster import DeviceKind
from megappo.config.model import RandomModelConfig
from megappo.config.rules import check_sft_device
from megappo.config.run import RunConfig
from megappo.controller.sft import SftStep, run_sft
from megappo.data.prompts import load_prompts
from megappo.data.starting_tokenizer import starting_tokenizer
from megappo.data.supervised import supervised_pairs
from megappo.data.tokenizer import load_tokenizer
from megappo.device.backend import resolve_backend
from megappo.errors import ConfigError
from megappo.models.random_model import make_random_model
from megappo.observability.console import RunConsole
from megappo.observability.tracker import JsonlTracker

_LINE_EVERY = 20
"""Steps between two lines off a terminal."""


def sft(config: RunConfig) -> int:
    """Run the supervised training; returns 0. Raises MegappoError when it cannot be done."""
    backend = resolve_backend(config.cluster.device)
    config = replace(config, cluster=replace(config.cluster, device=DeviceKind(backend.kind)))
    if violations := check_sft_device(config):
        raise ConfigError(violations)
    output = Path(config.sft.output)
    (output / "logs").mkdir(parents=True, exist_ok=True)
    with RunConsole() as console:
        start = config.model.path
        if config.sft.random_model is not None:
            console.phase("making a model with random weights")
            start = str(make_start(config, config.sft.random_model, output / "start"))
        tokenizer = load_tokenizer(start)
        prompts = load_prompts(config.data.train, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens).prompts
        pairs = supervised_pairs(prompts, tokenizer)
        console.note(f"{pairs.num_sequences} pairs, {pairs.num_tokens} tokens")
        tracker = JsonlTracker(_fresh(output / "metrics.jsonl"))
        supervised = supervised_config(config, start)
        with Session(supervised, backend=backend, log_dir=output / "logs", report=console.phase) as session:
            session.start_actor()
            steps = run_sft(
                pairs,
                config.sft,
                actor=session.actor,
                put=session.put,
                batching=config.batching,
                seed=config.seed,
            )
            last = None
            for last in steps:
                tracker.log(last.step, last.metrics)
                show_step(console, last, config.sft.max_steps)
            console.phase(f"writing {output / 'model'}")
            session.actor.save_hf(str((output / "model").resolve()))
        tracker.close("finished")
        if last is not None:
            console.note(f"done after {last.step} steps, loss {last.running_loss:.3f} nats per answer token")
        console.lines("Next", [f"megappo train with model.path={output / 'model'}"])
    return 0


def supervised_config(config: RunConfig, start: str) -> RunConfig:
    """Return the configuration of the actor: starting weights, optimizer, and cross-entropy as the loss
    (the `gpg` loss with advantage 1)."""
    algorithm = AlgorithmConfig(policy_loss=PolicyLossConfig(name="gpg"))
    return replace(
        config,
        model=replace(config.model, path=start),
        actor=replace(config.actor, optim=config.sft.optim),
        algorithm=algorithm,
    )


def make_start(config: RunConfig, shape: RandomModelConfig, folder: Path) -> Path:
    """Make the random starting model."""
    make_random_model(shape, tokenizer=starting_tokenizer(config.data), seed=config.seed, output=str(folder))
    return folder


def show_step(console: RunConsole, step: SftStep, max_steps: int) -> None:
    """Show one supervised step: all of them on a terminal, some of them elsewhere."""
    if console.is_terminal or step.step == 1 or step.step % _LINE_EVERY == 0:
        text = f"loss {step.loss:.3f}  running mean {step.running_loss:.3f} nats per answer token"
        console.progress(step.step, max_steps, text)


def _fresh(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path
