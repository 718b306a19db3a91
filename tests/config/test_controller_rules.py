"""The order of the loop and the placement: what the choices set, and what is refused or noted."""

import pytest

from megappo.config.algorithm import CorrectionLevel, CorrectionMode, CorrectionWeightConfig, OldLogProbs
from megappo.config.cluster import DeviceKind
from megappo.config.controller_rules import controller_notes, engines_beside_training_have_devices_of_their_own
from megappo.config.rules import check_device
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.config.trainer import ControllerKind
from megappo.errors import ConfigError


def load(*overrides: str) -> RunConfig:
    return load_run_config(["experiment=quickstart", *overrides])


def test_one_step_off_corrects_unless_told_otherwise() -> None:
    config = load("controller=one_step_off")
    assert config.controller is ControllerKind.one_step_off
    assert config.algorithm.correction.weight == CorrectionWeightConfig(
        level=CorrectionLevel.token, mode=CorrectionMode.truncate, high=2.0
    )
    assert config.algorithm.old_log_probs is OldLogProbs.recompute
    assert load("controller=one_step_off", "algorithm.correction.weight=null").algorithm.correction.weight is None
    assert load().algorithm.correction.weight is None


def test_split_placement_gives_the_engines_devices_of_their_own() -> None:
    config = load("placement=split", "rollout.num_engines=2")
    assert config.cluster.pools == {"training": 2, "engines": 2}
    assert (config.cluster.actor, config.cluster.critic) == ("training", "training")
    assert (config.cluster.rollout, config.cluster.reward) == ("engines", "engines")
    assert load().cluster.pools == {"main": 2}
    assert load("cluster=gpu").cluster.rollout == "engines"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["placement=split", "rollout.num_engines=2", "cluster.pools.engines=1"],
            "rollout.num_engines=2 times rollout.tensor 1 is more than the 1 devices of pool 'engines' (use fewer "
            "engines, or set cluster.pools.engines=2)",
        ),
        (
            ["placement=split", "cluster.pools.training=1"],
            "actor.parallelism=2 (tensor 2 * pipeline 1 * context 1 ranks) is more than the 1 devices of pool "
            "'training' (make the product one of 1, or change cluster.pools.training)",
        ),
        (
            ["cluster=gpu", "placement=colocated", "controller=one_step_off", "weight_sync.transport=disk"],
            "controller=one_step_off lets engines sample while models train, and both are on the GPUs of pool 'main' "
            "(add placement=split, or use controller=synchronous)",
        ),
        (
            ["algorithm=remax", "rollout.partial.extra_prompts=4"],
            "rollout.partial.extra_prompts=4 cannot be used with algorithm.advantage.name=remax: engines stop when "
            "enough groups are complete, whether or not the greedy answers to their prompts are (leave it out, or use "
            "an advantage without greedy answers, such as rloo)",
        ),
        (
            ["rollout.partial.extra_prompts=-1"],
            "rollout.partial.extra_prompts=-1 must not be negative (use 0 or more)",
        ),
        (
            ["controller=one_step_off", "algorithm.old_log_probs=rollout"],
            "algorithm.old_log_probs=rollout leaves nothing to correct: old and rollout log-probs are the same numbers "
            "(use recompute, or leave correction out)",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*overrides)
    assert [str(violation) for violation in refused.value.violations] == [message]


def test_the_device_that_auto_stands_for_is_held_against_the_order(config: RunConfig) -> None:
    config.controller = ControllerKind.one_step_off
    assert engines_beside_training_have_devices_of_their_own(config) == []
    config.cluster.device = DeviceKind.cuda
    assert "controller" in [violation.key for violation in check_device(config)]
    config.cluster.pools["engines"], config.cluster.rollout = 1, "engines"
    assert "controller" not in [violation.key for violation in check_device(config)]


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["controller=one_step_off"], []),
        (["controller=one_step_off", "algorithm.correction.weight=null"], ["controller=one_step_off"]),
        (["rollout.partial.extra_prompts=4"], ["rollout.partial"]),
        (["rollout.partial.extra_prompts=4", "algorithm=decoupled_ppo"], []),
        (["rollout.partial.extra_prompts=4", "algorithm.old_log_probs=rollout"], []),
        # Without over-sampling no group waits for a step that comes after an update.
        (["algorithm=dapo", "batching.samples_per_prompt=4"], []),
        (
            ["algorithm=dapo", "batching.samples_per_prompt=4", "algorithm.sampling.oversample=1.5"],
            ["algorithm.sampling.oversample=1.5"],
        ),
        (
            [
                "algorithm=dapo",
                "batching.samples_per_prompt=4",
                "algorithm.sampling.oversample=1.5",
                "algorithm.correction.weight.high=2.0",
            ],
            [],
        ),
    ],
)
def test_stale_rollouts_without_correction_are_noted(overrides: list[str], noted: list[str]) -> None:
    notes = controller_notes(load(*overrides))
    assert [note.split(":")[0] for note in notes] == noted


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["algorithm=gpg", "batching.ppo_epochs=1", "batching.mini_batch_prompts=null"], []),
        (["algorithm=gpg", "batching.ppo_epochs=2"], ["algorithm.policy_loss.name=gpg"]),
        (
            ["algorithm=opo", "batching.prompts_per_step=8", "batching.mini_batch_prompts=4"],
            ["algorithm.advantage.name=opo"],
        ),
        (["algorithm=rloo", "batching.ppo_epochs=2"], []),
    ],
)
def test_on_policy_methods_with_several_steps_are_noted(overrides: list[str], noted: list[str]) -> None:
    notes = controller_notes(load(*overrides, "batching.samples_per_prompt=4"))
    assert [note.split(" ")[0] for note in notes] == noted
