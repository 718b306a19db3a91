"""The view of a sequence of a rollout program: places of tokens as in the sequence, numbers for the sampled ones."""

import numpy as np

from megappo.batch.stages import Experience
from megappo.controller import parity_dump


def test_tokens_between_turns_have_their_place_and_no_numbers() -> None:
    mask = np.array([False, False, True, False, True, True, False])
    experience = Experience(
        offsets=np.array([0, 7]),
        tokens=np.arange(10, 17, dtype=np.int32),
        response_mask=mask,
        rollout_log_probs=np.array([9, 9, -1, 9, -2, -3, 9], dtype=np.float32),
        sequence_ids=np.array([5]),
        group_ids=np.array([1]),
        loss_mask=mask,
        advantages=np.zeros(7, dtype=np.float32),
        old_log_probs=np.array([0, 0, -1, 0, -2.5, -3, 0], dtype=np.float32),
    )
    shown = parity_dump.show_tokens(experience, decode=None)
    assert (shown["prompt_tokens"], shown["response_tokens"]) == ([10, 11], [12, 13, 14, 15, 16])
    assert shown["rollout_log_probs"] == [-1.0, None, -2.0, -3.0, None]
    assert shown["training_log_probs"] == [-1.0, None, -2.5, -3.0, None]
    assert shown["worst_token"] == 2
