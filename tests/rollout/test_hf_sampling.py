"""Sampling with a transformers model: choosing tokens, seeds, batches."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, VersionSpan
from megappo.rollout.hf_decoding import GROUPED_ATTENTION, grouped_attention, make_room
from megappo.rollout.hf_engine import MAX_BATCH_BYTES, cut_into_batches
from megappo.rollout.hf_rows import ResponseEnds
from megappo.rollout.hf_sampling import SamplingCancelled, SamplingSignals, choose_tokens, sample_responses
from megappo.rollout.stopping import StopStrings

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
        # top_p counts what top_k leaves out: of 0.5, 0.25 and 0.2 the likeliest holds 0.5, not 0.53
        ({"top_k": 3, "top_p": 0.52}, 0.999, 3),
        ({"top_k": 4, "top_p": 1.0}, 0.72, 2),
        # 0.45 * 0.5 leaves out 0.2 and 0.05
        ({"min_p": 0.45}, 0.66, 0),
        ({"min_p": 0.45}, 0.67, 3),
        ({"min_p": 0.3}, 0.73, 1),
        ({"min_p": 0.3}, 0.74, 3),
        ({"temperature": 0.0}, 0.999, 0),
    ],
)
def test_filters_leave_tokens_out_and_log_probs_alone(sampling: dict[str, float], number: float, token: int) -> None:
    chosen, probability = choose(number, **sampling)
    assert chosen == token
    assert probability == pytest.approx(PROBABILITIES[token], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_does_not_come_and_the_log_probs_count_it(temperature: float) -> None:
    logits = torch.tensor([PROBABILITIES]).log()
    forbidden = torch.tensor([[True, False, False, False]])
    tokens, log_probs = choose_tokens(
        logits,
        SamplingConfig(temperature=temperature),
        torch.tensor([0.999], dtype=torch.float64),
        forbidden=forbidden,
    )
    assert tokens.tolist() == [3]
    assert log_probs.exp().tolist() == pytest.approx([0.25])


def test_temperature_sharpens_log_probs() -> None:
    _, probability = choose(0.0, temperature=0.5)
    squares = [probability**2 for probability in PROBABILITIES]
    assert probability == pytest.approx(squares[0] / sum(squares), abs=1e-6)


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folders[0], dtype=torch.float32, attn_implementation=GROUPED_ATTENTION
    ).eval()


def sample(
    model: PreTrainedModel,
    requests: list[GenerateRequest],
    seed: int = 0,
    *,
    sampling: SamplingConfig | None = None,
    strings: StopStrings | None = None,
    version: int = 0,
    steps: int = 1000,
) -> list[GroupOutput]:
    """Sample with the end tokens 1 and 2; abort after so many steps."""
    asked = itertools.count()
    return sample_responses(
        model,
        requests,
        sampling or SamplingConfig(max_new_tokens=20),
        ends=ResponseEnds(tokens=torch.tensor([1, 2]), strings=strings),
        seed=seed,
        version=version,
        signals=SamplingSignals(cancelled=lambda: False, aborted=lambda: next(asked) > steps),
    )


def requests_of(*group_ids: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(group_id=group, prompt_tokens=[10 + group] * (1 + group), num_samples=4 + group)
        for group in group_ids
    ]


def tokens_of(groups: list[GroupOutput]) -> list[list[list[int]]]:
    return [[response.tokens for response in group.responses] for group in groups]


def test_the_seed_and_the_group_decide_the_samples_whatever_else_is_in_the_batch(model: PreTrainedModel) -> None:
    together = tokens_of(sample(model, requests_of(0, 1, 2), seed=5))
    assert [len(group) for group in together] == [4, 5, 6]
    assert together == tokens_of(sample(model, requests_of(0, 1, 2), seed=5))
    assert together[2] == tokens_of(sample(model, requests_of(2), seed=5))[0]
    assert together != tokens_of(sample(model, requests_of(0, 1, 2), seed=6))


def test_aborted_samples_go_on_as_if_they_had_not_been_interrupted(model: PreTrainedModel) -> None:
    whole = sample(model, requests_of(0, 1, 2))
    groups = requests_of(0, 1, 2)
    for version, steps in enumerate((3, 5, 0, 1000)):
        outputs = sample(model, groups, version=version, steps=steps)
        groups = [replace(request, begun=output.responses) for request, output in zip(groups, outputs, strict=True)]
    for output, expected in zip(outputs, whole, strict=True):
        assert output.policy_version == 0
        for response, uninterrupted in zip(output.responses, expected.responses, strict=True):
            assert response.tokens == uninterrupted.tokens
            assert response.finish_reason is uninterrupted.finish_reason
            # float32 sums in another order: the first pass over what was begun is one batch
            assert response.log_probs == pytest.approx(uninterrupted.log_probs, abs=1e-4)
            counts = [
                min(max(len(response.tokens) - start, 0), end - start) for start, end in ((0, 3), (3, 8), (8, 20))
            ]
            spans = zip((0, 1, 3), counts)
            expected_spans = [VersionSpan(version=version, tokens=count) for version, count in spans if count]
            assert response.versions == expected_spans


def test_what_has_not_begun_is_aborted_empty_and_what_is_finished_is_left_alone(model: PreTrainedModel) -> None:
    (empty,) = sample(model, requests_of(2), steps=0, version=7)
    assert [response.tokens for response in empty.responses] == [[]] * 6
    assert {response.finish_reason for response in empty.responses} == {FinishReason.abort}
    assert empty.policy_version == 7
    (finished,) = sample(model, requests_of(2))
    (request,) = requests_of(2)
    again = sample(model, [replace(request, begun=finished.responses)], seed=99, version=8)
    assert again == [finished]


def test_end_tokens_do_not_come_before_the_least_length_also_of_continued_samples(model: PreTrainedModel) -> None:
    sampling = SamplingConfig(max_new_tokens=12, min_new_tokens=9)
    requests = [GenerateRequest(group_id=9, prompt_tokens=[10], num_samples=64)]
    (free,) = sample(model, requests, sampling=SamplingConfig(max_new_tokens=12))
    assert min(len(response.tokens) for response in free.responses) < 5
    (begun,) = sample(model, requests, sampling=sampling, steps=4)
    (output,) = sample(model, [replace(requests[0], begun=begun.responses)], sampling=sampling)
    assert {len(response.tokens) for response in output.responses} >= {10, 12}
    assert not {1, 2} & {token for response in output.responses for token in response.tokens[:9]}


def test_a_response_ends_with_the_token_that_completes_a_stop_string(model: PreTrainedModel) -> None:
    tokenizer = character_tokenizer(map(chr, range(65, 126)))  # token 3 + n is the n-th character
    (free,) = sample(model, requests_of(5))
    texts = [str(tokenizer.decode(response.tokens)) for response in free.responses]
    stop = texts[0][6:9]
    strings = StopStrings([stop], tokenizer)
    (output,) = sample(model, requests_of(5), strings=strings)
    for response, text, before in zip(output.responses, texts, free.responses, strict=True):
        end = text.find(stop)
        length = end + 3 if end >= 0 else len(before.tokens)
        assert response.tokens == before.tokens[:length]
        assert response.finish_reason is (FinishReason.stop if end >= 0 else before.finish_reason)
    (begun,) = sample(model, requests_of(5), strings=strings, steps=8)  # the string is two of three characters
    (request,) = requests_of(5)
    (continued,) = sample(model, [replace(request, begun=begun.responses)], strings=strings)
    assert tokens_of([continued]) == tokens_of([output])


def test_sampling_ends_when_it_is_cancelled(model: PreTrainedModel) -> None:
    asked = iter([False, False, True])
    with pytest.raises(SamplingCancelled):
        sample_responses(
            model,
            requests_of(3),
            SamplingConfig(max_new_tokens=20),
            ends=ResponseEnds(tokens=torch.tensor([], dtype=torch.long), strings=None),
            seed=0,
            version=0,
            signals=SamplingSignals(cancelled=lambda: next(asked), aborted=lambda: False),
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
