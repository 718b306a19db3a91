"""The compiled loops and their twins in torch operations, both against plain loops over the definition."""

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megappo.algo import compiled, scan, tensor_scan
from megappo.batch.fields import offsets_of

Arrays = tuple[np.ndarray, ...]


def compiled_suffix_sums(values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, decay: float) -> np.ndarray:
    out = np.full_like(values, 7)
    compiled.suffix_sums(values, mask, offsets, decay, out)
    return out


def tensor_suffix_sums(values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, decay: float) -> np.ndarray:
    return tensor_scan.suffix_sums(*map(torch.as_tensor, (values, mask, offsets)), decay).numpy()


def compiled_advantages(
    rewards: np.ndarray, values: np.ndarray, *layout: np.ndarray, gamma: float, lam: float
) -> Arrays:
    out = np.full_like(values, 7), np.full_like(values, 7)
    compiled.generalized_advantages(rewards, values, *layout, gamma, lam, *out)
    return out


def tensor_advantages(rewards: np.ndarray, values: np.ndarray, *layout: np.ndarray, gamma: float, lam: float) -> Arrays:
    tensors = map(torch.as_tensor, (rewards, values, *layout))
    return tuple(out.numpy() for out in tensor_scan.generalized_advantages(*tensors, gamma=gamma, lam=lam))


def compiled_moments(values: np.ndarray, mask: np.ndarray) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "COMPILED_FROM", 0)
        moments, largest, smallest = scan.masked_moments(values, mask)
    return [moments.count, moments.mean, moments.m2, largest, smallest]


def tensor_moments(values: np.ndarray, mask: np.ndarray) -> list[float]:
    moments, largest, smallest = tensor_scan.masked_moments(torch.as_tensor(values), torch.as_tensor(mask))
    return [moments.count, moments.mean, moments.m2, largest, smallest]


SUFFIX_SUMS = [compiled_suffix_sums, tensor_suffix_sums]
ADVANTAGES = [compiled_advantages, tensor_advantages]
MOMENTS = [compiled_moments, tensor_moments]


def suffix_loop(values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, decay: float) -> np.ndarray:
    out = np.zeros(len(values))
    for start, end in pairwise(offsets):
        following = 0.0
        for token in reversed(np.flatnonzero(mask[start:end]) + start):
            following = float(values[token]) + (decay * following if decay else 0.0)
            out[token] = following
    return out


