"""Activation recomputation as Megatron's options."""

from typing import Any

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megappo.config.memory import RecomputeConfig, RecomputeGranularity, RecomputeMethod
from megappo.errors import CapabilityError


def recompute_options(recompute: RecomputeConfig) -> dict[str, Any]:  # Any: values of several fields
    """Return the fields of Megatron's `TransformerConfig`."""
    match recompute.granularity:
        case RecomputeGranularity.none:
            return {}
        case RecomputeGranularity.selective:
            return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
        case RecomputeGranularity.full:
            return {
                "recompute_granularity": "full",
                "recompute_method": recompute.method.value,
                "recompute_num_layers": recompute.num_layers,
            }


def check_recompute(recompute: RecomputeConfig, config: TransformerConfig, *, vp_stage: int | None) -> None:
    """Refuse numbers of layers that do not fit this stage.

    Raises:
        CapabilityError: Megatron would index past the last layer (transformer_block.py:539, uniform) or leave a wish
            for more layers than there are unsaid (block).
    """
    if recompute.granularity is not RecomputeGranularity.full:
        return
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    uniform = recompute.method is RecomputeMethod.uniform
    if layers % recompute.num_layers == 0 if uniform else recompute.num_layers <= layers:
        return
    rule = f"must divide the {layers} layers" if uniform else f"must be at most the {layers} layers"
    raise CapabilityError(
        f"model.recompute.num_layers={recompute.num_layers} {rule} of a pipeline stage with "
        f"model.recompute.method={recompute.method.value} (1 always fits)"
    )
