"""Random experience, and how it is dealt over ranks and micro-batches."""

import numpy as np

from megappo.batch.fields import offsets_of
from megappo.batch.requests import MiniBatch, UpdateRequest, Whitening
from megappo.batch.stages import Experience, RolloutBatch

VOCAB = 64
WHITENING = Whitening(mean=0.1, inverse_std=0.8)

MicroBatches = list[list[int]]


def make_experience(seed: int = 0, num_sequences: int = 8) -> Experience:
    """Uneven sequences with every optional field. The third has no response, the fifth none of its tokens in the loss;
    every second one that is long enough has tokens within its response that were not sampled.

    Numbers off the masks are NaN: nothing may read them.
    """
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 6, num_sequences)
    responses = random.integers(1, 12, num_sequences)
    responses[2] = 0
    lengths = prompts + responses
    response_mask = np.concatenate([np.arange(length) >= prompt for length, prompt in zip(lengths, prompts)])
    for end, response in zip(np.cumsum(lengths)[::2], responses[::2]):
        if response > 4:
            response_mask[end - response + 2 : end - 2] = False
    loss_mask = response_mask & (random.random(len(response_mask)) < 0.8)
    loss_mask[lengths[:4].sum() : lengths[:5].sum()] = False

    def numbers(mask: np.ndarray, low: float, high: float) -> np.ndarray:
        return np.where(mask, random.uniform(low, high, len(mask)), np.nan).astype(np.float32)

    return Experience(
        offsets=offsets_of(lengths),
        tokens=random.integers(0, VOCAB, len(response_mask)).astype(np.int32),
        response_mask=response_mask,
        rollout_log_probs=numbers(response_mask, -5, -1),
        sequence_ids=10 + 3 * np.arange(num_sequences),
        group_ids=np.arange(num_sequences) // 2,
        loss_mask=loss_mask,
        advantages=numbers(response_mask, -2, 2),
        old_log_probs=numbers(response_mask, -5, -3.4),
        ref_log_probs=numbers(response_mask, -5, -3.4),
        values=numbers(response_mask, -1, 1),
        returns=numbers(response_mask, -1, 1),
        correction_weights=numbers(response_mask, 0.5, 2),
    )


def rollouts_of(experience: Experience) -> RolloutBatch:
    """The sampled part of the experience."""
    return RolloutBatch(
        offsets=experience.offsets,
        tokens=experience.tokens,
        response_mask=experience.response_mask,
        rollout_log_probs=experience.rollout_log_probs,
        sequence_ids=experience.sequence_ids,
        group_ids=experience.group_ids,
    )


def weights_of(experience: Experience) -> dict[int, float]:
    """A weight of its own for each sequence."""
    return {sequence: 0.02 + 0.01 * (index % 3) for index, sequence in enumerate(experience.sequence_ids.tolist())}


def request_of(
    experience: Experience, micro_batches: MicroBatches, *, epochs: int = 1, whitening: Whitening | None = WHITENING
) -> UpdateRequest:
    """One optimizer step per epoch on the given sequences."""
    return UpdateRequest(
        mini_batches=[MiniBatch(micro_batches=micro_batches, loss_weights=weights_of(experience))],
        epochs=epochs,
        whitening=whitening,
    )
