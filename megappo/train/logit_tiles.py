"""Logits of a few rows and a few vocabulary columns at a time, out of hidden states and the output weight.

Shapes: n rows, C columns, H hidden features; a tile has r rows and c columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(kw_only=True, slots=True, frozen=True)
class TileSize:
    """How large a tile gets."""

    elements: int
    """Logits of a tile at most."""
    rows: int
    """Rows of a tile, when the vocabulary has more columns than fit beside them: enough that the matrix products are
    bound by arithmetic and not by reading the weight."""


TILE_SIZES = {
    # 1 MiB in fp32: what a pass over a tile leaves is still in a core's second-level cache for the next one.
    "cpu": TileSize(elements=2**18, rows=256),
    # 64 MiB: a pass takes several times as long as its launch.
    "cuda": TileSize(elements=2**24, rows=2048),
}
"""By device type."""


class LogitTiles:
    """Walks over the tiles: `for columns, weight in tiles.columns(): for rows in tiles.rows(): tiles.logits(...)`.

    Columns are the outer loop, since what is summed over rows (the gradient of the weight) is larger than what is
    summed over columns (the gradient of the hidden states, the numbers per row).
    """

    def __init__(self, states: torch.Tensor, weight: torch.Tensor, *, scale: float) -> None:
        """Prepare the buffers, which all tiles share.

        Args:
            states: [n, H], in the type in which matrix products are computed.
            weight: [C, H], any floating type; converted to that of the states tile by tile.
            scale: factor of the logits.
        """
        self.states, self._weight, self._scale = states, weight, scale
        limits = TILE_SIZES[states.device.type]
        num_rows, num_columns = len(states), len(weight)
        self._max_rows = max(1, min(num_rows, max(limits.rows, limits.elements // max(1, num_columns))))
        self._max_columns = max(1, min(num_columns, limits.elements // self._max_rows))
        size = self._max_rows * self._max_columns
        self._product = states.new_empty(size)
        self.dtype = torch.promote_types(states.dtype, torch.float32)
        """Type of the logits: float32, whatever 16-bit type their product is computed in."""
        # The product itself, where it has the right type already.
        self._logits = self._product if states.dtype == self.dtype else states.new_empty(size, dtype=self.dtype)

    def columns(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of columns, and their part [c, H] of the weight in the type of the states."""
        if not len(self.states):
            return
        for columns in _ranges(len(self._weight), self._max_columns):
            yield columns, self._weight[columns].to(self.states.dtype)

    def rows(self) -> Iterator[slice]:
        """Yield ranges of rows."""
        return _ranges(len(self.states), self._max_rows)

    def logits(self, rows: slice, weight: torch.Tensor) -> torch.Tensor:
        """Return scale * states[rows] @ weight.T, [r, c]. It may be overwritten; the next call does so."""
        states = self.states[rows]
        shape = (len(states), len(weight))
        product = self._product[: shape[0] * shape[1]].view(shape)
        # beta = 0: what the buffer holds is not read. The scale is applied to the sum before it is rounded.
        torch.addmm(product, states, weight.t(), beta=0, alpha=self._scale, out=product)
        if self._logits is self._product:
            return product
        return self._logits[: shape[0] * shape[1]].view(shape).copy_(product)

    def new_buffer(self) -> torch.Tensor:
        """Return memory for one more tile, flat, in the type of the logits."""
        return torch.empty_like(self._logits)


def _ranges(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
