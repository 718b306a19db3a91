"""Rules about optimizer, schedule, precision and recomputation: what each refuses, in words, and what it lets pass."""

import pytest

from megappo.config.cluster import DeviceKind
from megappo.config.memory import RecomputeGranularity, RecomputeMethod
from megappo.config.model import Dtype, Fp8Recipe, LayerSpec
from megappo.config.optim import OptimizerName, ScheduleKind
from megappo.config.rules import check_config, check_device
from megappo.config.run import RunConfig


def messages(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


@pytest.mark.parametrize(
    ("final_decay_steps", "message"),
    [
        (None, "actor.optim.final_decay_steps=None must be given with schedule=wsd, at most decay_steps - warmup"),
        (
            91,
            "actor.optim.final_decay_steps=91 must be given with schedule=wsd, at most decay_steps - warmup_steps = 90",
        ),
    ],
)
def test_wsd_says_how_long_it_falls(config: RunConfig, final_decay_steps: int | None, message: str) -> None:
    optim = config.actor.optim
    optim.schedule, optim.warmup_steps, optim.decay_steps = ScheduleKind.wsd, 10, 100
    optim.final_decay_steps = final_decay_steps
    (found,) = messages(config)
    assert found.startswith(message) and found.endswith("(use 9 for the last tenth)")
    optim.final_decay_steps = 90
    assert messages(config) == []


def test_other_schedules_have_no_final_decay(config: RunConfig) -> None:
    config.actor.optim.final_decay_steps = 10
    (found,) = messages(config)
    assert found.startswith("actor.optim.final_decay_steps=10 has no use with schedule=constant")


def test_settings_of_another_optimizer_are_refused(config: RunConfig) -> None:
    config.actor.optim.momentum = 0.9
    (found,) = messages(config)
    assert found.startswith("actor.optim.momentum=0.9 has no use with name=adam")
    config.actor.optim.name = OptimizerName.sgd
    assert messages(config) == []
    config.actor.optim.distributed = True
    (found,) = messages(config)
    assert found.startswith("actor.optim.distributed=True needs name=adam")


def test_weight_decays_are_not_negative(config: RunConfig) -> None:
    config.actor.optim.weight_decay_of = {"*norm*": 0.0, "lm_head.*": -0.1}
    assert messages(config) == ["actor.optim.weight_decay_of[lm_head.*]=-0.1 must not be negative (use 0 for no decay)"]


@pytest.mark.parametrize(("distributed", "grads"), [(False, False), (True, False), (False, True)])
def test_overlapped_gathering_needs_the_distributed_optimizer_and_buckets(
    config: RunConfig, distributed: bool, grads: bool
) -> None:
    optim = config.actor.optim
    optim.overlap_param_gather, optim.distributed, optim.overlap_grad_reduce = True, distributed, grads
    (found,) = messages(config)
    assert found.startswith("actor.optim.overlap_param_gather=True needs actor.optim.distributed=true and")
    optim.distributed = optim.overlap_grad_reduce = True
    assert messages(config) == []


def test_selective_recomputation_names_modules_that_can_be_recomputed(config: RunConfig) -> None:
    recompute = config.model.recompute
    recompute.modules = ["layernorm"]
    assert messages(config) == []  # not selective: the list is not read
    recompute.granularity = RecomputeGranularity.selective
    (found,) = messages(config)
    assert found == (
        "model.recompute.modules=layernorm is no module that can be recomputed alone "
        "(use core_attn, mlp, moe, or granularity=full)"
    )
    recompute.modules = []
    (found,) = messages(config)
    assert found.startswith("model.recompute.modules=[] must not be empty")


@pytest.mark.parametrize(
    ("method", "num_layers", "stages", "message"),
    [
        (
            RecomputeMethod.uniform,
            3,
            1,
            "must divide the 4 layers of a stage of actor with method=uniform (use 1, 2 or 4)",
        ),
        (RecomputeMethod.block, 3, 2, "must be at most the 2 layers of a stage of actor (use 1 or 2)"),
        (RecomputeMethod.block, 3, 1, None),
        (RecomputeMethod.uniform, 2, 2, None),
    ],
)
def test_full_recomputation_fits_the_layers_of_a_stage(
    config: RunConfig, method: RecomputeMethod, num_layers: int, stages: int, message: str | None
) -> None:
    recompute = config.model.recompute
    recompute.granularity, recompute.method = RecomputeGranularity.full, method
    recompute.num_layers, config.actor.parallelism.pipeline = num_layers, stages
    expected = [] if message is None else [f"model.recompute.num_layers={num_layers} {message}"]
    assert messages(config) == expected


def test_fp8_needs_a_gpu_transformer_engine_and_16_bit_parameters(config: RunConfig) -> None:
    model = config.model
    model.fp8, model.dtype, model.layer_spec = Fp8Recipe.mxfp8, Dtype.bfloat16, LayerSpec.auto
    config.cluster.device = DeviceKind.auto
    assert check_config(config) == []
    config.cluster.device = DeviceKind.cpu  # what auto has turned out to be
    (found,) = check_device(config)
    assert str(found) == "model.fp8=mxfp8 needs a GPU: fp8 matrix products are CUDA kernels (set model.fp8=null)"
    config.cluster.device, model.layer_spec, model.dtype = DeviceKind.auto, LayerSpec.local, Dtype.float32
    assert [message.partition(" (")[0] for message in messages(config)] == [
        "model.fp8=mxfp8 needs the layers of Transformer Engine",
        "model.fp8=mxfp8 needs 16-bit parameters, not model.dtype=float32",
    ]
