"""What a generate call of SGLang (0.5.23) holds, and what its answer means."""

from collections.abc import Mapping, Sequence
from typing import Any

from megappo.config.rollout import SamplingConfig
from megappo.rollout.continuation import OpenSample
from megappo.rollout.engine import FinishReason, GenerateRequest, SampledResponse, VersionSpan
from megappo.rollout.stopping import StopStrings


def generate_body(
    request: GenerateRequest, samples: Sequence[OpenSample], sampling: SamplingConfig, *, end_tokens: Sequence[int]
) -> dict[str, object]:
    """Return the body of the call that draws the open samples of one request.

    Samples that start anew are one prompt with `n`, which SGLang computes once before it draws; each that goes on is a
    prompt of its own.
    """
    settings: dict[str, object] = {
        "temperature": 0.0 if request.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": [*end_tokens, *sampling.stop_token_ids],
        "stop": sampling.stop or None,
    }
    if not any(sample.begun for sample in samples):
        return {
            "input_ids": request.prompt_tokens,
            "sampling_params": settings | {"n": len(samples), "max_new_tokens": sampling.max_new_tokens},
            "return_logprob": True,
        }
    return {
        "input_ids": [request.prompt_tokens + sample.begun for sample in samples],
        "sampling_params": [settings | {"max_new_tokens": sample.budget} for sample in samples],
        "return_logprob": True,
    }


def read_answer(
    answer: Any,  # Any: decoded JSON
    samples: Sequence[OpenSample],
    *,
    end_tokens: Sequence[int],
    strings: StopStrings | None,
) -> dict[int, SampledResponse]:
    """Return what was drawn, by number of the sample."""
    answers = answer if isinstance(answer, list) else [answer]  # a list only for several
    return {
        sample.sample: _settle(_response(content), sample.begun[sample.call_start :], end_tokens, strings)
        for sample, content in zip(samples, answers, strict=True)
    }


def _response(content: Mapping[str, Any]) -> SampledResponse:  # Any: decoded JSON
    tokens, meta = content["output_ids"], content["meta_info"]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return SampledResponse(
        tokens=tokens,
        log_probs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
        versions=[VersionSpan(version=int(span["version"]), tokens=span["end"] - span["start"]) for span in spans],
    )


def _settle(
    response: SampledResponse, begun: list[int], end_tokens: Sequence[int], strings: StopStrings | None
) -> SampledResponse:
    """Return the response as it would have ended by itself.

    SGLang reports a sample that reached its end in the step of its abort as aborted, and looks for a stop string in a
    few tokens only, of which those that were begun are none.
    """
    end = None if strings is None else strings.end(begun + response.tokens, start=len(begun))
    if end is not None:
        return _cut(response, end - len(begun))
    if response.finish_reason is FinishReason.abort and response.tokens and response.tokens[-1] in end_tokens:
        return _cut(response, len(response.tokens))
    return response


def _cut(response: SampledResponse, length: int) -> SampledResponse:
    """Return the first tokens of a response, as one that stopped there."""
    versions: list[VersionSpan] = []
    left = length
    for span in response.versions:
        versions.append(VersionSpan(version=span.version, tokens=min(span.tokens, left)))
        left -= versions[-1].tokens
    return SampledResponse(
        tokens=response.tokens[:length],
        log_probs=response.log_probs[:length],
        finish_reason=FinishReason.stop,
        versions=versions,
    )
