"""Fp8 as Megatron's options, and what it asks of inputs and devices."""

import importlib
from typing import Any

from megappo.config.model import Fp8Recipe, LayerSpec
from megappo.config.precision_rules import features_of_rank, fp8_violations
from megappo.errors import CapabilityError
from megappo.models.architecture import ModelArchitecture

_FORMATS = {Fp8Recipe.delayed: "hybrid", Fp8Recipe.blockwise: "e4m3", Fp8Recipe.mxfp8: "e4m3"}
_TOKENS = {Fp8Recipe.delayed: 16, Fp8Recipe.blockwise: 128, Fp8Recipe.mxfp8: 32}


def fp8_options(recipe: Fp8Recipe | None) -> dict[str, Any]:  # Any: values of several fields
    """Return the fields of Megatron's `TransformerConfig`.

    Per-tensor scales need the range of e5m2 for gradients (hybrid); block scales do without. The history of `delayed`
    is Transformer Engine's default; Megatron's, one step, follows outliers too closely.
    """
    if recipe is None:
        return {}
    options: dict[str, Any] = {"fp8": _FORMATS[recipe], "fp8_recipe": recipe.value}
    if recipe is Fp8Recipe.delayed:
        options |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    return options


def fp8_token_multiple(recipe: Fp8Recipe | None) -> int:
    """Return what the number of tokens of a rank must be a multiple of.

    Transformer Engine multiplies in fp8 when tokens and features are multiples of 16 (utils.py, assert_dim_for_fp8_exec
    asks 8 and 16), and gathers quantized activations only in whole blocks: 128 and 32 tokens (`is_quantizable` of
    tensor/float8_blockwise_tensor.py and tensor/mxfp8_tensor.py).
    """
    return 1 if recipe is None else _TOKENS[recipe]


def check_fp8(recipe: Fp8Recipe | None, architecture: ModelArchitecture, spec: LayerSpec, *, tensor: int) -> None:
    """Refuse fp8 for layers, sizes and devices that cannot have it. `spec` must be resolved.

    Raises:
        CapabilityError: the layers are not Transformer Engine's, a matrix is no whole number of blocks, or the GPU or
            its CUDA version does not suit the recipe (then in Transformer Engine's words).
    """
    if recipe is None:
        return
    if spec is not LayerSpec.transformer_engine:
        raise CapabilityError(
            f"model.fp8={recipe.value} needs the layers of Transformer Engine, on a GPU "
            "(set model.fp8=null, or install transformer-engine[pytorch] on a machine with a GPU)"
        )
    sizes = features_of_rank(
        tensor=tensor,
        hidden_size=architecture.hidden_size,
        queries=architecture.num_attention_heads * architecture.head_dim,
        keys=architecture.num_key_value_heads * architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size if architecture.has_dense_layers else None,
    )
    if violations := fp8_violations(recipe, sizes, key="parallelism.tensor", tensor=tensor):
        raise CapabilityError(str(violations[0]))
    _check_device(recipe)


def _check_device(recipe: Fp8Recipe) -> None:
    fp8: Any = importlib.import_module("transformer_engine.pytorch.fp8")  # Any: installed on machines with a GPU only
    checks = {
        Fp8Recipe.delayed: fp8.check_fp8_support,
        Fp8Recipe.blockwise: fp8.check_fp8_block_scaling_support,
        Fp8Recipe.mxfp8: fp8.check_mxfp8_support,
    }
    supported, reason = checks[recipe]()
    if not supported:
        raise CapabilityError(f"model.fp8={recipe.value}: {reason} (use another recipe, or model.fp8=null)")
