"""Prompt/answer pairs for supervised training."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megappo.batch.fields import offsets_of
from megappo.batch.stages import RolloutBatch
from megappo.data.tokenizer import encode_all
from megappo.data.types import Prompt
from megappo.errors import DataError


def supervised_pairs(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> RolloutBatch:
    """Return prompt, answer and end token of each prompt as a packed batch; the response mask is True on the answer
    and the end token. Sequence and group ids are positions in `prompts`; log-probs are 0.

    Raises:
        DataError: a prompt has no answer, or the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("supervised pairs: the tokenizer has no end token (set eos_token in tokenizer_config.json)")
    without = next((prompt for prompt in prompts if prompt.answer is None), None)
    if without is not None:
        raise DataError(f"supervised pairs: {without.source} row {without.row} has no answer (set answer_column)")
    encoded = encode_all(tokenizer, [str(prompt.answer) for prompt in prompts])
    answers = [[*ids, tokenizer.eos_token_id] for ids in encoded]
    parts = [part for prompt, answer in zip(prompts, answers) for part in (prompt.tokens, answer)]
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    ids = np.arange(len(prompts), dtype=np.int64)
    return RolloutBatch(
        offsets=offsets_of(lengths.reshape(-1, 2).sum(axis=1)),
        tokens=np.array([token for part in parts for token in part], dtype=np.int32),
        response_mask=np.repeat(np.tile([False, True], len(prompts)), lengths),
        rollout_log_probs=np.zeros(int(lengths.sum()), dtype=np.float32),
        sequence_ids=ids,
        group_ids=ids,
    )
