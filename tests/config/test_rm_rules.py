"""Rules about the reward model: each message under the keys that a user can set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.data import SourceConfig
from megappo.config.lora import LoraConfig
from megappo.config.optim import OptimizerName
from megappo.config.parallelism import ParallelismConfig
from megappo.config.reward import RewardTerm
from megappo.config.rules import check_config, check_files, check_rm
from megappo.config.run import RunConfig
from megappo.config.supervised import OverLong

UseModel = Callable[[dict[str, Any]], Path]


@pytest.fixture
def asking(config: RunConfig) -> RunConfig:
    """A run one of whose terms is the score of a reward model on a pool of its own."""
    config.reward.terms = {"preference": RewardTerm(name="reward_model"), "exact": RewardTerm(name="exact_match")}
    config.reward_model.path = "runs/rm/model"
    config.cluster.pools["scorers"] = 4
    config.cluster.reward = "scorers"
    return config


def messages(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


def test_a_reward_model_that_is_asked_breaks_no_rule(asking: RunConfig) -> None:
    asking.reward_model.parallelism = ParallelismConfig(tensor=2, pipeline=2)
    assert messages(asking) == []


def test_its_folder_must_be_named(asking: RunConfig) -> None:
    asking.reward_model.path = None
    assert messages(asking) == [
        "reward_model.path=null must be given for the reward `reward_model` "
        "(give the folder of a model of `megappo rm`)"
    ]


def test_its_layout_fits_its_own_pool(asking: RunConfig) -> None:
    asking.reward_model.parallelism = ParallelismConfig(tensor=3)
    assert messages(asking) == [
        "reward_model.parallelism=3 (tensor 3 * pipeline 1 * context 1) must divide the 4 devices of pool 'scorers' "
        "(make the product one of 1, 2 or 4, or change cluster.pools.scorers)"
    ]
    asking.reward_model.parallelism = ParallelismConfig(sequence=True)
    assert messages(asking) == [
        "reward_model.parallelism.sequence=True needs reward_model.parallelism.tensor > 1 "
        "(set reward_model.parallelism.tensor=2 or reward_model.parallelism.sequence=false)"
    ]


def test_its_pool_must_exist(asking: RunConfig) -> None:
    asking.cluster.reward = "elsewhere"
    assert messages(asking) == [
        "cluster.reward=elsewhere is not a pool of cluster.pools "
        "(use one of main, scorers, or add it with its number of devices)"
    ]


def test_nobody_looks_at_a_reward_model_that_is_not_asked(config: RunConfig) -> None:
    config.reward_model.parallelism = ParallelismConfig(tensor=3)
    assert messages(config) == []


def test_its_sizes_suit_its_layout(asking: RunConfig, use_model: UseModel) -> None:
    folder = use_model({})
    asking.reward_model.path = str(folder)
    asking.reward_model.parallelism = ParallelismConfig(tensor=4)
    assert [str(violation) for violation in check_files(asking)] == [
        "reward_model.parallelism.tensor=4 must divide model.num_key_value_heads=2 (use 1 or 2)"
    ]
    asking.reward_model.path = str(folder / "missing")
    assert [str(violation) for violation in check_files(asking)] == [
        f"reward_model.path={folder / 'missing'} is not a folder that exists "
        "(give a Hugging Face folder: reward_model.path=FOLDER)"
    ]


def test_training_is_checked_under_its_own_keys(config: RunConfig, use_model: UseModel) -> None:
    use_model({})
    assert check_rm(config) == []
    config.rm.over_long = OverLong.truncate
    config.rm.batch_size = 0
    config.rm.optim.warmup_steps = -1
    config.rm.optim.name = OptimizerName.sgd
    config.rm.optim.beta1 = 0.5
    config.rm.lora = LoraConfig(rank=0)
    config.reward_model.parallelism = ParallelismConfig(tensor=4)
    config.data.train_sources = {"a": SourceConfig()}
    found = {violation.key for violation in check_rm(config)}
    assert found == {
        "rm.over_long",
        "rm.batch_size",
        "rm.optim.warmup_steps",
        "rm.optim.beta1",
        "rm.lora.rank",
        "reward_model.parallelism",
        "reward_model.parallelism.tensor",
        "data.train_sources",
    }


def test_what_is_measured_and_kept_of_a_training_can_be(config: RunConfig, use_model: UseModel) -> None:
    use_model({})
    config.data.validation, config.rm.test_freq, config.rm.output = None, 5, "."
    config.rm.save_freq, config.checkpoint.keep_best = 4, "reward/mean"
    config.trainer.resume = "runs/rm/checkpoints/step_000004"
    assert [str(violation) for violation in check_rm(config)] == [
        "rm.output=. must name a folder of the run's own (for example runs/sft)",
        "rm.test_freq=5 needs rows to measure the loss on (set data.validation, or leave it at -1)",
        "checkpoint.keep_best=reward/mean is never measured by `megappo rm` (use reward_model/preference_loss or, with "
        "rm.test_freq, reward_model/val_loss, and checkpoint.best_mode=min)",
        "trainer.resume=runs/rm/checkpoints/step_000004 is not a folder that exists "
        "(give a checkpoint folder, or auto for the newest of this run)",
    ]
    config.rm.output, config.rm.test_freq, config.trainer.resume = "runs/rm", -1, "never"
    config.checkpoint.keep_best = "reward_model/val_accuracy"
    (found,) = check_rm(config)
    assert "with rm.test_freq=-1" in found.rule
    config.checkpoint.keep_best = "reward_model/accuracy"
    assert check_rm(config) == []
