"""Flat ranges of a weight as blocks of it."""

import itertools

import numpy as np
import pytest
import torch

from megappo.models.parameters import Shards
from megappo.models.sharded_state import Copies, WeightPart
from megappo.train.optimizer_state import blocks_of

ALONE = Copies(tensor=Shards(rank=0, size=1), data=Shards(rank=0, size=1), of_other_stage=False)


@pytest.mark.parametrize("shape", [(4, 3), (3, 1), (1, 5), (7,)])
def test_the_blocks_of_a_range_are_its_elements_in_order_and_few(shape: tuple[int, ...]) -> None:
    part = WeightPart(
        key="weight",
        parameter=torch.nn.Parameter(torch.zeros(shape)),
        first_row=0,
        num_rows=shape[0],
        global_shape=shape,
        global_offset=(0,) * len(shape),
        copies=ALONE,
    )
    numbers = np.arange(np.prod(shape)).reshape(shape)
    # Ranges that begin before the part, within it or after it, and end so.
    for start, stop in itertools.product(range(-2, numbers.size + 2), repeat=2):
        blocks = list(blocks_of(part, start, stop))
        found: list[int] = []
        for block in blocks:
            place = tuple(slice(first, first + size) for first, size in zip(block.offset, block.shape))
            own = numbers[place].ravel().tolist()
            assert own[0] == block.start and len(own) == np.prod(block.shape)
            found += own
        assert found == list(range(max(start, 0), min(stop, numbers.size))), (start, stop)
        assert len(blocks) <= 3
