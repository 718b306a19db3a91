"""The reference policy: a frozen copy of weights that changes places with the trained ones for a forward pass, or the
model without its adapters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.module import MegatronModule

from megappo.models.lora import adapted_linears


class FrozenWeights:
    """A copy of the weights of some model chunks as they are now, kept in host memory."""

    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        self._chunks = chunks
        self._kept = [parameter.detach().cpu().clone() for parameter in self._parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the model with the frozen weights inside the block; the trained ones are back, bitwise, after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self._chunks for parameter in chunk.parameters()]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap values tensor by tensor, so that device memory holds at most one extra tensor."""
        for parameter, kept in zip(self._parameters(), self._kept):
            moving = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(moving)


class SwitchedOffAdapters:
    """The frozen weights of model chunks with adapters; nothing is kept or moved."""

    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        self._layers = [layer for chunk in chunks for layer in adapted_linears(chunk)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the model without its adapters inside the block; they count again after it."""
        for layer in self._layers:
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.is_on = True
