"""The invariants of a bucket plan, and that an engine reads a bucket as it was written."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.weights.buckets import BucketMeta, TensorMeta, fewest_buckets, open_bucket, plan_buckets

TENSORS = st.lists(
    st.builds(lambda rows, dtype: ([rows, 3], dtype), st.integers(1, 50), st.sampled_from(["float32", "bfloat16"])),
    max_size=20,
)


@given(TENSORS, st.integers(1, 1000))
def test_plan_holds_every_tensor_once_within_the_limit_and_of_one_dtype(
    shapes: list[tuple[list[int], str]], limit: int
) -> None:
    tensors = [TensorMeta(name=str(index), shape=shape, dtype=dtype) for index, (shape, dtype) in enumerate(shapes)]
    buckets = plan_buckets(tensors, limit)
    assert sorted(int(name) for bucket in buckets for name in bucket.names) == list(range(len(tensors)))
    firsts = [int(bucket.names[0]) for bucket in buckets]
    assert firsts == sorted(firsts)
    for bucket in buckets:
        assert bucket.names == sorted(bucket.names, key=int)
        members = [tensor for tensor in tensors if tensor.name in bucket.names]
        sizes = [tensor.shape[0] * 3 * (4 if tensor.dtype == "float32" else 2) for tensor in members]
        assert bucket.num_bytes == sum(sizes)
        assert bucket.num_bytes <= limit or len(members) == 1
        assert {tensor.dtype for tensor in members} == {bucket.dtype}


def test_the_largest_tensors_are_placed_first_each_into_the_fullest_bucket_that_takes_it() -> None:
    rows = {"a": 1, "b": 2, "huge": 100, "c": 1, "d": 3, "e": 3}
    plan = plan_buckets(metas(rows), 16)
    # d and e open a bucket each, b one of its own; a and c fill those of d and e.
    assert [bucket.names for bucket in plan] == [["a", "d"], ["b"], ["huge"], ["c", "e"]]
    assert [bucket.num_bytes for bucket in plan] == [16, 8, 400, 16]


def metas(rows: dict[str, int]) -> list[TensorMeta]:
    return [TensorMeta(name=name, shape=[size], dtype="float32") for name, size in rows.items()]


@given(st.lists(st.integers(0, 100), max_size=60))
def test_all_buckets_of_small_tensors_but_one_are_nine_tenths_full(rows: list[int]) -> None:
    plan = plan_buckets(metas({str(index): size for index, size in enumerate(rows)}), 4000)
    assert all(bucket.num_bytes >= 3600 for bucket in sorted(plan, key=lambda bucket: bucket.num_bytes)[1:])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(8, 30))
def test_no_packing_takes_fewer_buckets_than_the_bound(sizes: list[int], limit: int) -> None:
    fewest = fewest_buckets(sizes, limit)
    alone = [size for size in sizes if size > limit]
    packed = [size for size in sizes if size <= limit]
    best = min(
        (
            len(set(way))
            for way in itertools.product(range(len(packed)), repeat=len(packed))
            if fits(packed, way, limit)
        ),
        default=0,
    )
    assert fewest <= len(alone) + best <= len(plan_buckets(metas(dict(zip(map(str, range(9)), sizes))), 4 * limit))


def fits(sizes: list[int], way: tuple[int, ...], limit: int) -> bool:
    """Whether each size in the bucket that `way` names leaves no bucket over the limit."""
    return all(sum(size for size, at in zip(sizes, way) if at == bucket) <= limit for bucket in set(way))


def test_a_bucket_opens_to_views_of_its_bytes() -> None:
    bucket = BucketMeta(names=["a", "b"], shapes=[[2, 2], [3]], dtype="bfloat16", num_bytes=14)
    numbers = torch.arange(7.0).bfloat16()
    tensors = open_bucket(bucket, numbers.view(torch.uint8))
    assert tensors["a"].tolist() == [[0, 1], [2, 3]] and tensors["b"].tolist() == [4, 5, 6]
    tensors["a"][0, 0] = 9
    assert numbers[0] == 9


def load_sglang_tensor_bucket() -> ModuleType:
    """Load that file alone: importing it through its package needs CUDA libraries."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    file = Path(package.submodule_search_locations[0]) / "srt" / "weight_sync" / "tensor_bucket.py"
    spec = importlib.util.spec_from_file_location("sglang_tensor_bucket", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_sglang_reads_a_bucket_as_it_was_written() -> None:
    tensor_bucket = load_sglang_tensor_bucket()
    named = [("a", torch.randn(3, 4)), ("b", torch.randn(5)), ("c", torch.randn(1, 1))]
    theirs = tensor_bucket.FlattenedTensorBucket(named_tensors=named)
    (bucket,) = plan_buckets([TensorMeta(name=name, shape=list(t.shape), dtype="float32") for name, t in named], 1000)
    assert theirs.get_flattened_tensor().numel() == bucket.num_bytes
    for name, tensor in open_bucket(bucket, theirs.get_flattened_tensor()).items():
        assert torch.equal(tensor, dict(named)[name])
