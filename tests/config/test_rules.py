"""Each rule refuses what it is named for and nothing else."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.cluster import DeviceKind
from megappo.config.data import SourceConfig
from megappo.config.optim import ScheduleKind
from megappo.config.rules import check_config, check_files, check_sft_files, start_up_notes
from megappo.config.run import RunConfig

UseModel = Callable[[dict[str, Any]], Path]


def messages(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


def set_key(config: RunConfig, key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    target: object = config
    for part in section.split(".") if section else []:
        target = getattr(target, part)
    setattr(target, name, value)


def test_a_sound_configuration_breaks_no_rule(config: RunConfig) -> None:
    assert messages(config) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("batching.prompts_per_step", 0, "batching.prompts_per_step=0 must be positive (use 1 or more)"),
        ("trainer.total_steps", 0, "trainer.total_steps=0 must be positive (use 1 or more)"),
        ("trainer.critic_warmup", -1, "trainer.critic_warmup=-1 must not be negative (use 0 or more)"),
        ("actor.optim.lr", 0.0, "actor.optim.lr=0.0 must be positive (use a number above 0)"),
        ("trainer.save_freq", 0, "trainer.save_freq=0 must be a positive number of steps (use -1 for never)"),
        ("trainer.test_freq", -2, "trainer.test_freq=-2 must be a positive number of steps (use -1 for never)"),
        ("rollout.sampling.top_p", 1.5, "rollout.sampling.top_p=1.5 must be in (0, 1] (1.0 is off)"),
        ("rollout.sampling.top_k", 0, "rollout.sampling.top_k=0 must be positive (-1 is off)"),
        ("actor.optim.beta2", 1.0, "actor.optim.beta2=1.0 must be in [0, 1) (use 0.9 or 0.999)"),
        ("cluster.actor", "gpus", "cluster.actor=gpus is not a pool of cluster.pools"),
        ("rollout.num_engines", 3, "rollout.num_engines=3 times rollout.tensor 1 is more than the 2 devices"),
        ("actor.parallelism.sequence", True, "actor.parallelism.sequence=True needs actor.parallelism.tensor > 1"),
        ("actor.parallelism.virtual_pipeline", 2, "actor.parallelism.virtual_pipeline=2 must be at least 2 and needs"),
        ("trainer.resume", "atuo", "trainer.resume=atuo must be auto, never or a path with a /"),
        ("run.name", "a/b", "run.name=a/b must be the name of one folder"),
        ("reward.name", "model", "reward.model_path=null must be given for the reward `model`"),
        ("data.max_prompt_tokens", 249, "data.max_prompt_tokens=249 plus 8 new tokens is more than"),
    ],
)
def test_one_wrong_value_is_one_violation(config: RunConfig, key: str, value: object, message: str) -> None:
    set_key(config, key, value)
    found = messages(config)
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("actor.optim.clip_grad", "is not a number"),
        ("actor.optim.lr", "is not a number"),
        ("actor.optim.beta1", "is not a number"),
        ("rollout.sampling.temperature", "is not a number"),
        ("actor.optim.lr", "must be finite"),
        ("actor.optim.weight_decay", "must be finite"),
        ("weight_sync.timeout_s", "must be finite"),
        ("sft.stop_loss", "must be finite"),
    ],
)
def test_every_number_is_finite_and_refused_once(config: RunConfig, key: str, rule: str) -> None:
    value = math.nan if rule == "is not a number" else math.inf
    set_key(config, key, value)
    assert messages(config) == [f"{key}={value} {rule} (use a finite number)"]


def test_numbers_in_maps_are_finite_too(config: RunConfig) -> None:
    config.actor.optim.weight_decay_of = {"*norm*": math.inf}
    assert messages(config) == ["actor.optim.weight_decay_of[*norm*]=inf must be finite (use a finite number)"]


def test_training_temperature_zero_is_refused_and_greedy_validation_is_not(config: RunConfig) -> None:
    config.rollout.sampling.temperature = 0.0
    config.rollout.validation.temperature = 0.0
    assert [violation.key for violation in check_config(config)] == ["rollout.sampling.temperature"]


def test_mini_batches_are_counted_in_prompts(config: RunConfig) -> None:
    config.batching.prompts_per_step, config.batching.samples_per_prompt = 32, 8
    config.batching.mini_batch_prompts = 16
    assert messages(config) == []
    config.batching.prompts_per_step, config.batching.samples_per_prompt = 24, 3
    (violation,) = check_config(config)
    assert violation.key == "batching.mini_batch_prompts"
    assert str(violation.value) == "16"
    assert "24 % 16 = 8" in violation.rule
    assert "48 sequences" in violation.rule and "72 sequences" in violation.rule


def test_more_ranks_than_devices_names_the_product_and_the_pool(config: RunConfig) -> None:
    config.actor.parallelism.tensor, config.actor.parallelism.pipeline = 2, 2
    assert messages(config) == [
        "actor.parallelism=4 (tensor 2 * pipeline 2 * context 1 ranks) is more than the 2 devices of pool 'main' "
        "(make the product one of 1 or 2, or change cluster.pools.main)"
    ]


def test_a_layout_that_leaves_devices_over_is_refused(config: RunConfig) -> None:
    config.cluster.pools = {"main": 3}
    config.actor.parallelism.tensor = 2
    (message,) = messages(config)
    assert message.startswith("actor.parallelism=2 (tensor 2 * pipeline 1 * context 1) must divide the 3 devices")


def test_engines_on_the_gpus_of_the_trainer_cannot_get_weights_by_broadcast(config: RunConfig) -> None:
    config.cluster.device = DeviceKind.cuda
    (violation,) = check_config(config)
    assert violation.key == "cluster.rollout" and "placement=split" in violation.remedy
    config.cluster.pools = {"main": 2, "engines": 1}
    config.cluster.rollout = "engines"
    assert messages(config) == []


def test_tensor_parallelism_divides_heads_and_key_value_heads(config: RunConfig) -> None:
    config.cluster.pools = {"main": 4}
    config.actor.parallelism.tensor = 4
    # The model that sft makes has 4 heads and 2 key/value heads.
    assert messages(config) == ["actor.parallelism.tensor=4 must divide model.num_key_value_heads=2 (use 1 or 2)"]


def test_pipeline_stages_and_their_chunks_divide_the_layers(config: RunConfig) -> None:
    config.cluster.pools = {"main": 2}
    config.actor.parallelism.pipeline = 2
    config.actor.parallelism.virtual_pipeline = 2
    assert messages(config) == []
    config.actor.parallelism.virtual_pipeline = 3
    assert messages(config) == [
        "actor.parallelism.virtual_pipeline=3 times 2 stages must divide model.num_hidden_layers=4 "
        "(use one of 1 or 2, or null)"
    ]


def test_critic_rules_hold_only_where_a_critic_is_trained(config: RunConfig) -> None:
    config.critic.parallelism.tensor = 4
    config.cluster.critic = "elsewhere"
    assert messages(config) == []
    config.algorithm.advantage.name = "gae"
    keys = [violation.key for violation in check_config(config)]
    assert keys == ["cluster.critic", "critic.parallelism.tensor"]


def test_critic_warmup_without_a_critic_is_refused(config: RunConfig) -> None:
    config.trainer.critic_warmup = 5
    (message,) = messages(config)
    assert message.startswith("trainer.critic_warmup=5 needs a critic, which algorithm.advantage.name=grpo")
    config.algorithm.advantage.name = "gae"
    assert messages(config) == []


@pytest.mark.parametrize("decay_steps", [None, 10])
def test_a_falling_schedule_needs_its_end_after_the_warmup(config: RunConfig, decay_steps: int | None) -> None:
    config.actor.optim.schedule = ScheduleKind.cosine
    config.actor.optim.warmup_steps = 10
    config.actor.optim.decay_steps = decay_steps
    (violation,) = check_config(config)
    assert violation.key == "actor.optim.decay_steps"
    config.actor.optim.decay_steps = 11
    assert messages(config) == []


def test_validation_keys_need_validation_prompts(config: RunConfig) -> None:
    config.data.validation = None
    config.trainer.test_freq = 10
    config.trainer.val_before_train = True
    keys = [violation.key for violation in check_config(config)]
    assert keys == ["trainer.test_freq", "trainer.val_before_train"]


def test_a_source_names_what_its_kind_reads(config: RunConfig) -> None:
    config.data.train = SourceConfig(kind="jsonl")
    config.data.validation = SourceConfig(kind="reasoning_gym")
    keys = [violation.key for violation in check_config(config)]
    assert keys == ["data.train.path", "data.validation.task"]


def test_skipped_rows_count_towards_the_size_of_a_source(config: RunConfig) -> None:
    config.data.train.skip = 99
    assert messages(config) == []
    config.data.train.skip = 100
    (message,) = messages(config)
    assert message.startswith("data.train.size=100 must be above data.train.skip=100")


def test_all_violations_come_in_one_report(config: RunConfig) -> None:
    config.batching.mini_batch_prompts = 5
    config.rollout.sampling.temperature = -1.0
    config.actor.parallelism.tensor = 3
    config.trainer.save_freq = 0
    keys = [violation.key for violation in check_config(config)]
    assert sorted(keys) == [
        "actor.parallelism",
        "actor.parallelism.tensor",
        "actor.parallelism.tensor",
        "actor.parallelism.tensor",
        "batching.mini_batch_prompts",
        "rollout.sampling.temperature",
        "trainer.save_freq",
    ]


def test_a_missing_model_that_sft_would_make_says_so(config: RunConfig, tmp_path: Path) -> None:
    config.sft.output = str(tmp_path / "start")
    config.model.path = str(tmp_path / "start" / "model")
    (violation,) = check_files(config)
    assert violation.key == "model.path"
    assert "megappo sft" in violation.remedy


def test_a_missing_model_of_ones_own_asks_for_the_folder(config: RunConfig, tmp_path: Path) -> None:
    config.model.path = str(tmp_path / "other")
    (violation,) = check_files(config)
    assert violation.value == config.model.path
    assert "model.path=FOLDER" in violation.remedy


def test_the_sizes_of_a_model_folder_are_held_against_the_layout(config: RunConfig, use_model: UseModel) -> None:
    use_model(
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_hidden_layers": 5,
            "hidden_size": 96,
            "max_position_embeddings": 70,
        }
    )
    config.actor.parallelism.tensor = 2
    config.actor.parallelism.pipeline = 2
    assert [str(violation) for violation in check_files(config)] == [
        "actor.parallelism.tensor=2 must divide model.num_key_value_heads=3 (use 1 or 3)",
        "actor.parallelism.pipeline=2 must divide model.num_hidden_layers=5 "
        "(use 1 or 5, or give first_stage_layers or last_stage_layers)",
        "data.max_prompt_tokens=64 plus 8 new tokens is more than model.max_position_embeddings=70 (use at most 62)",
    ]


def test_key_value_heads_default_to_the_heads(config: RunConfig, use_model: UseModel) -> None:
    use_model({"num_key_value_heads": None})
    config.actor.parallelism.tensor = 4
    assert check_files(config) == []


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_json_that_cannot_be_used_is_a_violation(config: RunConfig, tmp_path: Path, content: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(content)
    config.model.path = str(tmp_path / "model")
    (violation,) = check_files(config)
    assert violation.key == "model.path"
    assert "config.json" in violation.rule


def test_missing_data_checkpoint_and_reward_model_come_with_the_missing_model(
    config: RunConfig, tmp_path: Path
) -> None:
    config.data.train = SourceConfig(kind="jsonl", path=str(tmp_path / "*.jsonl"))
    config.trainer.resume = str(tmp_path / "step_5")
    config.reward.name = "model"
    config.reward.model_path = str(tmp_path / "judge")
    config.model.path = str(tmp_path / "model")
    keys = [violation.key for violation in check_files(config)]
    assert keys == ["model.path", "data.train.path", "reward.model_path", "trainer.resume"]


def test_sft_from_a_random_model_needs_no_model_folder(config: RunConfig) -> None:
    assert check_sft_files(config) == []
    config.sft.random_model = None
    assert [violation.key for violation in check_sft_files(config)] == ["model.path"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda config: set_key(config, "batching.samples_per_prompt", 1), "samples_per_prompt=1"),
        (lambda config: set_key(config, "rollout.sampling.top_k", 5), "top_k"),
        (
            lambda config: set_key(config, "algorithm.value_loss.clip", 0.2),
            "algorithm.value_loss.clip=0.2 has no effect",
        ),
    ],
)
def test_legal_but_unlikely_settings_get_a_note(
    config: RunConfig, change: Callable[[RunConfig], None], word: str
) -> None:
    assert start_up_notes(config) == []
    change(config)
    (note,) = start_up_notes(config)
    assert word in note


def test_kl_in_reward_and_in_loss_together_get_a_note(config: RunConfig) -> None:
    config.algorithm.kl.in_reward.coef = 0.1
    assert start_up_notes(config) == []
    config.algorithm.kl.in_loss.coef = 0.1
    (note,) = start_up_notes(config)
    assert "twice" in note
