"""The check of prompts before they reach a model."""

from collections.abc import Sequence

from megappo.errors import EngineError
from megappo.rollout.engine import GenerateRequest


def check_prompts(requests: Sequence[GenerateRequest], *, vocabulary: int, name: str) -> None:
    """Raise EngineError for an empty prompt or a token id that the model has no embedding for.

    Neither SGLang (whose scheduler dies of it when it has no tokenizer) nor transformers checks this.

    Args:
        vocabulary: number of embeddings of the model.
        name: the engine's, for the error.
    """
    for request in requests:
        tokens = request.prompt_tokens
        if not tokens:
            raise EngineError(f"{name}: generate: the prompt of group {request.group_id} has no tokens")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise EngineError(
                f"{name}: generate: the prompt of group {request.group_id} holds token {wrong}, and the model has "
                f"{vocabulary} (check that prompts were made with the tokenizer of model.path)"
            )
