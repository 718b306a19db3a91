"""Packing of sequences into Megatron inputs, against per-sequence loops written here."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megappo.batch.fields import BatchError, offsets_of
from megappo.batch.stages import RolloutBatch
from megappo.models.context import ContextShare
from megappo.train.packing import PackedMicroBatch, PackingRules, pack_micro_batches

CPU = torch.device("cpu")


def make_batch(prompts: list[int], responses: list[int]) -> RolloutBatch:
    """Sequences whose token at position t of sequence i is 100 i + t + 1."""
    lengths = [prompt + response for prompt, response in zip(prompts, responses)]
    num_tokens = sum(lengths)
    return RolloutBatch(
        offsets=offsets_of(lengths),
        tokens=np.concatenate([100 * i + 1 + np.arange(n) for i, n in enumerate(lengths)]).astype(np.int32),
        response_mask=np.concatenate([np.arange(p + r) >= p for p, r in zip(prompts, responses)]),
        rollout_log_probs=np.zeros(num_tokens, np.float32),
        sequence_ids=10 * (1 + np.arange(len(lengths))),
        group_ids=np.zeros(len(lengths), np.int64),
    )


def pack(
    batch: RolloutBatch, micro_batches: list[list[int]], **rules: int | bool | ContextShare
) -> list[PackedMicroBatch]:
    return pack_micro_batches(
        batch,
        micro_batches,
        predict=batch.response_mask,
        rules=PackingRules(**rules),  # type: ignore[arg-type]
        device=CPU,
    )


def test_input_drops_last_tokens_and_restarts_positions() -> None:
    batch = make_batch([2, 1], [2, 2])  # ids 10 and 20
    packed = pack(batch, [[20, 10]])[0]
    assert packed.input_ids.tolist() == [[101, 102, 1, 2, 3]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 2, 5]
    assert packed.packed_seq_params.max_seqlen_q == 3
    # Response tokens 102, 103 of sequence 20 and 3, 4 of sequence 10, each from the row of the token before it.
    assert packed.rows.tolist() == [0, 1, 3, 4]
    assert packed.targets.tolist() == [102, 103, 3, 4]
    assert packed.token_index.tolist() == [5, 6, 2, 3]
    assert packed.sequence_index.tolist() == [1, 1, 0, 0]
    assert packed.target_offsets.tolist() == [0, 2, 4]


@pytest.mark.parametrize("micro_batches", [[[10, 20, 30, 40]], [[40], [], [20, 10], [30]], [[30, 10, 40, 20], []]])
@pytest.mark.parametrize("rules", [{}, {"multiple": 4}, {"equal_counts": True}, {"multiple": 2, "equal_counts": True}])
def test_every_response_token_is_predicted_once_from_the_token_before_it(
    micro_batches: list[list[int]], rules: dict[str, int | bool]
) -> None:
    batch = make_batch([3, 1, 5, 2], [4, 7, 0, 1])
    packed = pack(batch, micro_batches, **rules)
    seen: list[int] = []
    for micro_batch in packed:
        rows = micro_batch.rows.numpy()
        previous = micro_batch.input_ids[0].numpy()[rows]
        assert (previous + 1 == micro_batch.targets.numpy()).all()  # tokens count up within a sequence
        assert (batch.tokens[micro_batch.token_index] == micro_batch.targets.numpy()).all()
        seen += micro_batch.token_index.tolist()
        assert micro_batch.num_tokens % int(rules.get("multiple", 1)) == 0
        boundaries = micro_batch.packed_seq_params.cu_seqlens_q.tolist()
        assert boundaries[-1] == micro_batch.num_tokens
        expected = np.concatenate([np.arange(b - a) for a, b in pairwise(boundaries)])
        assert micro_batch.position_ids[0].tolist() == expected.tolist()
        assert all(0 < b - a <= 7 for a, b in pairwise(boundaries))  # longest real input: 1 + 7 - 1
    assert sorted(seen) == np.flatnonzero(batch.response_mask).tolist()
    if rules.get("equal_counts"):
        assert len({micro_batch.num_tokens for micro_batch in packed}) == 1


@pytest.mark.parametrize("micro_batches", [[[10, 20, 30, 40]], [[40], [], [20, 10], [30]]])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rules", [{}, {"multiple": 4}, {"equal_counts": True}])
def test_context_ranks_share_the_tokens_and_gather_all_predictions(
    micro_batches: list[list[int]], size: int, rules: dict[str, int | bool]
) -> None:
    batch = make_batch([3, 1, 5, 2], [4, 7, 0, 1])
    shares = [ContextShare(rank=rank, size=size) for rank in range(size)]
    for parts in zip(*(pack(batch, micro_batches, share=share, **rules) for share in shares)):
        assert len({part.num_tokens for part in parts}) == 1
        width = parts[0].split.width  # type: ignore[union-attr]
        results = np.zeros(size * width, np.int64)
        for rank, part in enumerate(parts):
            assert part.input_ids.shape == part.position_ids.shape == (1, part.num_tokens // size)
            assert part.input_ids.shape[1] % int(rules.get("multiple", 1)) == 0
            rows, targets = part.rows.numpy(), part.targets.numpy()
            assert (part.input_ids[0].numpy()[rows] + 1 == targets).all()  # tokens count up within a sequence
            assert (part.input_ids[0].numpy()[rows] % 100 - 1 == part.position_ids[0].numpy()[rows]).all()
            results[rank * width : rank * width + len(targets)] = targets
        for part in parts:
            assert part.split is not None
            assert (results[part.split.order.numpy()] == batch.tokens[part.token_index]).all()
            assert (batch.tokens[part.token_index][part.split.own.numpy()] == part.targets.numpy()).all()


def test_an_empty_micro_batch_is_filler_that_predicts_nothing() -> None:
    batch = make_batch([2], [3])
    filler = pack(batch, [[10], []])[1]
    assert filler.input_ids.tolist() == [[0]] and len(filler.rows) == 0
    assert filler.target_offsets.tolist() == [0]
    assert pack(batch, [[]], multiple=4)[0].num_tokens == 4


def test_a_sequence_of_one_token_is_no_input_at_all() -> None:
    batch = make_batch([1, 2], [0, 1])
    packed = pack(batch, [[10, 20]])[0]
    assert packed.input_ids.tolist() == [[101, 102]]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 2]


def test_an_unknown_sequence_id_is_refused_by_name() -> None:
    with pytest.raises(BatchError, match=r"\[99\]"):
        pack(make_batch([2], [1]), [[10, 99]])


def test_a_sequence_in_two_micro_batches_is_refused() -> None:
    with pytest.raises(BatchError, match=r"\[10\] are in more than one"):
        pack(make_batch([2, 2], [1, 1]), [[10], [20, 10]])


def test_a_response_without_prompt_is_refused() -> None:
    with pytest.raises(BatchError, match=r"\[20\] start with a response token"):
        pack(make_batch([2, 0], [1, 3]), [[10, 20]])
