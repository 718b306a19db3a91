"""Rules of supervised training, and what another configuration means for a supervised run that is resumed."""

from dataclasses import asdict, replace
from enum import Enum
from typing import Any

import pytest

from megappo.checkpoint.differences import Verdict, compare_configs
from megappo.config.checkpoint import CheckpointConfig
from megappo.config.data import SourceConfig
from megappo.config.model import RandomModelConfig
from megappo.config.rules import check_config, check_sft_files
from megappo.config.run import RunConfig
from megappo.config.supervised import SftConfig

HELD_OUT = SourceConfig(kind="reasoning_gym", task="gcd")


def config_of(*, held_out: bool = False, checkpoint: CheckpointConfig | None = None, **sft: Any) -> RunConfig:
    config = RunConfig(
        sft=SftConfig(random_model=RandomModelConfig(), **sft), checkpoint=checkpoint or CheckpointConfig()
    )
    config.data.train = SourceConfig(kind="reasoning_gym", task="gcd")
    config.data.validation = HELD_OUT if held_out else None
    return config


BEST = CheckpointConfig(keep_best="sft/val_loss")
OTHERS = CheckpointConfig(keep_best="reward/mean")
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"output": "."}, "sft.output", "must name a folder"),
    ({"test_freq": 5}, "sft.test_freq", "needs rows to measure the loss on"),
    ({"save_freq": 4, "checkpoint": CheckpointConfig(keep_every=6)}, "checkpoint.keep_every", "sft.save_freq=4"),
    ({"save_freq": 4, "checkpoint": BEST}, "checkpoint.keep_best", "with sft.test_freq=-1"),
    (
        {"save_freq": 4, "checkpoint": OTHERS},
        "checkpoint.keep_best",
        "never measured",
    ),
    ({"max_tokens": 257}, "sft.max_tokens", "max_position_embeddings=256"),
]


@pytest.mark.parametrize(("settings", "key", "rule"), REFUSED)
def test_what_cannot_be_done_is_refused(settings: dict[str, Any], key: str, rule: str) -> None:
    (violation,) = check_sft_files(config_of(**settings))
    assert violation.key == key
    assert rule in violation.rule


@pytest.mark.parametrize(
    "settings",
    [
        {"held_out": True, "test_freq": 5, "save_freq": 4, "checkpoint": BEST},
        {"save_freq": 4, "checkpoint": CheckpointConfig(keep_every=8, keep_best="sft/loss")},
        {"checkpoint": OTHERS},
        {"max_tokens": 256},
    ],
)
def test_what_can_be_done_is_not(settings: dict[str, Any]) -> None:
    assert check_sft_files(config_of(**settings)) == []


def test_several_sources_are_refused() -> None:
    config = config_of()
    config.data.train_sources = {"one": HELD_OUT}
    assert [violation.key for violation in check_sft_files(config)] == ["data.train_sources"]


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"epochs": 0}, ["sft.epochs"]),
        ({"batch_tokens": -1}, ["sft.batch_tokens"]),
        ({"max_steps": 0}, ["sft.max_steps"]),
        ({"save_freq": 0}, ["sft.save_freq"]),
        ({"test_freq": -2}, ["sft.test_freq"]),
    ],
)
def test_sizes_and_frequencies_are_checked(settings: dict[str, Any], keys: list[str]) -> None:
    found = [violation.key for violation in check_config(config_of(**settings)) if violation.key.startswith("sft.")]
    assert found == keys


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value.name if isinstance(value, Enum) else value


SFT = SftConfig()
VERDICTS: list[tuple[str, RunConfig, Verdict]] = [
    ("sft.batch_size", RunConfig(sft=replace(SFT, batch_size=3)), Verdict.refused),
    ("sft.batch_tokens", RunConfig(sft=replace(SFT, batch_tokens=3)), Verdict.refused),
    ("sft.epochs", RunConfig(sft=replace(SFT, epochs=3)), Verdict.allowed),
    ("sft.optim.lr", RunConfig(sft=replace(SFT, optim=replace(SFT.optim, lr=1.0))), Verdict.allowed),
    ("sft.output", RunConfig(sft=replace(SFT, output="there")), Verdict.ignored),
    ("seed", RunConfig(seed=1), Verdict.refused),
    ("trainer.total_steps", RunConfig(trainer=replace(RunConfig().trainer, total_steps=9)), Verdict.ignored),
    ("rollout.engine", RunConfig(rollout=replace(RunConfig().rollout, engine="hf")), Verdict.ignored),
]


@pytest.mark.parametrize(("key", "wanted", "verdict"), VERDICTS)
def test_a_supervised_run_that_goes_on_minds_what_it_reads(key: str, wanted: RunConfig, verdict: Verdict) -> None:
    saved = plain(asdict(RunConfig()))
    (found,) = compare_configs(saved, plain(asdict(wanted)), section="sft")
    assert (found.key, found.verdict) == (key, verdict)
    if key.startswith("sft."):
        (found,) = compare_configs(saved, plain(asdict(wanted)))
        assert found.verdict is Verdict.ignored
