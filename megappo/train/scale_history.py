"""The largest values of past steps, from which layers of Transformer Engine take their scales with `model.fp8=delayed`.

Each layer keeps them outside of parameters and buffers, as what torch calls extra state (`get_extra_state` of
transformer_engine/pytorch/module/base.py: scales and histories, forward and backward, as bytes on the host). Without
them a resumed run would multiply with a scale of 1 until the histories have filled again. The other recipes take scales
from the numbers at hand and keep nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

Histories = dict[str, Any]
"""Number of the chunk and name of the layer -> its state (Any: the layer's own business)."""


def scale_histories(chunks: Sequence[MegatronModule]) -> Histories:
    """Return the state of all layers of this rank that have some."""
    return {
        name: state
        for name, layer in _layers_with_state(chunks).items()
        # No state yet: None of Megatron's layers, an empty tensor of Transformer Engine's.
        if (state := layer.get_extra_state()) is not None and not (isinstance(state, torch.Tensor) and not len(state))
    }


def restore_scale_histories(chunks: Sequence[MegatronModule], histories: Histories) -> None:
    """Go on as the same rank did that returned `histories`."""
    layers = _layers_with_state(chunks)
    for name, state in histories.items():
        layers[name].set_extra_state(state)


def _layers_with_state(chunks: Sequence[MegatronModule]) -> dict[str, torch.nn.Module]:
    return {
        f"{number}.{name}": layer
        for number, chunk in enumerate(chunks)
        for name, layer in chunk.named_modules()
        if type(layer).get_extra_state is not torch.nn.Module.get_extra_state
    }
