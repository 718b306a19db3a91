"""Which implementation of a layer is built: Megatron's local one on torch attention, or Transformer Engine."""

import functools
import importlib.util
from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from megappo.config.model import LayerSpec
from megappo.config.precision_rules import why_no_transformer_engine
from megappo.device.backend import Backend
from megappo.errors import CapabilityError
from megappo.models.attention import SdpaCoreAttention
from megappo.models.norm import SequenceParallelRMSNorm
from megappo.models.router import Float32Router


def resolve_layer_spec(layer_spec: LayerSpec, backend: Backend) -> LayerSpec:
    """Return `local` or `transformer_engine`; `auto` is the latter on CUDA where it is installed.

    Raises:
        CapabilityError: Transformer Engine was asked for where it cannot run.
    """
    reason = why_no_transformer_engine(on_cuda=backend.kind == "cuda")
    if layer_spec is LayerSpec.transformer_engine and reason is not None:
        raise CapabilityError(
            f"model.layer_spec=transformer_engine: Transformer Engine {reason} "
            "(use model.layer_spec=local, or install transformer-engine[pytorch] on a machine with a GPU)"
        )
    if layer_spec is LayerSpec.auto:
        return LayerSpec.transformer_engine if reason is None else LayerSpec.local
    return layer_spec


def describe_layers(layer_spec: LayerSpec, backend: Backend) -> str:
    """Return what layers a model is built of, and which accelerating packages this process finds, in a few words."""
    reason = why_no_transformer_engine(on_cuda=backend.kind == "cuda")
    engine = "is installed" if reason is None else reason
    # The compiled half of NVIDIA's Apex; PyPI has an unrelated package of that name.
    apex = "is installed" if importlib.util.find_spec("amp_C") is not None else "is not installed"
    return f"{resolve_layer_spec(layer_spec, backend).value} layers; Transformer Engine {engine}; Apex {apex}"


def block_spec(
    config: TransformerConfig, layer_spec: LayerSpec, *, vp_stage: int | None, with_adapters: bool = False
) -> TransformerBlockSubmodules:
    """Return the layers of one model chunk. `layer_spec` must be resolved; adapters are put in afterwards.

    Experts are computed one after the other by the local spec, and by one grouped product by Transformer Engine.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    if layer_spec is LayerSpec.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        specs = {
            experts: get_gpt_layer_with_transformer_engine_spec(
                num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=config.qk_layernorm
            )
            for experts in {_experts_of(config, layer) for layer in layers}
        }
        if with_adapters:
            for spec in specs.values():
                _separate_norms(spec)
        return _block([specs[_experts_of(config, layer)] for layer in layers], TENorm)
    specs = {experts: _local_layer(config, experts) for experts in {_experts_of(config, layer) for layer in layers}}
    return _block([specs[_experts_of(config, layer)] for layer in layers], SequenceParallelRMSNorm)


def _experts_of(config: TransformerConfig, layer: int) -> int | None:
    """Return the number of experts of a layer (global index); None for a dense one."""
    if config.num_moe_experts is None:
        return None
    assert isinstance(config.moe_layer_freq, list)
    return config.num_moe_experts if config.moe_layer_freq[layer] else None


def _separate_norms(layer: ModuleSpec) -> None:
    """Take the norms out of the matrix products of a Transformer Engine layer: an adapter gets a layer's input, which
    must be normalised, and the name tables know the norms in either place."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    submodules = cast(TransformerLayerSubmodules, layer.submodules)
    submodules.input_layernorm = submodules.pre_mlp_layernorm = TENorm
    attention = cast(SelfAttentionSubmodules, cast(ModuleSpec, submodules.self_attention).submodules)
    attention.linear_qkv = TEColumnParallelLinear
    mlp = _mlp_submodules(submodules)
    if isinstance(mlp, MLPSubmodules):  # a layer of experts has its norm outside already
        mlp.linear_fc1 = TEColumnParallelLinear


def _local_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    submodules = cast(TransformerLayerSubmodules, layer.submodules)
    submodules.input_layernorm = SequenceParallelRMSNorm
    submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention = cast(SelfAttentionSubmodules, cast(ModuleSpec, submodules.self_attention).submodules)
    attention.core_attention = SdpaCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = SequenceParallelRMSNorm
        attention.k_layernorm = SequenceParallelRMSNorm
    if num_experts is not None:
        cast(MoESubmodules, _mlp_submodules(submodules)).router = Float32Router
    return layer


def _mlp_submodules(layer: TransformerLayerSubmodules) -> Any:  # Any: of dense layers or of layers of experts
    """Return what the feed-forward part is made of. Megatron-core 0.19 has a partial where 0.16 has a ModuleSpec."""
    mlp: Any = layer.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def _block(layer_specs: list[ModuleSpec], layer_norm: type) -> TransformerBlockSubmodules:
    # Megatron builds the final norm from a class too (transformer/spec_utils.py:81), which its annotation leaves out.
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=cast(ModuleSpec, layer_norm))
