"""The inputs, in the layouts of both sides: padded tensors for the peer, packed batches for us.

Shapes: B sequences, P padded prompt tokens, T padded response tokens, N packed tokens (prompts and responses).
"""

from dataclasses import dataclass

import numpy as np
import torch

from megappo.batch.fields import offsets_of, token_index
from megappo.batch.stages import RolloutBatch, TokenField

SAMPLES = 8
"""Samples per prompt."""


def draw_lengths(
    count: int, *, median: float = 2048, sigma: float = 0.9, longest: int = 16384, seed: int = 0
) -> np.ndarray:
    """Return lognormal lengths of at least 16 and at most `longest`, [count] int64."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(median), sigma, count))
    return np.clip(drawn, 16, longest).astype(np.int64)


@dataclass(kw_only=True, frozen=True)
class PaddedResponses:
    """Responses as the peer holds them, all [B, T] float32 unless said otherwise; 0 off the mask."""

    lengths: np.ndarray
    """[B] int64: tokens of each response."""
    mask: torch.Tensor
    """bool, True on the response."""
    rewards: torch.Tensor
    """0 or 1 on the last token."""
    values: torch.Tensor

    @property
    def scores(self) -> np.ndarray:
        """[B] float64."""
        return self.rewards.sum(dim=1).numpy().astype(np.float64)


def draw_responses(num_sequences: int, padded_to: int, *, seed: int = 0) -> PaddedResponses:
    """Return responses with a median length of an eighth of the padding."""
    lengths = draw_lengths(num_sequences, median=padded_to / 8, longest=padded_to, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ends = torch.from_numpy(lengths)[:, None]
    mask = torch.arange(padded_to)[None] < ends
    rewards = torch.zeros(num_sequences, padded_to)
    rewards.scatter_(1, ends - 1, torch.bernoulli(torch.full((num_sequences, 1), 0.5), generator=generator))
    values = torch.randn(num_sequences, padded_to, generator=generator) * mask
    return PaddedResponses(lengths=lengths, mask=mask, rewards=rewards, values=values)


def draw_prompt_lengths(num_sequences: int, longest: int) -> np.ndarray:
    """Return prompt lengths around 300, [B] int64 (the samples of a prompt are not held to one length)."""
    return draw_lengths(num_sequences, median=300, sigma=0.5, longest=longest, seed=1)


class PackedResponses:
    """The same sequences packed: prompt and response of each in one run, per-token fields in the same order."""

    def __init__(self, responses: PaddedResponses, prompt_lengths: np.ndarray) -> None:
        self._responses = responses
        offsets = offsets_of(prompt_lengths + responses.lengths)
        count = len(responses.lengths)
        # Prompt and response as sequences of their own, of which every other one is a response.
        halves = offsets_of(np.stack([prompt_lengths, responses.lengths], axis=1).reshape(-1))
        self._response_index = token_index(halves, np.arange(1, 2 * count, 2))
        mask = np.zeros(offsets[-1], dtype=bool)
        mask[self._response_index] = True
        self.batch = RolloutBatch(
            offsets=offsets,
            tokens=np.arange(offsets[-1], dtype=np.int32),
            response_mask=mask,
            rollout_log_probs=np.zeros(offsets[-1], dtype=np.float32),
            sequence_ids=np.arange(count),
            group_ids=np.repeat(np.arange(-(-count // SAMPLES)), SAMPLES)[:count],
        )

    def field(self, padded: torch.Tensor) -> TokenField:
        """Return a padded field [B, T] as a packed one."""
        values = np.zeros(self.batch.num_tokens, dtype=np.float32)
        values[self._response_index] = padded[self._responses.mask].numpy()
        return TokenField(offsets=self.batch.offsets, values=values, sequence_ids=self.batch.sequence_ids)

    def responses_of(self, values: np.ndarray) -> np.ndarray:
        """Return packed values [N] at the response tokens, in order."""
        return values[self._response_index]
