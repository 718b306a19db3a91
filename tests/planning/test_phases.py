"""Who is in memory when, with parts whose sizes tell them apart; and what is said of devices that are too small."""

import pytest

from megappo.config.memory import OffloadConfig
from megappo.config.model import Dtype
from megappo.config.model_shape import ModelShape
from megappo.config.rollout import RolloutConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.planning.cluster import ClusterDescription
from megappo.planning.engine_memory import engine_memory
from megappo.planning.memory import plan_memory
from megappo.planning.phases import Phase, PhaseMemory, RunMemory
from megappo.planning.placement import place
from megappo.planning.training_memory import RankMemory

ACTOR = RankMemory(
    weights=1, gradients=10, master_weights=100, moments=1000, largest_parameter=3, plain_weights=1, saved=7
)
CRITIC = RankMemory(weights=20_000, gradients=200_000, master_weights=0, moments=2_000_000, saved=9)
ENGINE_WEIGHTS, CACHE = 30_000_000, 10 * 256
SHAPE = ModelShape(
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=4,
    hidden_size=64,
    head_dim=8,
    max_position_embeddings=100,
)
ALL = OffloadConfig(params=True, grads=True, optimizer=True)


def _config(*, is_split: bool = False, offload: OffloadConfig | None = None, with_critic: bool = False) -> RunConfig:
    config = RunConfig()
    config.cluster.pools = {"main": 1, "engines": 1}
    config.cluster.rollout = "engines" if is_split else "main"
    config.actor.offload = config.critic.offload = offload or OffloadConfig()
    config.algorithm.advantage.name = "gae" if with_critic else "grpo"
    config.algorithm.kl.in_loss.coef = config.algorithm.kl.in_reward.coef = 0.0
    return config


def _run(config: RunConfig, *, is_cuda: bool = True) -> RunMemory:
    rollout = RolloutConfig()
    rollout.sglang.max_total_tokens = 10
    engine = engine_memory(
        rollout,
        SHAPE,
        dtype=Dtype.bfloat16,
        weights=ENGINE_WEIGHTS,
        device_bytes=None,
        is_cuda=is_cuda,
        longest=10,
    )
    return RunMemory(
        config=config,
        is_cuda=is_cuda,
        trainers={"actor": [ACTOR], "critic": [CRITIC]},
        engine=engine,
        trainer_buckets={0: 4},
        engine_buckets=5,
    )


def _phases(config: RunConfig, *, is_cuda: bool = True, device: int = 0) -> dict[Phase, PhaseMemory]:
    cluster = ClusterDescription(nodes=1, devices_per_node=2, device="h100")
    # Pools are placed by name: engines, then main.
    devices = place(config, cluster).devices
    return {phase.phase: phase for phase in _run(config, is_cuda=is_cuda).on_device(devices[device])}


def test_engines_and_trainer_take_turns_and_what_is_named_leaves() -> None:
    found = _phases(_config(offload=ALL))
    totals = {phase: memory.total for phase, memory in found.items()}
    engine = ENGINE_WEIGHTS + CACHE
    assert totals == {
        Phase.start: 1 + 10 + 100 + engine,
        Phase.generate: engine,
        Phase.log_probs: 1,
        Phase.update_actor: 1111,
        Phase.hand_over: 1 + 4 + ENGINE_WEIGHTS + 5,
    }
    # Gradients are freed, not kept.
    assert found[Phase.generate].host_total == 1 + 100 + 1000
    assert found[Phase.log_probs].host_total == 1100
    assert found[Phase.update_actor].host_total == 0


def test_without_offload_all_of_a_trainer_stays() -> None:
    totals = {phase: memory.total for phase, memory in _phases(_config()).items()}
    assert totals[Phase.generate] == 1111 + ENGINE_WEIGHTS + CACHE
    assert totals[Phase.log_probs] == totals[Phase.update_actor] == 1111


def test_on_a_cpu_engines_do_not_sleep() -> None:
    totals = {phase: memory.total for phase, memory in _phases(_config(), is_cuda=False).items()}
    assert totals[Phase.update_actor] == 1111 + ENGINE_WEIGHTS + CACHE


def test_on_devices_of_their_own_neither_side_makes_room() -> None:
    for kind in ControllerKind:
        config = _config(is_split=True, offload=ALL)
        config.controller = kind
        engines, trainer = _phases(config, device=0), _phases(config, device=1)
        assert {memory.total for phase, memory in engines.items() if phase is not Phase.hand_over} == {
            ENGINE_WEIGHTS + CACHE
        }
        assert engines[Phase.hand_over].total == ENGINE_WEIGHTS + CACHE + 5
        assert trainer[Phase.generate].total == trainer[Phase.log_probs].total == 1111
        assert trainer[Phase.hand_over].total == 1111 + 4


def test_actor_and_critic_give_each_other_their_place() -> None:
    config = _config(offload=ALL, with_critic=True)
    totals = {phase: memory.total for phase, memory in _phases(config).items()}
    assert totals[Phase.log_probs] == 1
    assert totals[Phase.values] == 20_000
    assert totals[Phase.update_critic] == 2_220_000
    assert totals[Phase.update_actor] == 1111


def test_a_save_has_all_models_in_place_and_copies_on_the_host() -> None:
    config = _config(offload=ALL, with_critic=True)
    config.trainer.save_freq = 5
    found = _phases(config)
    assert found[Phase.save].total == 1111 + 2_220_000
    assert found[Phase.save].host_total == 7 + 9
    # Nobody sends the critic away after a save when engines have devices of their own.
    config.cluster.rollout = "engines"
    assert _phases(config, device=1)[Phase.log_probs].total == 1111 + 2_220_000


def test_a_reference_is_kept_on_the_host_and_swapped_in_by_parts() -> None:
    config = _config(is_split=True)
    config.algorithm.kl.in_loss.coef = 0.1
    found = _phases(config, device=1)
    assert found[Phase.log_probs].total == 1111 + 3
    assert all(memory.host_total == 1 for memory in found.values())


def _verdict(config: RunConfig, device_bytes: int | None) -> tuple[str, list[str]]:
    placement = place(config, ClusterDescription(nodes=1, devices_per_node=2, device="h100"))
    plan = plan_memory(_run(config), placement, device_bytes)
    return plan.verdict, [*plan.levers]


@pytest.mark.parametrize(
    ("share", "verdict"), [(None, "unknown"), (2.0, "fits"), (1.05, "tight"), (0.99, "does not fit")]
)
def test_the_fullest_device_decides(share: float | None, verdict: str) -> None:
    needed = ENGINE_WEIGHTS + CACHE + 1111
    found, levers = _verdict(_config(), None if share is None else int(needed * share))
    assert found == verdict
    assert bool(levers) is (verdict in ("tight", "does not fit"))


def test_levers_name_what_is_largest_first_and_only_what_is_not_set() -> None:
    _, levers = _verdict(_config(), 1000)
    assert levers[0].startswith("raise rollout.tensor")
    assert "set actor.offload.optimizer=true: it leaves the device in this phase" in levers
    assert not any("offload" in lever for lever in _verdict(_config(offload=ALL), 1000)[1])
