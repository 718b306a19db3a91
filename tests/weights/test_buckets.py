"""The invariants of a bucket plan, and that an engine reads a bucket as it was written."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.weights.buckets import BucketMeta, TensorMeta, open_bucket, plan_buckets

TENSORS = st.lists(
    st.builds(lambda rows, dtype: ([rows, 3], dtype), st.integers(1, 50), st.sampled_from(["float32", "bfloat16"])),
    max_size=20,
)


@given(TENSORS, st.integers(1, 1000))
def test_plan_holds_every_tensor_once_in_order_within_the_limit_and_of_one_dtype(
    shapes: list[tuple[list[int], str]], limit: int
) -> None:
    tensors = [TensorMeta(name=str(index), shape=shape, dtype=dtype) for index, (shape, dtype) in enumerate(shapes)]
    buckets = plan_buckets(tensors, limit)
    assert [name for bucket in buckets for name in bucket.names] == [tensor.name for tensor in tensors]
    for bucket in buckets:
        members = [tensor for tensor in tensors if tensor.name in bucket.names]
        sizes = [tensor.shape[0] * 3 * (4 if tensor.dtype == "float32" else 2) for tensor in members]
        assert bucket.num_bytes == sum(sizes)
        assert bucket.num_bytes <= limit or len(members) == 1
        assert {tensor.dtype for tensor in members} == {bucket.dtype}


def test_small_tensors_share_a_bucket_and_a_large_one_is_alone() -> None:
    rows = {"a": 1, "b": 2, "huge": 100, "c": 1, "d": 1}
    plan = plan_buckets([TensorMeta(name=name, shape=[size], dtype="float32") for name, size in rows.items()], 16)
    assert [bucket.names for bucket in plan] == [["a", "b"], ["huge"], ["c", "d"]]
    assert [bucket.num_bytes for bucket in plan] == [12, 400, 8]


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
