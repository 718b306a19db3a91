"""The segmented suffix scan against a loop."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algo.scan import discounted_suffix_sums
from megappo.batch.fields import offsets_of


def loop(values: np.ndarray, offsets: np.ndarray, decay: float) -> np.ndarray:
    out = np.zeros_like(values)
    for start, end in pairwise(offsets):
        following = 0.0
        for position in range(end - 1, start - 1, -1):
            following = values[position] + decay * following
            out[position] = following
    return out


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=8), decay=st.sampled_from([0.0, 0.5, 0.95, 1.0]), seed=st.integers(0)
)
def test_the_scan_equals_a_loop(lengths: list[int], decay: float, seed: int) -> None:
    offsets = offsets_of(lengths)
    values = np.random.default_rng(seed).normal(size=offsets[-1])
    scanned = discounted_suffix_sums(torch.as_tensor(values), torch.as_tensor(offsets), decay)
    np.testing.assert_allclose(scanned.numpy(), loop(values, offsets, decay), atol=1e-12)


def test_one_long_sequence_beside_short_ones_equals_a_loop() -> None:
    offsets = offsets_of([3000, 1, 0, 40])
    values = np.random.default_rng(0).normal(size=offsets[-1])
    scanned = discounted_suffix_sums(torch.as_tensor(values), torch.as_tensor(offsets), 0.99)
    np.testing.assert_allclose(scanned.numpy(), loop(values, offsets, 0.99), atol=1e-10)


def test_a_nan_stays_in_its_own_sequence_and_before_itself() -> None:
    values = torch.tensor([1.0, np.nan, 1.0, 1.0, 2.0, 3.0])
    scanned = discounted_suffix_sums(values, torch.tensor([0, 4, 6]), 1.0)
    assert scanned.isnan().tolist() == [True, True, False, False, False, False]
    assert scanned[2:].tolist() == [2, 1, 5, 3]
