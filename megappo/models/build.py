"""Builds the Megatron model chunks of this rank.

What a chunk returns for a packed micro-batch of T tokens, called as
`chunk(tokens [1, T], positions [1, T], None, packed_seq_params=pack_lengths(...))`:

- not the last stage: hidden states [T, 1, hidden] ([T / tensor, 1, hidden] under sequence parallelism);
- last stage, head `language_model`: hidden states [1, T, hidden] in the model's dtype, all T tokens on every rank. The
  logits are their product with `chunk.output_weight` [vocab / tensor, hidden] (see `megappo.train.log_probs`), this
  rank's slice of the vocabulary: rank r holds ids r * vocab / tensor up to (r + 1) * vocab / tensor. A vocabulary
  that `tensor` does not divide is padded up to one (`ModelArchitecture.padded_vocab_size`): the weight of the last
  ranks ends with rows that mean nothing;
- last stage, head `value_function`: values [1, T] float32, equal on all tensor-parallel ranks.

Under sequence parallelism T must be divisible by the tensor-parallel size. Under pipeline parallelism micro-batches
may differ in T, unless there are virtual stages: then all must be equal (and schedules are told so by `seq_length`).
"""

from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megappo.config.expert_rules import ExpertShape, expert_violations
from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype, LayerSpec, ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import pipeline_violations
from megappo.device.backend import Backend
from megappo.errors import CapabilityError
from megappo.models.architecture import ModelArchitecture
from megappo.models.gpt import LanguageModel, ValueModel
from megappo.models.layer_specs import block_spec, resolve_layer_spec
from megappo.models.lora import add_adapters
from megappo.models.parameters import mapped_parameters
from megappo.models.precision import check_fp8, fp8_options
from megappo.models.recompute import check_recompute, recompute_options
from megappo.models.rope import YarnScaling
from megappo.models.rope_frequencies import compute_frequencies
from megappo.weights.name_map import Partition


class Head(Enum):
    """What the model computes from its last hidden states."""

    language_model = "language_model"
    value_function = "value_function"


TORCH_DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def build_model(
    architecture: ModelArchitecture,
    *,
    model: ModelConfig,
    parallelism: ParallelismConfig,
    head: Head,
    backend: Backend,
    lora: LoraConfig | None = None,
    seed: int = 0,
    on_meta: bool = False,
) -> list[LanguageModel]:
    """Build this rank's model chunks, one per virtual pipeline stage. Weights are not set: load them next.

    `init_distributed` and `init_model_parallel` must have been called, the latter with the same parallelism.

    Args:
        model: precision, layer spec and recomputation; `path` is not looked at.
        lora: adapters, whose first values follow from `seed`; None: all weights are trained.
        on_meta: give the weights names and shapes but no memory (torch's meta device), for tools that look only. The
            back end must be CPU: on CUDA Megatron names the device itself.

    Raises:
        CapabilityError: the layout does not fit the architecture, or the layer spec cannot run here.
    """
    spec = resolve_layer_spec(model.layer_spec, backend)
    _check_layout(architecture, parallelism, spec)
    check_fp8(model.fp8, architecture, spec, tensor=parallelism.tensor)
    config = transformer_config(
        architecture,
        parallelism=parallelism,
        dtype=model.dtype,
        layer_spec=spec,
        backend=backend,
        options=fp8_options(model.fp8) | recompute_options(model.recompute),
    )
    stages = range(parallelism.virtual_pipeline) if parallelism.virtual_pipeline else [None]
    for stage in stages:
        check_recompute(model.recompute, config, vp_stage=stage)
    model_class = ValueModel if head is Head.value_function else LanguageModel
    with torch.device("meta") if on_meta else nullcontext():
        chunks = [
            model_class(
                config,
                block_spec(config, spec, vp_stage=stage, with_adapters=lora is not None),
                architecture,
                vp_stage=stage,
            )
            for stage in stages
        ]
    _set_frequencies(chunks, architecture)
    _mark_partitions(chunks)
    if lora is not None:
        add_adapters(chunks, lora, seed=seed)
    if on_meta:
        return chunks
    device = torch.device("cuda", torch.cuda.current_device()) if backend.kind == "cuda" else backend.device()
    return [chunk.to(device) for chunk in chunks]


def transformer_config(
    architecture: ModelArchitecture,
    *,
    parallelism: ParallelismConfig,
    dtype: Dtype,
    layer_spec: LayerSpec,
    backend: Backend,
    options: dict[str, Any] | None = None,  # Any: values of several fields
) -> TransformerConfig:
    """Return Megatron's configuration of the model. `layer_spec` must be resolved; `options` are fields of it."""
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
        **{
            **_position_options(architecture),
            **_expert_options(architecture, parallelism, layer_spec),
            **_stage_options(parallelism),
            **_pipeline_options(parallelism),
            **(options or {}),
        },
    )


