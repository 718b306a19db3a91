"""Arguments of one request to the training workers of one data-parallel rank.

Micro-batches are lists of sequence ids; an empty list is an explicit filler micro-batch, so that every rank runs the
same number of collectives.
"""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class Whitening:
    """Advantages become (A - mean) * inverse_std on the loss mask."""

    mean: float
    inverse_std: float


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenSelection:
    """The loss tokens whose key reaches the threshold get other treatment (clip_cov, kl_cov); made once per update,
    so it does not depend on micro-batches or ranks. Keys: see `megappo.algo.selection`."""

    mean_log_prob: float
    """Mean old log-prob over the loss tokens of the step."""
    mean_advantage: float
    """Mean advantage before whitening over the loss tokens of the step."""
    scale: float
    """Inverse standard deviation of the whitening, else 1."""
    threshold: float


@dataclass(kw_only=True, slots=True, frozen=True)
class MiniBatch:
    """One optimizer step of one rank."""

    micro_batches: list[list[int]]
    """Sequence ids per micro-batch."""
    loss_weights: dict[int, float]
    """Sequence id -> weight of each of its loss tokens: loss = sum of weight * token loss over all ranks.
    Computed from the counts of the whole mini-batch over all ranks, so no rank needs to know another."""


@dataclass(kw_only=True, slots=True, frozen=True)
class UpdateRequest:
    """One update phase: the mini-batches in order, each used once per epoch."""

    mini_batches: list[MiniBatch]
    epochs: int = 1
    whitening: Whitening | None = None
    """Of the advantages (actor only)."""
    selection: TokenSelection | None = None
    """Of tokens, for policy losses that select some (actor only)."""
