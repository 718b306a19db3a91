"""Low-rank updates of frozen Megatron linear layers (LoRA, Hu et al. 2021, arXiv:2106.09685, section 4.1).

Shapes: T tokens and I input features that a rank gets, O output features that it gives, r rank, k adapted matrices.

Each Hugging Face matrix W has factors of its own, A [r, I] and B [O, r], also where Megatron fuses several (query, key
and value; gate and up), so the factors are those of PEFT. y = W x + alpha / r * B A x.

Tensor parallelism cuts the factors as it cuts W, and what crosses ranks is r wide instead of I or O:
- column-parallel (B cut, A whole): A x is computed from the tokens that the rank has and then shared, so the gradient
  that reaches A is the whole one;
- row-parallel (A cut, B whole): A x is summed over the ranks before B.
Under sequence parallelism the whole factor sees the rank's own tokens only, and Megatron sums its gradient over the
ranks, as it does for norms (distributed/finalize_model_grads.py:340).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import linear

from megappo.weights.name_map import Partition, Transform
from megappo.weights.transforms import merge

_UPDATE, _BASE = ".update.", ".base."
"""Where an `AdaptedLinear` keeps its parts, within the name of a parameter."""
_SUMMED_AT_ONCE = 1 << 20
"""Elements of a weight that are summed with their update at a time: a whole one would take memory for its sum, too."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Matrix:
    """One Hugging Face matrix of a layer, as this rank holds it."""

    name: str
    """Hugging Face name of its weight."""
    rows: int
    """O of it."""
    is_adapted: bool

    @property
    def short_name(self) -> str:
        """Return for example q_proj."""
        return self.name.split(".")[-2]


@dataclass(kw_only=True, slots=True, frozen=True)
class Placement:
    """How a layer lies over ranks and joins its matrices."""

    partition: Partition
    """column or row."""
    transform: Transform
    num_groups: int
    """Key/value groups of the rank."""
    sequence_parallel: bool


class LowRankUpdate(torch.nn.Module):
    """alpha / r * B A x of the matrices of one layer, in the layer's order of output features."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        placement: Placement,
        *,
        starts: Mapping[str, torch.Tensor],
        scale: float,
        weight: torch.Tensor,
    ) -> None:
        """Start at zero: B is.

        Args:
            starts: name of each adapted matrix -> first value of its A, [r, I].
            scale: alpha / r.
            weight: of the layer, of which type and device are taken.
        """
        super().__init__()
        self._matrices = matrices
        self._placement = placement
        self._scale = scale
        for matrix in matrices:
            if matrix.is_adapted:
                start = starts[matrix.name]
                self._register(f"{matrix.short_name}_A", start.to(weight), cut_by=Partition.row)
                up = weight.new_zeros(matrix.rows, len(start))
                self._register(f"{matrix.short_name}_B", up, cut_by=Partition.column)

    def _register(self, name: str, value: torch.Tensor, *, cut_by: Partition) -> None:
        """Add a factor, of which a rank has a part in layers of the partition `cut_by`, and else the whole."""
        parameter: Any = torch.nn.Parameter(value)  # Any: Megatron's marks are attributes
        if self._placement.partition is cut_by:
            set_tensor_model_parallel_attributes(parameter, True, cut_by.value, 1)
        else:
            parameter.sequence_parallel = self._placement.sequence_parallel
        self.register_parameter(name, parameter)

    def _factors(self, matrix: Matrix) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
        """Return A and B of one of the matrices; None: it has none."""
        if not matrix.is_adapted:
            return None
        return self.get_parameter(f"{matrix.short_name}_A"), self.get_parameter(f"{matrix.short_name}_B")

    def named_factors(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return all factors under the names that PEFT gives them."""
        named: list[tuple[str, torch.nn.Parameter]] = []
        for matrix in self._matrices:
            module = matrix.name.removesuffix(".weight")
            for factor, parameter in zip("AB", self._factors(matrix) or ()):
                named.append((f"{module}.lora_{factor}.weight", parameter))
        return named

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[T, 1, I] -> [T, 1, O]; under sequence parallelism the T of either is the layer's."""
        pairs = [self._factors(matrix) for matrix in self._matrices]
        adapted = [pair for pair in pairs if pair is not None]
        # One product for all A, and one exchange.
        low = self._scale * self._across_ranks(linear(input, torch.cat([down for down, _ in adapted])))
        parts = iter(low.chunk(len(adapted), dim=-1))
        updates = [
            low.new_zeros(*low.shape[:-1], matrix.rows) if pair is None else linear(next(parts), pair[1])
            for matrix, pair in zip(self._matrices, pairs)
        ]
        return merge(self._placement.transform, updates, num_groups=self._placement.num_groups, dim=-1)

    def _across_ranks(self, low: torch.Tensor) -> torch.Tensor:
        """Share or sum A x [T, 1, k r] over the tensor-parallel ranks."""
        if self._placement.partition is Partition.column:
            if self._placement.sequence_parallel:
                return gather_from_sequence_parallel_region(low)
            return copy_to_tensor_model_parallel_region(low)
        if self._placement.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low)
        return reduce_from_tensor_model_parallel_region(low)

    def write_sum(self, target: torch.Tensor, weight: torch.Tensor, part: int) -> None:
        """Write the sum of one of the matrices, by index, and its update, summed in fp32 a few rows at a time.

        Args:
            target: of any type, of the weight's shape.
            weight: [O, I] of this rank, or [G, O / G, I].
        """
        pair = self._factors(self._matrices[part])
        if pair is None:
            target.copy_(weight)
            return
        down, up = (factor.detach().float() for factor in pair)
        up = up.view(*weight.shape[:-1], len(down))
        if weight.dim() == 2:
            target, weight, up = (tensor.unsqueeze(0) for tensor in (target, weight, up))
        rows = max(1, _SUMMED_AT_ONCE // weight.shape[-1])
        for group in range(len(weight)):
            blocks = zip(*(tensor[group].split(rows) for tensor in (target, weight, up)))
            for to, base, factor in blocks:
                to.copy_(base.float() + self._scale * (factor @ down))


class AdaptedLinear(torch.nn.Module):
    """A Megatron linear layer, of any kind that takes the input of its matrix product, with an update beside it."""

    def __init__(self, base: torch.nn.Module, update: LowRankUpdate) -> None:
        super().__init__()
        self.base = base
        self.update = update
        self.is_on = True
        """Whether the update counts."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the layer returns: its output, and a bias that it leaves to the caller."""
        output, bias = self.base(input)
        return (output + self.update(input) if self.is_on else output), bias


def name_without_adapter(name: str) -> str | None:
    """Return what a parameter is called in a model without adapters; None for one of an adapter."""
    return None if _UPDATE in name else name.replace(_BASE, ".")
