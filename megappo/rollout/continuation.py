"""Going on with what an aborted call left: which samples are still to be drawn, and how old and new tokens join."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megappo.config.rollout import RolloutConfig
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, SampledResponse, VersionSpan

INTERRUPT_S = 20.0
"""How long what is interrupted at `rollout.request_timeout_s` may take to come back."""

_NOTHING = SampledResponse(tokens=[], log_probs=[], finish_reason=FinishReason.abort, versions=[])


def no_token(config: RolloutConfig) -> str:
    """Return what is wrong with a call that was interrupted before it had sampled anything."""
    return (
        f"not one token within rollout.request_timeout_s={config.request_timeout_s:g} (raise it if prompts alone take "
        "longer)"
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class OpenSample:
    """A sample of a request that is not finished."""

    sample: int
    """Its number within the request."""
    begun: list[int]
    """The response tokens it has."""
    budget: int
    """Most tokens it may still get, 1 or more."""
    call_start: int = 0
    """Where in `begun` the tokens of the call that goes on begin: stop strings are looked for from there."""


def open_samples(request: GenerateRequest, max_new_tokens: int) -> list[OpenSample]:
    """Return the samples of a request that an engine has to draw tokens for."""
    begun = request.begun or [_NOTHING] * request.num_samples
    return [
        OpenSample(
            sample=number,
            begun=response.tokens,
            budget=max_new_tokens - len(response.tokens),
            call_start=response.call_start,
        )
        for number, response in enumerate(begun)
        if response.finish_reason is FinishReason.abort and len(response.tokens) < max_new_tokens
    ]


def join_group(
    request: GenerateRequest, drawn: Mapping[int, SampledResponse], *, max_new_tokens: int, version_in_use: int
) -> GroupOutput:
    """Put the tokens just drawn behind those that were begun.

    Args:
        drawn: by number of the sample; one that is missing has got no further.
        version_in_use: the version of a group without any token.
    """
    begun = request.begun or [_NOTHING] * request.num_samples
    responses = [
        _joined(response, drawn.get(number, _NOTHING), max_new_tokens) for number, response in enumerate(begun)
    ]
    versions = [span.version for response in responses for span in response.versions]
    return GroupOutput(
        group_id=request.group_id, responses=responses, policy_version=min(versions, default=version_in_use)
    )


def has_news(request: GenerateRequest, output: GroupOutput) -> bool:
    """Whether a group came back with more than was begun of it."""
    begun = request.begun or [_NOTHING] * request.num_samples
    return any(old != new for old, new in zip(begun, output.responses, strict=True))


def _joined(begun: SampledResponse, drawn: SampledResponse, max_new_tokens: int) -> SampledResponse:
    if begun.finish_reason is not FinishReason.abort:
        return begun
    tokens = begun.tokens + drawn.tokens
    # An engine may abort a sample in the step that used up its budget.
    used_up = drawn.finish_reason is FinishReason.abort and len(tokens) >= max_new_tokens
    reason = FinishReason.length if used_up else drawn.finish_reason
    turns = begun.turns
    if turns:
        last = turns[-1]
        turns = [*turns[:-1], replace(last, sampled=last.sampled + len(drawn.tokens), finish_reason=reason)]
    return replace(
        begun,
        tokens=tokens,
        log_probs=begun.log_probs + drawn.log_probs,
        finish_reason=reason,
        versions=_merged([*begun.versions, *drawn.versions]),
        turns=turns,
    )


def _merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Join neighbours of one version; leave empty spans out."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(version=span.version, tokens=merged[-1].tokens + span.tokens)
        elif span.tokens:
            merged.append(span)
    return merged
