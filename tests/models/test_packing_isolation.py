"""A packed sequence is computed as if it were alone."""

import pytest
import torch

from megappo.config.parallelism import ParallelismConfig
from megappo.models.attention import pack_lengths, position_ids
from megappo.models.build import Head
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel
from tests.models.model_jobs import Sequences, call_packed, loaded_model

CPU = torch.device("cpu")


def outputs_of(folder: str, layout: ParallelismConfig, batches: list[Sequences]) -> list[torch.Tensor]:
    (model,) = loaded_model(folder, Head.language_model, layout)
    with torch.no_grad():
        return [call_packed(model, batch)[0] for batch in batches]


@pytest.mark.parametrize(
    "layout",
    [
        ParallelismConfig(),
        ParallelismConfig(tensor=2, sequence=True),
        ParallelismConfig(context=2),
        pytest.param(ParallelismConfig(tensor=2, context=2), marks=pytest.mark.slow),
    ],
    ids=["one process", "tensor and sequence", "context", "tensor and context"],
)
def test_tokens_of_other_sequences_leave_outputs_bitwise_unchanged(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig
) -> None:
    kept = [5, 17, 2, 91, 33, 8, 54, 12]
    batches: list[Sequences] = [[[1] * 40, kept, [2] * 36, [3] * 12], [[7] * 40, kept, [8] * 36, [9] * 12]]
    arguments = {"layout": layout, "folder": str(make_model("qwen2")), "batches": batches}
    start, stop = 40 // layout.context, 48 // layout.context
    for first, second in world.run(outputs_of, parallelism=layout, **arguments):
        assert torch.equal(first[start:stop], second[start:stop])
        assert not torch.equal(first[:start], second[:start])


def test_order_and_company_leave_outputs_unchanged(world: DistWorld, make_model: MakeModel) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (50, 7, 7, 33, 1, 20)]
    batches = [sequences, sequences[::-1], *([sequence] for sequence in sequences)]
    (results,) = world.run(
        outputs_of, parallelism=ParallelismConfig(), layout=ParallelismConfig(), folder=str(make_model("qwen3")),
        batches=batches,
    )  # fmt: skip
    together = results[0].split([len(sequence) for sequence in sequences])
    reversed_order = results[1].split([len(sequence) for sequence in sequences[::-1]])[::-1]
    for alone, first, second in zip(results[2:], together, reversed_order, strict=True):
        torch.testing.assert_close(first, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(second, alone, rtol=0, atol=1e-5)


def test_every_token_comes_back_to_its_place() -> None:
    lengths = [40, 3, 1, 39, 10, 100, 77, 76, 74, 2]
    packed = pack_lengths(lengths, device=CPU)
    rows = torch.cat([positions.flatten() for positions in packed.buckets])
    assert torch.equal(rows[packed.restore], torch.arange(sum(lengths)))
    assert packed.cu_seqlens_q.tolist() == [0, 40, 43, 44, 83, 93, 193, 270, 346, 420, 422]
    assert packed.max_seqlen_q == 100


def test_buckets_hold_like_lengths_and_padding_repeats_the_own_sequence() -> None:
    lengths = [40, 3, 39, 100, 76, 74]  # starts 0, 40, 43, 82, 182, 258
    shapes = [tuple(positions.shape) for positions in pack_lengths(lengths, device=CPU).buckets]
    assert shapes == [(2, 100), (1, 74), (2, 40), (1, 3)]
    first = pack_lengths(lengths, device=CPU).buckets[0]
    assert first[1, :76].tolist() == list(range(182, 258)) and set(first[1, 76:].tolist()) == {257}


def test_positions_start_at_zero_in_every_sequence() -> None:
    assert position_ids([3, 1, 2], device=CPU).tolist() == [[0, 1, 2, 0, 0, 1]]
