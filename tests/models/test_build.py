"""What is built, what is refused, and what the built parameters say of themselves."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec

from megappo.config.model import Dtype, LayerSpec, ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU, CUDA
from megappo.errors import CapabilityError
from megappo.models.architecture import ExpertArchitecture, ModelArchitecture
from megappo.models.build import Head, build_model, transformer_config
from megappo.models.layer_specs import block_spec, describe_layers, resolve_layer_spec
from megappo.models.rope import Rope
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel
from tests.models.model_jobs import call_packed, loaded_model, logits_of

ONE = ParallelismConfig()
SMALL = ModelArchitecture(
    family="qwen2",
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    ffn_hidden_size=48,
    vocab_size=96,
    max_position_embeddings=64,
    rope=Rope(theta=1e4),
    rms_norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tied_embeddings=False,
)
EXPERTS = ExpertArchitecture(num_experts=6, num_active=2, ffn_hidden_size=20, normalize_probs=True, dense_layers=[1])
TENSOR = ParallelismConfig(tensor=2)


def build(layout: ParallelismConfig, architecture: ModelArchitecture = SMALL, head: Head = Head.language_model) -> Any:
    return build_model(architecture, model=ModelConfig(), parallelism=layout, head=head, backend=CPU)


def global_layers(layout: ParallelismConfig, architecture: ModelArchitecture) -> list[list[int]]:
    return [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in build(layout, architecture)]


def partition_marks(layout: ParallelismConfig) -> list[dict[str, tuple[bool, int]]]:
    """Marks of our model and of the same model that Megatron initialises itself."""
    (ours,) = build(layout)
    config = transformer_config(SMALL, parallelism=layout, dtype=Dtype.float32, layer_spec=LayerSpec.local, backend=CPU)
    config.perform_initialization = True
    spec = cast(ModuleSpec, block_spec(config, LayerSpec.local, vp_stage=None))
    theirs = GPTModel(config, spec, vocab_size=96, max_sequence_length=64, position_embedding_type="rope")
    return [
        {
            name: (getattr(parameter, "tensor_model_parallel", False), getattr(parameter, "partition_dim", -1))
            for name, parameter in model.named_parameters()
        }
        for model in (ours, theirs)
    ]


def value_head_of(layout: ParallelismConfig) -> torch.Tensor:
    (chunk,) = build(layout, head=Head.value_function)
    return chunk.output_layer.weight.detach()


def bfloat16_logits(folder: str, layout: ParallelismConfig) -> torch.Tensor:
    (model,) = loaded_model(folder, Head.language_model, layout, Dtype.bfloat16)
    with torch.no_grad():
        return logits_of(model, call_packed(model, [[1, 2, 3, 4], [5, 6]])[0])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelismConfig(pipeline=2), [[[0, 1]], [[2, 3]]]),
        (ParallelismConfig(pipeline=4), [[[0]], [[1]], [[2]], [[3]]]),
        (ParallelismConfig(pipeline=2, virtual_pipeline=2), [[[0], [2]], [[1], [3]]]),
        (ParallelismConfig(pipeline=2, first_stage_layers=1), [[[0]], [[1, 2, 3]]]),
        (ParallelismConfig(pipeline=3, last_stage_layers=2), [[[0]], [[1]], [[2, 3]]]),
        (ParallelismConfig(pipeline=3, embedding_is_layer=True, head_is_layer=True), [[[0]], [[1, 2]], [[3]]]),
        (
            ParallelismConfig(pipeline=2, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=4),
            [[[0], [3]], [[1, 2], [4, 5]]],
        ),
        (
            ParallelismConfig(pipeline=2, virtual_pipeline=2, embedding_is_layer=True, head_is_layer=True),
            [[[0], [3, 4]], [[1, 2], [5]]],
        ),
    ],
)
def test_every_layer_is_built_once_under_its_global_index(
    world: DistWorld, layout: ParallelismConfig, expected: list[list[list[int]]]
) -> None:
    num_layers = sum(len(chunk) for stage in expected for chunk in stage)
    architecture = replace(SMALL, num_layers=num_layers)
    assert world.run(global_layers, parallelism=layout, layout=layout, architecture=architecture) == expected


def test_parameters_are_marked_as_megatron_marks_them(world: DistWorld) -> None:
    """The gradient norm counts marked parameters on all ranks and the others on one."""
    for ours, theirs in world.run(partition_marks, parallelism=TENSOR, layout=TENSOR):
        assert ours == theirs
        assert sum(is_cut for is_cut, _ in ours.values()) == 4 * 5 + 2


def test_a_value_model_has_one_replicated_row_of_zeros_instead_of_the_vocabulary(world: DistWorld) -> None:
    for weight in world.run(value_head_of, parallelism=TENSOR, layout=TENSOR):
        assert torch.equal(weight, torch.zeros(1, 32))


def test_bfloat16_models_compute_in_bfloat16(world: DistWorld, make_model: MakeModel) -> None:
    folder = str(make_model("qwen2"))
    for logits in world.run(bfloat16_logits, parallelism=TENSOR, layout=TENSOR, folder=folder):
        assert logits.dtype is torch.bfloat16 and logits.shape == (6, 48) and bool(logits.isfinite().all())


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (TENSOR, {"num_attention_heads": 3}, r"parallelism\.tensor=2 must divide the 3 attention heads .*\(use 1, 3\)"),
        (TENSOR, {"num_key_value_heads": 1}, r"must divide the 1 key/value heads of the model \(use 1\)"),
        (TENSOR, {"ffn_hidden_size": 49}, "must divide the 49 feed-forward features"),
        (ParallelismConfig(pipeline=2), {"num_layers": 5}, "pipeline=2 must divide model.num_hidden_layers=5"),
        (ParallelismConfig(pipeline=2, virtual_pipeline=4), {}, "virtual_pipeline=4 times 2 stages must divide"),
        (ParallelismConfig(expert=2), {}, "parallelism.expert=2 is for mixtures of experts, and the model is dense"),
        (
            ParallelismConfig(expert=4),
            {"experts": EXPERTS},
            r"expert=4 must divide the 6 experts .*\(use 1, 2, 3 or 6\)",
        ),
        (ParallelismConfig(expert_tensor=3), {"experts": EXPERTS}, "must divide the 20 features of an expert"),
        (TENSOR, {"experts": EXPERTS}, "sequence=False must be true for a mixture of experts"),
        (ParallelismConfig(virtual_pipeline=2), {}, r"virtual_pipeline needs parallelism\.pipeline > 1"),
        (ParallelismConfig(tensor=2, context=4), {}, r"tensor \* context=8 must divide the 4 attention heads"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_what_would(
    layout: ParallelismConfig, change: dict[str, int], message: str
) -> None:
    with pytest.raises(CapabilityError, match=message):
        build(layout, replace(SMALL, **change))


def test_transformer_engine_is_refused_on_cpu_with_the_reason() -> None:
    with pytest.raises(CapabilityError, match=r"has CUDA kernels only.*use model\.layer_spec=local"):
        resolve_layer_spec(LayerSpec.transformer_engine, CPU)
    assert resolve_layer_spec(LayerSpec.auto, CPU) is LayerSpec.local
    said = describe_layers(LayerSpec.auto, CPU)
    assert said == "local layers; Transformer Engine has CUDA kernels only; Apex is not installed"
    assert resolve_layer_spec(LayerSpec.local, CUDA) is LayerSpec.local


def test_transformer_engine_where_it_is_not_installed_is_refused() -> None:
    import importlib.util

    if importlib.util.find_spec("transformer_engine") is not None:
        assert resolve_layer_spec(LayerSpec.auto, CUDA) is LayerSpec.transformer_engine
        return
    assert resolve_layer_spec(LayerSpec.auto, CUDA) is LayerSpec.local
    with pytest.raises(CapabilityError, match="is not installed"):
        resolve_layer_spec(LayerSpec.transformer_engine, CUDA)