def _position_options(architecture: ModelArchitecture) -> dict[str, Any]:  # Any: as in _pipeline_options
    """Scale the scores where rotated queries and keys are scaled, each by the same factor."""
    if not isinstance(architecture.rope.scaling, YarnScaling):
        return {}
    return {"softmax_scale": architecture.head_dim**-0.5 * architecture.rope.scaling.attention_factor**2}


def _expert_options(
    architecture: ModelArchitecture, parallelism: ParallelismConfig, layer_spec: LayerSpec
) -> dict[str, Any]:  # Any: as in _pipeline_options
    """The mixture of experts. No auxiliary loss and no token dropping: log-probs of a token depend on nothing else."""
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(architecture.num_layers)],
        "moe_router_topk": experts.num_active,
        # A softmax over the chosen experts is one over all, scaled to sum to 1 on the chosen.
        "moe_router_pre_softmax": not experts.normalize_probs,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": layer_spec is LayerSpec.transformer_engine,
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": parallelism.expert_tensor,
    }


def _stage_options(parallelism: ParallelismConfig) -> dict[str, Any]:  # Any: as in _pipeline_options
    """Which stage holds how many layers."""
    last = parallelism.last_stage_layers
    if parallelism.pipeline == 2 and parallelism.first_stage_layers is not None:
        # The last stage has the rest. Told so, Megatron divides by its 0 middle stages where there are virtual ones
        # (transformer/transformer_layer.py:137).
        last = None
    return {
        "num_layers_in_first_pipeline_stage": parallelism.first_stage_layers,
        "num_layers_in_last_pipeline_stage": last,
        "account_for_embedding_in_pipeline_split": parallelism.embedding_is_layer,
        "account_for_loss_in_pipeline_split": parallelism.head_is_layer,
    }


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
    violations = pipeline_violations(parallelism, architecture.num_layers, key="parallelism")
    violations += expert_violations(parallelism, _expert_shape(architecture), key="parallelism")
    if violations:
        raise CapabilityError(str(violations[0]))
    divisible = [
        ("tensor", parallelism.tensor, "attention heads", architecture.num_attention_heads),
        ("tensor", parallelism.tensor, "key/value heads", architecture.num_key_value_heads),
    ]
    if layer_spec is LayerSpec.local:  # which splits the heads, too (models/context.py)
        size = parallelism.tensor * parallelism.context
        divisible.append(("tensor * context", size, "attention heads", architecture.num_attention_heads))
    if architecture.has_dense_layers:
        divisible.append(("tensor", parallelism.tensor, "feed-forward features", architecture.ffn_hidden_size))
    for key, size, what, count in divisible:
        if count % size:
            fitting = ", ".join(str(number) for number in range(1, min(count, 64) + 1) if count % number == 0)
            raise CapabilityError(
                f"parallelism.{key}={size} must divide the {count} {what} of the model (use {fitting})"
            )
    if parallelism.virtual_pipeline and parallelism.pipeline == 1:
        raise CapabilityError("parallelism.virtual_pipeline needs parallelism.pipeline > 1 (leave it out)")


def _expert_shape(architecture: ModelArchitecture) -> ExpertShape | None:
    experts = architecture.experts
    return experts and ExpertShape(num_experts=experts.num_experts, ffn_hidden_size=experts.ffn_hidden_size)


def _set_frequencies(chunks: list[LanguageModel], architecture: ModelArchitecture) -> None:
    """Replace Megatron's rotary frequencies, which know one kind of scaling with fixed numbers
    (rotary_pos_embedding.py:101)."""
    for chunk in chunks:
        chunk.rotary_pos_emb.inv_freq = compute_frequencies(architecture.rope, architecture.head_dim)


def _mark_partitions(chunks: list[LanguageModel]) -> None:
    """Say of every parameter whether it is a tensor-parallel shard, and which are of experts.

    Megatron does the first when it initialises weights (tensor_parallel/layers.py:150), which `perform_initialization`
    switches off; without the mark only rank 0's shard counts in the gradient norm. It does the second under expert
    parallelism only (layers.py:886); without it experts that every tensor-parallel rank holds whole would miss the
    gradient of the tokens on the other ranks.
    """
    for chunk in chunks:
        for parameter, mapped in mapped_parameters(chunk):
            if mapped.expert is not None:
                parameter.allreduce = False  # type: ignore[attr-defined]
            if mapped.partition is not Partition.replicated:
                dim = 0 if mapped.partition is Partition.column else 1
                if not hasattr(parameter, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)
