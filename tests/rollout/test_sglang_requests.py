"""What is asked of SGLang's /generate and how its answers are read, without a server."""

from typing import Any

import pytest

from megappo.config.rollout import SamplingConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.rollout.continuation import OpenSample
from megappo.rollout.engine import FinishReason, GenerateRequest, SampledResponse, VersionSpan
from megappo.rollout.sglang_limits import request_limits
from megappo.rollout.sglang_requests import generate_body, read_answer
from megappo.rollout.stopping import StopStrings
from tests.rollout.conftest import make_model

TOKENIZER = character_tokenizer("abcdef")  # > is 3, a is 4, b is 5, ...


def answer(tokens: list[int], reason: str, versions: list[tuple[str, int, int]]) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [(-0.25 * token, token, None) for token in tokens],
            "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in versions],
            "weight_version": versions[-1][0],
        },
    }


def read(content: dict[str, Any], *, begun: list[int] | None = None, stop: str = "") -> SampledResponse:
    sample = OpenSample(sample=5, begun=begun or [], budget=9)
    strings = StopStrings([stop], TOKENIZER) if stop else None
    return read_answer(content, [sample], end_tokens=[1, 2], strings=strings)[5]


def test_samples_that_start_anew_share_a_prompt_and_others_bring_what_they_have() -> None:
    request = GenerateRequest(group_id=1, prompt_tokens=[7, 8], num_samples=3)
    sampling = SamplingConfig(max_new_tokens=9, min_p=0.1, stop_token_ids=[6], stop=["ab"])
    fresh = [OpenSample(sample=number, begun=[], budget=9) for number in range(3)]
    body: Any = generate_body(request, fresh, sampling, end_tokens=[1, 2])
    assert body["input_ids"] == [7, 8]
    settings = body["sampling_params"]
    assert (settings["n"], settings["max_new_tokens"], settings["min_p"]) == (3, 9, 0.1)
    assert (settings["stop_token_ids"], settings["stop"]) == ([1, 2, 6], ["ab"])
    begun = [OpenSample(sample=0, begun=[5, 6], budget=7), OpenSample(sample=2, begun=[], budget=9)]
    body = generate_body(request, begun, sampling, end_tokens=[1, 2])
    assert body["input_ids"] == [[7, 8, 5, 6], [7, 8]]
    assert [settings["max_new_tokens"] for settings in body["sampling_params"]] == [7, 9]
    assert not any("n" in settings for settings in body["sampling_params"])


def test_an_answer_holds_log_probs_and_the_version_of_every_token() -> None:
    found = read(answer([4, 5, 6], "length", [("7", 0, 1), ("8", 1, 3)]))
    assert found.tokens == [4, 5, 6]
    assert found.log_probs == [-1.0, -1.25, -1.5]
    assert found.finish_reason is FinishReason.length
    assert found.versions == [VersionSpan(version=7, tokens=1), VersionSpan(version=8, tokens=2)]
    empty: Any = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "8"}}
    assert (read(empty).tokens, read(empty).log_probs) == ([], [])


@pytest.mark.parametrize(
    ("tokens", "reason", "begun", "stop", "expected", "stopped"),
    [
        ([4, 1], "abort", [], "", [4, 1], True),  # aborted in the step that drew the end token
        ([4, 6], "abort", [], "", [4, 6], False),
        ([5, 6, 7], "abort", [4], "ab", [5], True),  # "a" was begun, "b" completes the string
        ([4, 4, 5, 6, 4, 5], "length", [], "ab", [4, 4, 5], True),  # the server found it late
        ([4, 4], "length", [5], "ab", [4, 4], False),
    ],
)
def test_a_response_ends_where_it_would_have_ended_by_itself(
    tokens: list[int], reason: str, begun: list[int], stop: str, expected: list[int], stopped: bool
) -> None:
    half = len(tokens) // 2
    found = read(answer(tokens, reason, [("1", 0, half), ("2", half, len(tokens))]), begun=begun, stop=stop)
    assert found.tokens == expected
    assert len(found.log_probs) == len(expected) == sum(span.tokens for span in found.versions)
    assert found.finish_reason is (FinishReason.stop if stopped else FinishReason(reason))


def test_the_limit_is_the_smallest_of_positions_context_and_cache(tmp_path: Any) -> None:
    folder = make_model(tmp_path / "model", seed=0)  # 128 positions
    found = [
        request_limits({"context_length": context, "max_total_num_tokens": cache}, folder).tokens
        for context, cache in ((134, 8192), (None, 8192), (100, 8192), (134, 80))
    ]
    assert found == [128, 122, 94, 74]
