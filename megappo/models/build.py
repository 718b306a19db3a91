"""Builds the Megatron model chunks of this rank.

What a chunk returns for a packed micro-batch of T tokens, called as
`chunk(tokens [1, T], positions [1, T], None, packed_seq_params=pack_lengths(...))`:

- not the last stage: hidden states [T, 1, hidden] ([T / tensor, 1, hidden] under sequence parallelism);
- last stage, head `language_model`: logits [1, T, vocab / tensor] in the model's dtype, this rank's slice of the
  vocabulary (rank r holds ids r * vocab / tensor up to (r + 1) * vocab / tensor), all T tokens on every rank;
- last stage, head `value_function`: values [1, T] float32, equal on all tensor-parallel ranks.

Under sequence parallelism T must be divisible by the tensor-parallel size. Under pipeline parallelism micro-batches
may differ in T, unless there are virtual stages: then all must be equal (and schedules are told so by `seq_length`).
"""

from enum import Enum
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megappo.config.model import Dtype, LayerSpec
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import Backend
from megappo.errors import CapabilityError
from megappo.models.architecture import ModelArchitecture
from megappo.models.gpt import LanguageModel, ValueModel
from megappo.models.layer_specs import block_spec, resolve_layer_spec
from megappo.models.parameters import mapped_parameters
from megappo.weights.name_map import Partition


class Head(Enum):
    """What the model computes from its last hidden states."""

    language_model = "language_model"
    value_function = "value_function"


TORCH_DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def build_model(
    architecture: ModelArchitecture,
    *,
    parallelism: ParallelismConfig,
    dtype: Dtype,
    layer_spec: LayerSpec,
    head: Head,
    backend: Backend,
) -> list[LanguageModel]:
    """Build this rank's model chunks, one per virtual pipeline stage. Weights are not set: load them next.

    `init_distributed` and `init_model_parallel` must have been called, the latter with the same parallelism.

    Raises:
        CapabilityError: the layout does not fit the architecture, or the layer spec cannot run here.
    """
    spec = resolve_layer_spec(layer_spec, backend)
    _check_layout(architecture, parallelism, spec)
    config = transformer_config(architecture, parallelism=parallelism, dtype=dtype, layer_spec=spec, backend=backend)
    stages = range(parallelism.virtual_pipeline) if parallelism.virtual_pipeline else [None]
    model_class = ValueModel if head is Head.value_function else LanguageModel
    chunks = [
        model_class(config, block_spec(config, spec, vp_stage=stage), architecture, vp_stage=stage) for stage in stages
    ]
    _mark_partitions(chunks)
    device = torch.device("cuda", torch.cuda.current_device()) if backend.kind == "cuda" else backend.device()
    return [chunk.to(device) for chunk in chunks]


def transformer_config(
    architecture: ModelArchitecture,
    *,
    parallelism: ParallelismConfig,
    dtype: Dtype,
    layer_spec: LayerSpec,
    backend: Backend,
) -> TransformerConfig:
    """Return Megatron's configuration of the model. `layer_spec` must be resolved."""
    torch_dtype = TORCH_DTYPES[dtype]
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=dtype is Dtype.bfloat16,
        params_dtype=torch_dtype,
        pipeline_dtype=torch_dtype,
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=parallelism.virtual_pipeline,
        context_parallel_size=parallelism.context,
        sequence_parallel=parallelism.sequence and parallelism.tensor > 1,
        # Weights are always loaded; initialising would make every whole matrix on every rank.
        perform_initialization=False,
        use_cpu_initialization=backend.kind == "cpu",
        # Fused kernels are CUDA code; this one is part of apex.
        gradient_accumulation_fusion=False,
        apply_rope_fusion=layer_spec is LayerSpec.transformer_engine,
        bias_activation_fusion=backend.kind == "cuda",
        bias_dropout_fusion=backend.kind == "cuda",
        masked_softmax_fusion=False,
        batch_p2p_sync=backend.kind == "cuda",
        **_pipeline_options(parallelism),
    )


def _pipeline_options(parallelism: ParallelismConfig) -> dict[str, Any]:  # Any: values of several fields
    """How stages talk to each other."""
    if parallelism.virtual_pipeline:
        # With two stages the previous and the next stage are one process: batched sends and receives over gloo then
        # match in the wrong order and swap activations silently (pipeline_parallel/p2p_communication.py:16).
        return {"batch_p2p_comm": False, "overlap_p2p_comm": True}
    if parallelism.pipeline > 1:
        # Shapes travel first, so that micro-batches may differ in tokens; asked for with this dispatcher even in
        # dense models (transformer/transformer_config.py:1827).
        return {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    return {}


def _check_layout(architecture: ModelArchitecture, parallelism: ParallelismConfig, layer_spec: LayerSpec) -> None:
    """Refuse what Megatron would assert, truncate or replicate."""
    chunks = parallelism.pipeline * (parallelism.virtual_pipeline or 1)
    divisible = [
        ("tensor", parallelism.tensor, "attention heads", architecture.num_attention_heads),
        ("tensor", parallelism.tensor, "key/value heads", architecture.num_key_value_heads),
        ("tensor", parallelism.tensor, "feed-forward features", architecture.ffn_hidden_size),
        ("tensor", parallelism.tensor, "vocabulary rows", architecture.vocab_size),
        ("pipeline * virtual_pipeline", chunks, "layers", architecture.num_layers),
    ]
    for key, size, what, count in divisible:
        if count % size:
            fitting = ", ".join(str(number) for number in range(1, min(count, 64) + 1) if count % number == 0)
            raise CapabilityError(
                f"parallelism.{key}={size} must divide the {count} {what} of the model (use {fitting})"
            )
    if parallelism.context > 1 and layer_spec is LayerSpec.local:
        raise CapabilityError(
            f"parallelism.context={parallelism.context} is not supported by the local layer spec "
            "(use 1, or model.layer_spec=transformer_engine on CUDA)"
        )
    if parallelism.expert > 1 or parallelism.expert_tensor > 1:
        raise CapabilityError(
            f"parallelism.expert is for mixture-of-experts models; {architecture.family} is dense (use 1)"
        )
    if parallelism.virtual_pipeline and parallelism.pipeline == 1:
        raise CapabilityError("parallelism.virtual_pipeline needs parallelism.pipeline > 1 (leave it out)")


def _mark_partitions(chunks: list[LanguageModel]) -> None:
    """Say of every parameter whether it is a tensor-parallel shard.

    Megatron does so when it initialises weights (tensor_parallel/layers.py:150), which `perform_initialization`
    switches off; without the mark only rank 0's shard counts in the gradient norm.
    """
    for chunk in chunks:
        for parameter, mapped in mapped_parameters(chunk):
            if mapped.partition is not Partition.replicated:
                dim = 0 if mapped.partition is Partition.column else 1
                if not hasattr(parameter, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)