def advantage_loop(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    out = np.zeros(len(values))
    for start, end in pairwise(offsets):
        on_mask = np.flatnonzero(mask[start:end]) + start
        following = next_value = 0.0
        for token in reversed(on_mask):
            delta = float(rewards[token]) + gamma * next_value - float(values[token])
            following = delta + gamma * lam * following
            next_value = float(values[token])
            out[token] = following
    return out


def draw(
    lengths: list[int], seed: int, dtype: str, share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return rewards, values (garbage off the mask), mask and offsets."""
    rng, offsets = np.random.default_rng(seed), offsets_of(lengths)
    mask = rng.random(offsets[-1]) < share
    both = rng.normal(size=(2, offsets[-1]))
    both[:, ~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e6], size=(2, int((~mask).sum())))
    rewards, values = both.astype(dtype)
    return rewards, values, mask, offsets


LAYOUTS = {
    "lengths": st.lists(st.integers(0, 70), max_size=8),
    "share": st.sampled_from([0.0, 0.3, 1.0]),
    "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    "dtype": st.sampled_from(["float32", "float64"]),
    "seed": st.integers(0, 2**32),
}
# Sums run in float64; the result is rounded to the type of the values once.
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}


@pytest.mark.parametrize("function", SUFFIX_SUMS)
@given(**LAYOUTS)
def test_suffix_sums_equal_a_loop(
    function: object, lengths: list[int], share: float, gamma: float, dtype: str, seed: int
) -> None:
    values, _, mask, offsets = draw(lengths, seed, dtype, share)
    found = function(values, mask, offsets, gamma)  # type: ignore[operator]
    assert found.dtype == dtype and not found[~mask].any()
    np.testing.assert_allclose(found, suffix_loop(values, mask, offsets, gamma), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("function", ADVANTAGES)
@given(**LAYOUTS, lam=st.sampled_from([0.0, 0.9, 1.0]))
def test_advantages_equal_a_loop(
    function: object, lengths: list[int], share: float, gamma: float, dtype: str, seed: int, lam: float
) -> None:
    rewards, values, mask, offsets = draw(lengths, seed, dtype, share)
    advantages, returns = function(rewards, values, mask, offsets, gamma=gamma, lam=lam)  # type: ignore[operator]
    assert advantages.dtype == dtype and not advantages[~mask].any() and not returns[~mask].any()
    expected = advantage_loop(rewards, values, mask, offsets, gamma, lam)
    np.testing.assert_allclose(advantages, expected, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(returns[mask], (expected + values)[mask], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("function", MOMENTS)
@given(
    values=arrays(np.float64, st.integers(1, 3000), elements=st.floats(-100, 100)),
    share=st.sampled_from([0.01, 0.5, 1.0]),
    shift=st.sampled_from([0.0, 1e8]),
)
def test_moments_equal_those_of_the_values_on_the_mask(
    function: object, values: np.ndarray, share: float, shift: float
) -> None:
    mask = np.random.default_rng(0).random(len(values)) < share
    on_mask = values[mask] + shift
    values = np.where(mask, values + shift, np.nan)
    count, mean, m2, largest, smallest = function(values, mask)  # type: ignore[operator]
    assert count == len(on_mask)
    if count:
        assert (largest, smallest) == (on_mask.max(), on_mask.min())
        assert mean == pytest.approx(on_mask.mean(), rel=1e-12, abs=1e-10)
        # Rounding of the mean at an offset of 1e8 is 1e-8 per value.
        assert m2 == pytest.approx(np.square(on_mask - on_mask.mean()).sum(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("function", MOMENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("values", "mask", "largest", "smallest"),
    [
        ([1.0, np.nan, 3.0], [1, 1, 1], np.nan, np.nan),
        ([np.nan, 1.0, 3.0], [0, 1, 1], 3.0, 1.0),
        ([-np.inf, 1.0, np.inf], [1, 1, 1], np.inf, -np.inf),
        ([-np.inf, 1.0, np.inf], [1, 1, 0], 1.0, -np.inf),
        ([-2.0, -0.5, 4.0], [1, 1, 0], -0.5, -2.0),
        ([1.0], [0], -np.inf, np.inf),
        ([], [], -np.inf, np.inf),
    ],
)
def test_moments_pass_on_what_is_not_finite_on_the_mask_only(
    function: object, dtype: str, values: list[float], mask: list[int], largest: float, smallest: float
) -> None:
    found = function(np.array(values, dtype=dtype), np.array(mask, dtype=bool))  # type: ignore[operator]
    assert found[0] == sum(mask)
    np.testing.assert_array_equal(found[3:], [largest, smallest])


@pytest.mark.parametrize("function", SUFFIX_SUMS)
def test_one_long_sequence_beside_short_ones_equals_a_loop(function: object) -> None:
    values, _, mask, offsets = draw([3000, 1, 0, 40], 0, "float64", 0.9)
    found = function(values, mask, offsets, 0.99)  # type: ignore[operator]
    np.testing.assert_allclose(found, suffix_loop(values, mask, offsets, 0.99), atol=1e-10)


@pytest.mark.parametrize("function", SUFFIX_SUMS)
def test_a_nan_stays_in_its_own_sequence_and_before_itself(function: object) -> None:
    values = np.array([1.0, np.nan, 1.0, 1.0, 2.0, 3.0])
    found = function(values, np.ones(6, dtype=bool), np.array([0, 4, 6]), 1.0)  # type: ignore[operator]
    assert np.isnan(found).tolist() == [True, True, False, False, False, False]
    assert found[2:].tolist() == [2, 1, 5, 3]


def test_many_tokens_and_few_give_the_same_numbers() -> None:
    count = scan.COMPILED_FROM // 1000
    rewards, values, mask, offsets = draw([1000] * (count + 1), 1, "float32", 0.8)
    assert len(values) > scan.COMPILED_FROM
    both = scan.generalized_advantages(rewards, values, mask, offsets, gamma=0.99, lam=0.95)
    sums = scan.suffix_sums(rewards, mask, offsets, 0.99)
    moments, largest, smallest = scan.masked_moments(both[0], mask)
    for start, end in pairwise(offsets[[0, 30, 40, count + 1]]):
        few = scan.generalized_advantages(
            rewards[start:end],
            values[start:end],
            mask[start:end],
            offsets[(offsets >= start) & (offsets <= end)] - start,
            gamma=0.99,
            lam=0.95,
        )
        # One rounding to float32 of sums that differ by rounding in float64.
        np.testing.assert_allclose(few, np.array(both)[:, start:end], rtol=2e-7, atol=2e-7)
    np.testing.assert_allclose(sums, suffix_loop(rewards, mask, offsets, 0.99), rtol=2e-7, atol=2e-7)
    on_mask = both[0][mask].astype(np.float64)
    assert (largest, smallest) == (on_mask.max(), on_mask.min())
    assert moments.variance == pytest.approx(on_mask.var(ddof=1), rel=1e-12)


@pytest.mark.parametrize("writable", ["NUMBA_CACHE_DIR", "the user's cache", "nothing"])
def test_a_package_that_cannot_be_written_is_compiled_all_the_same(tmp_path: Path, writable: str) -> None:
    package, cache, blocked = tmp_path / "package", tmp_path / "cache", tmp_path / "blocked"
    package.mkdir()
    cache.mkdir()
    blocked.touch()
    shutil.copy(compiled.__file__, package / "loops.py")
    # A file in the way keeps everyone from writing, the superuser too.
    (package / "__pycache__").touch()
    home = cache if writable == "the user's cache" else blocked
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    if writable == "NUMBA_CACHE_DIR":
        environment["NUMBA_CACHE_DIR"] = str(cache)
    program = (
        "import numpy as np, loops\n"
        "out = np.zeros(3)\n"
        "loops.suffix_sums(np.arange(3.0), np.ones(3, dtype=bool), np.array([0, 3]), 0.5, out)\n"
        "print(out.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[1.0, 2.0, 2.0]", done.stderr
    assert bool(list(cache.rglob("*.nbi"))) is (writable != "nothing")
