"""Which implementation of a layer is built: Megatron's local one on torch attention, or Transformer Engine."""

import importlib.util
from typing import cast

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megappo.config.model import LayerSpec
from megappo.device.backend import Backend
from megappo.errors import CapabilityError
from megappo.models.attention import SdpaCoreAttention
from megappo.models.norm import SequenceParallelRMSNorm


def resolve_layer_spec(layer_spec: LayerSpec, backend: Backend) -> LayerSpec:
    """Return `local` or `transformer_engine`; `auto` is the latter on CUDA where it is installed.

    Raises:
        CapabilityError: Transformer Engine was asked for where it cannot run.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = backend.kind == "cuda" and installed
    if layer_spec is LayerSpec.transformer_engine and not usable:
        reason = "is not installed" if backend.kind == "cuda" else "has CUDA kernels only"
        raise CapabilityError(
            f"model.layer_spec=transformer_engine: Transformer Engine {reason} "
            "(use model.layer_spec=local, or install transformer-engine[pytorch] on a machine with a GPU)"
        )
    if layer_spec is LayerSpec.auto:
        return LayerSpec.transformer_engine if usable else LayerSpec.local
    return layer_spec


def block_spec(config: TransformerConfig, layer_spec: LayerSpec, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of one model chunk. `layer_spec` must be resolved."""
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    if layer_spec is LayerSpec.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return _block([layer] * num_layers, TENorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    submodules = cast(TransformerLayerSubmodules, layer.submodules)
    submodules.input_layernorm = SequenceParallelRMSNorm
    submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention = cast(SelfAttentionSubmodules, cast(ModuleSpec, submodules.self_attention).submodules)
    attention.core_attention = SdpaCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = SequenceParallelRMSNorm
        attention.k_layernorm = SequenceParallelRMSNorm
    return _block([layer] * num_layers, SequenceParallelRMSNorm)


def _block(layer_specs: list[ModuleSpec], layer_norm: type) -> TransformerBlockSubmodules:
    # Megatron builds the final norm from a class too (transformer/spec_utils.py:81), which its annotation leaves out.
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=cast(ModuleSpec, layer_norm))
