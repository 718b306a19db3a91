"""Sampling with a transformers model: choosing tokens, seeds, batches."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.rollout.engine import GenerateRequest, SampledResponse
from megappo.rollout.hf_decoding import GROUPED_ATTENTION, grouped_attention, make_room
from megappo.rollout.hf_engine import MAX_BATCH_BYTES, cut_into_batches
from megappo.rollout.hf_sampling import SamplingCancelled, choose_tokens, sample_responses

PROBABILITIES = [0.5, 0.2, 0.05, 0.25]


def choose(number: float, **sampling: float) -> tuple[int, float]:
    logits = torch.tensor([PROBABILITIES]).log()
    config = SamplingConfig(**sampling)  # type: ignore[arg-type]
    tokens, log_probs = choose_tokens(logits, config, torch.tensor([number], dtype=torch.float64))
    return int(tokens[0]), float(log_probs[0].exp())


@pytest.mark.parametrize(
    ("number", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.69, 1), (0.71, 2), (0.74, 2), (0.76, 3), (0.999999, 3)]
)
def test_a_token_is_where_the_cumulative_distribution_passes_the_number(number: float, token: int) -> None:
    chosen, probability = choose(number)
    assert chosen == token
    assert probability == pytest.approx(PROBABILITIES[token], abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "number", "token"),
    [
        # left: 0 and 3, so 2/3 and 1/3
        ({"top_k": 2}, 0.66, 0),
        ({"top_k": 2}, 0.67, 3),
        # 0.5 < 0.6 keeps the second likeliest, 0.75 does not keep the third
        ({"top_p": 0.6}, 0.66, 0),
        ({"top_p": 0.6}, 0.67, 3),
        # of what top_k leaves, the likeliest holds 2/3, more than 0.6
        ({"top_k": 2, "top_p": 0.6}, 0.999, 0),
        ({"top_k": 4, "top_p": 1.0}, 0.72, 2),
        ({"temperature": 0.0}, 0.999, 0),
    ],
)
def test_filters_leave_tokens_out_and_log_probs_alone(sampling: dict[str, float], number: float, token: int) -> None:
    chosen, probability = choose(number, **sampling)
    assert chosen == token
    assert probability == pytest.approx(PROBABILITIES[token], abs=1e-6)


def test_temperature_sharpens_log_probs() -> None:
    _, probability = choose(0.0, temperature=0.5)
    squares = [probability**2 for probability in PROBABILITIES]
    assert probability == pytest.approx(squares[0] / sum(squares), abs=1e-6)


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folders[0], dtype=torch.float32, attn_implementation=GROUPED_ATTENTION
    ).eval()


def sample(model: PreTrainedModel, requests: list[GenerateRequest], seed: int) -> list[list[SampledResponse]]:
    return sample_responses(
        model,
        requests,
        SamplingConfig(max_new_tokens=20),
        end_tokens=torch.tensor([1, 2]),
        seed=seed,
        cancelled=lambda: False,
    )


def requests_of(*group_ids: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(group_id=group, prompt_tokens=[10 + group] * (1 + group), num_samples=4 + group)
        for group in group_ids
    ]


def tokens_of(groups: list[list[SampledResponse]]) -> list[list[list[int]]]:
    return [[response.tokens for response in group] for group in groups]


def test_the_seed_and_the_group_decide_the_samples_whatever_else_is_in_the_batch(model: PreTrainedModel) -> None:
    together = tokens_of(sample(model, requests_of(0, 1, 2), seed=5))
    assert [len(group) for group in together] == [4, 5, 6]
    assert together == tokens_of(sample(model, requests_of(0, 1, 2), seed=5))
    assert together[2] == tokens_of(sample(model, requests_of(2), seed=5))[0]
    assert together != tokens_of(sample(model, requests_of(0, 1, 2), seed=6))


def test_sampling_ends_when_it_is_cancelled(model: PreTrainedModel) -> None:
    asked = iter([False, False, True])
    with pytest.raises(SamplingCancelled):
        sample_responses(
            model,
            requests_of(3),
            SamplingConfig(max_new_tokens=20),
            end_tokens=torch.tensor([], dtype=torch.long),
            seed=0,
            cancelled=lambda: next(asked),
        )


def test_a_roomy_cache_holds_what_concatenation_would(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    cache = DynamicCache(config=model.config)
    first = [torch.randn(2, 2, 3, 16) for _ in range(2)]
    for layer in range(2):
        cache.update(first[layer], first[layer] + 1, layer)
    rows, kept = torch.tensor([0, 0, 1]), torch.tensor([2, 0])
    make_room(cache, rows, capacity=6)
    second, third = torch.randn(3, 2, 1, 16), torch.randn(2, 2, 1, 16)
    for layer in range(2):
        cache.update(second, second + 1, layer)
    cache.batch_select_indices(kept)
    for layer in range(2):
        keys, values = cache.update(third, third + 1, layer)
        expected = torch.cat([torch.cat([first[layer][rows], second], 2)[kept], third], 2)
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected + 1)
    assert cache.get_seq_length() == 5


def test_grouped_attention_equals_repeated_heads_under_a_mask() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 3, 5) > 0.3
    mask[..., 0] = True
    attended, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(attended, expected.transpose(1, 2), atol=1e-6, rtol=0)


def test_batches_stay_below_the_limit_and_keep_every_request_in_order() -> None:
    requests = [
        GenerateRequest(group_id=index, prompt_tokens=[0] * length, num_samples=samples)
        for index, (length, samples) in enumerate([(10, 2), (20, 2), (10, 4), (90, 1), (10, 1)])
    ]
    # A row of t tokens takes t hundredths of the limit: with 10 new tokens 20 + 20, 30 + 30, 4 x 20, 100, 20
    batches = cut_into_batches(
        requests, 10, row_bytes=partial(lambda share, tokens: share * tokens, MAX_BATCH_BYTES // 100)
    )
    # 2 x 20 alone; 4 rows padded to 30 are 120; 2 x 30 with 4 x 20 are 6 x 30; 4 x 20 with 1 x 100 are 5 x 100
    assert [[request.group_id for request in batch] for batch in batches] == [[0], [1], [2], [3], [4]]
    even = [GenerateRequest(group_id=index, prompt_tokens=[0] * 10, num_samples=2) for index in range(5)]
    batches = cut_into_batches(even, 10, row_bytes=lambda tokens: MAX_BATCH_BYTES // 100 * tokens)
    assert [[request.group_id for request in batch] for batch in batches] == [[0, 1], [2, 3], [4]]
