"""Flat buffers by hand; tests/planning/test_training_memory.py holds them against Megatron's own."""

from megappo.planning.buffers import bucket_elements, lay_out
from megappo.planning.parameters import LocalParameter

PARAMETERS = [LocalParameter(elements=size) for size in (100, 30, 70)]


def test_without_a_distributed_optimizer_nothing_is_padded() -> None:
    layout = lay_out(PARAMETERS, distributed=False, ranks=4, bucket_elements=None)
    # In reverse order: 70, 30, 100.
    assert layout.places == ((0, 70), (70, 100), (100, 200))
    assert layout.elements == 200 and layout.buckets == ((0, 200),)


def test_a_distributed_optimizer_pads_parameters_to_64_and_the_buffer_to_128_and_the_ranks() -> None:
    layout = lay_out(PARAMETERS, distributed=True, ranks=3, bucket_elements=None)
    assert layout.places == ((0, 70), (128, 158), (192, 292))
    assert layout.elements == 384  # lcm(3, 128) = 384
    # Shares of 128: of rank 0 the 70; of rank 1 the 30 and 64 of the 100; of rank 2 the other 36.
    assert [layout.owned(rank, 3) for rank in range(3)] == [70, 94, 36]


def test_a_bucket_is_closed_once_it_is_full_and_each_is_shared_evenly() -> None:
    layout = lay_out(PARAMETERS, distributed=True, ranks=2, bucket_elements=100)
    # The first two take 158 of 256 with padding, then the third begins a bucket of its own.
    assert layout.buckets == ((0, 256), (256, 384))
    assert layout.places == ((0, 70), (128, 158), (256, 356))
    assert [layout.owned(rank, 2) for rank in range(2)] == [70 + 64, 30 + 36]


def test_a_tied_embedding_has_a_bucket_of_its_own_under_a_distributed_optimizer_only() -> None:
    parameters = [LocalParameter(elements=64, has_own_bucket=True), LocalParameter(elements=64)]
    assert lay_out(parameters, distributed=True, ranks=1, bucket_elements=None).buckets == ((0, 128), (128, 256))
    assert lay_out(parameters, distributed=False, ranks=1, bucket_elements=None).buckets == ((0, 128),)


def test_buckets_grow_with_the_ranks_unless_a_size_is_given() -> None:
    assert bucket_elements(wanted=None, ranks=8) == 40_000_000
    assert bucket_elements(wanted=None, ranks=64) == 64_000_000
    assert bucket_elements(wanted=5, ranks=64) == 5
