"""The memory check before a run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megappo.cli import memory_check
from megappo.cli.memory_check import check_memory
from megappo.config.run import RunConfig
from megappo.device.backend import CPU, Backend
from megappo.errors import ConfigError
from megappo.planning.cluster import GIB
from megappo.planning.model_presets import MODEL_PRESETS


@dataclass(kw_only=True, frozen=True)
class GpuOf(Backend):
    """A GPU that is not here, by its memory."""

    memory: int

    def device_bytes(self) -> int | None:
        return self.memory


def _gpu(gib: float) -> Backend:
    return GpuOf(kind="cuda", dist_backend="nccl", memory=int(gib * GIB))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_PRESETS["qwen2_5_0_5b"]))
    config = RunConfig()
    config.model.path = str(tmp_path)
    config.algorithm.advantage.name = "grpo"
    config.cluster.pools = {"main": 1}
    return config


def _nothing(text: str) -> None:
    raise AssertionError(text)


def test_a_run_that_cannot_fit_is_refused_with_its_fullest_device(config: RunConfig) -> None:
    # Half a billion parameters in float32: weights, gradients and two moments take 7.4 GiB.
    with pytest.raises(ConfigError) as caught:
        check_memory(config, _gpu(7.0), _nothing)
    text = str(caught.value)
    assert text.startswith(
        "config error: cluster.check_memory=true refuses this run: node 0 device 0 (actor 0, rollout"
    )
    assert "of 7.00 GiB in phase" in text and "raise actor.parallelism.tensor" in text and "`megappo check`" in text


def test_a_cache_that_an_engine_would_make_smaller_is_no_reason(config: RunConfig) -> None:
    config.actor.offload.params = config.actor.offload.grads = config.actor.offload.optimizer = True
    config.rollout.sglang.mem_fraction_static = 0.9
    check_memory(config, _gpu(10.0), _nothing)


def test_an_engine_without_room_for_a_sequence_is_refused(config: RunConfig) -> None:
    config.rollout.sglang.mem_fraction_static = 0.01  # of 80 GiB: less than the weights, 1.8 GiB in float32
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.mem_fraction_static=0\.01 .* holds 0 tokens"):
        check_memory(config, _gpu(80.0), _nothing)


def test_the_check_can_be_switched_off(config: RunConfig) -> None:
    config.cluster.check_memory = False
    check_memory(config, _gpu(1.0), _nothing)


def test_on_a_cpu_it_is_only_said(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory(config, CPU, _nothing)  # 11 GiB; this machine has more
    told: list[str] = []
    tell: Callable[[str], None] = told.append
    small = type("Memory", (), {"total": 4 * GIB})
    monkeypatch.setattr(memory_check.psutil, "virtual_memory", small)
    check_memory(config, CPU, tell)
    assert len(told) == 1 and told[0].endswith("and this machine has 4.00 GiB")
