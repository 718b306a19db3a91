"""Rates of a step's phases, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from megappo.config.lora import LoraConfig
from megappo.config.memory import RecomputeConfig, RecomputeGranularity
from megappo.config.model import Dtype, Fp8Recipe, ModelConfig
from megappo.config.run import RunConfig
from megappo.controller.throughput import ModelThroughput, StepThroughput, make_throughput, matmul_format
from megappo.observability.device_peaks import MatmulFormat
from megappo.observability.flops import ModelFlops, PassSize
from megappo.observability.metrics import values

# Two sequences of 3 and 5 tokens: 2 + 4 inputs, 3 + 10 pairs.
LENGTHS = np.array([3, 5])
LAYERS = 6 * (100 + 200) + 13 * 10
FLOPS = ModelFlops(num_layers=2, projections=100, dense=200, experts=0, per_pair=10, per_prediction=50)
MODEL = ModelThroughput(flops=FLOPS, peak=1e4, num_devices=2, recompute=RecomputeConfig(), chunks=1)


def rates(actor: ModelThroughput, critic: ModelThroughput | None, **seconds: float) -> dict[str, float]:
    step = StepThroughput(actor=actor, critic=critic, num_devices=4)
    found = step.phases(
        LENGTHS,
        response_tokens=5,
        loss_tokens=4,
        log_prob_passes=2,
        epochs=3,
        seconds=lambda phase: seconds.get(phase, 0.0),
    )
    return values(found)


def test_each_phase_has_its_passes_predictions_time_and_devices():
    found = rates(MODEL, replace(MODEL, num_devices=1), log_probs=2.0, values=4.0, update_critic=5.0, update_actor=8.0)
    flops_per_s = {
        "log_probs": 2 * (LAYERS + 5 * 50) / 2.0 / 2,
        "values": (LAYERS + 5 * 50) / 4.0,
        "critic_update": 3 * 3 * (LAYERS + 4 * 50) / 5.0,
        "actor_update": 3 * 3 * (LAYERS + 4 * 50) / 8.0 / 2,
    }
    expected = {f"perf/tflops_per_device/{phase}": rate / 1e12 for phase, rate in flops_per_s.items()}
    expected |= {f"perf/mfu/{phase}": rate / 1e4 for phase, rate in flops_per_s.items()}
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_phase_that_did_not_run_has_no_figures():
    assert set(rates(MODEL, None, update_actor=1.0)) == {"perf/tflops_per_device/actor_update", "perf/mfu/actor_update"}
    step = StepThroughput(actor=MODEL, critic=None, num_devices=2)
    no_passes = step.phases(
        LENGTHS, response_tokens=5, loss_tokens=4, log_prob_passes=0, epochs=1, seconds=lambda _: 1.0
    )
    assert "perf/mfu/log_probs" not in no_passes and "perf/mfu/actor_update" in no_passes


def test_utilisation_is_absent_without_a_known_peak():
    full = RecomputeConfig(granularity=RecomputeGranularity.full)
    assert set(rates(replace(MODEL, peak=None, recompute=full), None, update_actor=1.0)) == {
        "perf/tflops_per_device/actor_update"
    }


def test_recomputed_layers_count_for_the_hardware_only():
    kept, full = (
        rates(replace(MODEL, recompute=RecomputeConfig(granularity=granularity)), None, update_actor=2.0, log_probs=1.0)
        for granularity in (RecomputeGranularity.none, RecomputeGranularity.full)
    )
    hardware = full.pop("perf/hfu/actor_update")
    assert full == kept
    assert hardware == pytest.approx(3 * (4 * LAYERS + 3 * 4 * 50) / 2.0 / 2 / 1e4, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelConfig(), MatmulFormat.float32),
        (ModelConfig(dtype=Dtype.bfloat16), MatmulFormat.bfloat16),
        (ModelConfig(dtype=Dtype.bfloat16, fp8=Fp8Recipe.blockwise), MatmulFormat.float8),
    ],
)
def test_the_format_of_the_layers_decides_the_peak(model: ModelConfig, expected: MatmulFormat):
    assert matmul_format(model) is expected


def test_actor_and_critic_differ_in_head_layout_and_devices():
    config = RunConfig(model=ModelConfig(dtype=Dtype.bfloat16))
    config.actor.parallelism.pipeline, config.actor.parallelism.virtual_pipeline = 2, 3
    model = {
        "num_hidden_layers": 6,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    actor = make_throughput(config, role="actor", model=model, num_devices=4, device_name="NVIDIA H200")
    critic = make_throughput(config, role="critic", model=model, num_devices=2, device_name="cpu")
    assert (actor.flops.per_prediction, critic.flops.per_prediction) == (2 * 8 * 100, 2 * 8)
    assert (actor.chunks, critic.chunks, actor.num_devices, critic.num_devices) == (6, 1, 4, 2)
    assert (actor.peak, critic.peak) == (pytest.approx(989.5e12), None)


def test_frozen_weights_are_not_counted_as_trained():
    config = RunConfig()
    model = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 100,
    }

    def flops() -> ModelFlops:
        return make_throughput(config, role="actor", model=model, num_devices=1, device_name=None).flops

    whole = flops()
    config.actor.lora = LoraConfig(rank=2, targets=["q_proj", "up_proj"])
    size = PassSize(tokens=10, pairs=50, predictions=4)
    adapters = 2 * 2 * 2 * ((8 + 8) + (8 + 16)) * 10  # 2 FLOPs, 2 layers, rank 2
    attention = whole.per_pair * 50
    assert flops().training(size) == 3 * adapters + 3 * attention + 2 * (whole.forward(size) - attention)


def test_utilisation_above_one_is_said_once_a_phase_and_stays_in_the_metrics(caplog: pytest.LogCaptureFixture):
    actor = replace(MODEL, peak=10.0)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert rates(actor, None, log_probs=2.0)["perf/mfu/log_probs"] > 1
        rates(replace(MODEL, peak=1e9), None, log_probs=2.0, update_actor=8.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("perf/mfu/log_probs is ") and "above 1" in record.getMessage()
