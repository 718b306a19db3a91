"""The check of requests before they reach a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config.rollout import SamplingConfig
from megappo.errors import RequestError
from megappo.rollout.engine import GenerateRequest


@dataclass(kw_only=True, slots=True, frozen=True)
class RequestLimits:
    """What an engine can take."""

    vocabulary: int
    """Embeddings of the model."""
    tokens: int | None
    """Longest prompt and response together; None: there is no limit."""
    reason: str
    """Where the limit comes from."""


def check_requests(
    requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, limits: RequestLimits, name: str
) -> None:
    """Raise RequestError for what the model cannot read: an empty prompt, a token without an embedding (what was begun
    included), a prompt that leaves no room for the response.

    SGLang's scheduler dies of the first two when it has no tokenizer, and cuts a response that has no room;
    transformers checks nothing.

    Args:
        name: the engine's, for the error.
    """
    strange = [token for token in sampling.stop_token_ids if not 0 <= token < limits.vocabulary]
    if strange:
        raise RequestError(
            f"{name}: generate: stop_token_ids holds {strange[0]}, and the model has {limits.vocabulary} tokens"
        )
    for request in requests:
        problem = _problem(request, sampling.max_new_tokens, limits)
        if problem is not None:
            row = "" if request.row is None else f" (data row {request.row})"
            raise RequestError(f"{name}: generate: the prompt of group {request.group_id}{row} {problem}")


def _without_embedding(tokens: Sequence[int], limits: RequestLimits) -> int | None:
    """Return the first token that the model does not know."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < limits.vocabulary):
        return None
    return next(token for token in tokens if not 0 <= token < limits.vocabulary)


def _problem(request: GenerateRequest, max_new_tokens: int, limits: RequestLimits) -> str | None:
    """Return what is wrong with a request."""
    tokens = request.prompt_tokens
    if not tokens:
        return "has no tokens"
    wrong = _without_embedding(tokens, limits)
    if wrong is not None:
        return (
            f"holds token {wrong}, and the model has {limits.vocabulary} "
            "(check that prompts were made with the tokenizer of model.path)"
        )
    for response in request.begun:
        wrong = _without_embedding(response.tokens, limits)
        if wrong is not None:
            return (
                f"is followed by token {wrong}, and the model has {limits.vocabulary} "
                "(check what rollout.agent puts between turns)"
            )
    if limits.tokens is not None and len(tokens) + max_new_tokens > limits.tokens:
        return (
            f"has {len(tokens)} tokens, which with max_new_tokens={max_new_tokens} is more than the "
            f"{limits.tokens} of {limits.reason} (use a smaller data.max_prompt_tokens or max_new_tokens)"
        )
    return None
