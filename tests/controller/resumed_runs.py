"""Runs of the loop over fakes that are killed, resumed and compared: metrics, rollout log, models, position."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.cli.run_observer import RunObserver
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, DynamicSamplingConfig
from megappo.config.batching import BatchingConfig
from megappo.config.rollout import PartialConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.controller.loop import PPOController
from megappo.observability.console import RunConsole
from megappo.observability.metric_catalogue import MEASURED
from megappo.observability.run_directory import open_run_directory
from megappo.observability.tracker import JsonlTracker
from tests.controller.test_loop import make_config, make_controller, ppo_with_kl

STEPS = 6
BATCHING = BatchingConfig(prompts_per_step=4, samples_per_prompt=2, mini_batch_prompts=2)


def config_of(algorithm: AlgorithmConfig | None = None) -> RunConfig:
    """A run with validations that saves every other step."""
    grpo = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))
    config = make_config(algorithm or grpo, steps=STEPS, batching=BATCHING)
    config.trainer.save_freq, config.trainer.test_freq, config.trainer.val_before_train = 2, 3, True
    return config


def dynamic(oversample: float) -> RunConfig:
    sampling = DynamicSamplingConfig(max_rounds=6, oversample=oversample)
    return config_of(AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), sampling=sampling))


def partial(config: RunConfig) -> RunConfig:
    config.rollout.partial = PartialConfig(extra_prompts=5)
    config.rollout.sampling.max_new_tokens = 12
    return config


def one_step_off(config: RunConfig) -> RunConfig:
    return replace(config, controller=ControllerKind.one_step_off)


CONFIGS: dict[str, Callable[[], RunConfig]] = {
    "critic and adaptive KL": lambda: config_of(ppo_with_kl()),
    "dynamic sampling": lambda: dynamic(1.0),
    "over-sampling": lambda: dynamic(3.0),
    "greedy answers": lambda: config_of(AlgorithmConfig(advantage=AdvantageConfig(name="remax"))),
    "partial": lambda: partial(config_of()),
    "one step off": lambda: one_step_off(config_of(ppo_with_kl())),
    "one step off, over-sampling": lambda: one_step_off(dynamic(3.0)),
    "one step off, partial": lambda: one_step_off(partial(config_of())),
}


class Killed(BaseException):
    """The process is dead: nothing after it is done."""


@dataclass
class Started:
    """One process of a run."""

    controller: PPOController
    observer: RunObserver
    output: io.StringIO

    @property
    def folder(self) -> Path:
        return self.controller._directory.path

    def finish(self) -> bool:
        self.controller.prepare()
        return self.controller.fit()

    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what is measured in time."""
        texts = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [
            {name: value for name, value in json.loads(text).items() if not name.startswith(MEASURED)} for text in texts
        ]

    def answers(self) -> dict[str, str]:
        """The rollout log."""
        return {path.name: path.read_text() for path in sorted((self.folder / "rollouts").iterdir())}

    def tables(self) -> list[torch.Tensor]:
        parts = self.controller.parts
        trainers = [parts.actor] if parts.critic is None else [parts.actor, parts.critic]
        return [trainer.table.detach() for trainer in trainers]  # type: ignore[union-attr]


def start(config: RunConfig, folder: Path, **more: Any) -> Started:
    """Make the parts of one process; it resumes as trainer.resume says."""
    config = replace(config, run=replace(config.run, dir=str(folder.parent), name=folder.name))
    directory = open_run_directory(config.run, resume=config.trainer.resume)
    output = io.StringIO()
    console = RunConsole(file=output, terminal=False)
    observer = RunObserver(config, directory, console=console, trackers=[JsonlTracker(directory.metrics)])
    controller, _ = make_controller(config, directory.path, observer=observer, **more)
    return Started(controller, observer, output)


Whole = Callable[[str], Started]
"""Name of a configuration -> that run, which nobody killed."""


def resuming(config: RunConfig, how: str = "auto") -> RunConfig:
    """Return the configuration of a run that goes on."""
    return replace(config, trainer=replace(config.trainer, resume=how))


def kill_at(owner: Any, method: str, call: int, *, after: bool = False) -> None:
    """Let the process die before (or after) the given call of a method, counted from 1."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = original(*args, **kwargs)
        if calls == call:
            raise Killed
        return result

    setattr(owner, method, dying)


def die(run: Started, kill: Callable[[Started], None]) -> None:
    """Run until it is killed."""
    kill(run)
    with pytest.raises(Killed):
        run.finish()


def assert_same(found: Started, expected: Started) -> None:
    """Two runs have the same numbers, answers, models and place in the data, bitwise."""
    assert [line["step"] for line in found.lines()] == [line["step"] for line in expected.lines()]
    for mine, theirs in zip(found.lines(), expected.lines()):
        assert mine == theirs, f"step {theirs['step']}"
    assert found.answers() == expected.answers()
    for mine, theirs in zip(found.tables(), expected.tables(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = found.controller.parts, expected.controller.parts
    assert mine.step_sampler.state() == theirs.step_sampler.state()
    assert mine.kl_coefficient.value == theirs.kl_coefficient.value
