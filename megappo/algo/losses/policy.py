"""The loss of the policy on one micro-batch: policy loss, KL in loss, entropy bonus, metrics.

Shapes: n packed tokens of a micro-batch, m of them on the loss mask. loss = sum over the m tokens of weight * token
loss; with the weights of `megappo.algo.aggregation` the parts of all micro-batches and ranks add up to the loss of
the mini-batch, for any order and split.
"""

import torch
from torch import Tensor

from megappo.algo.kl import compute_kl, k3_is_capped, widen
from megappo.algo.losses.base import LossInputs, LossOutput, PolicyLoss, PolicyLossBatch, TokenLosses, poison
from megappo.config.algorithm import AlgorithmConfig, OldLogProbs
from megappo.observability.metrics import Kind, Metrics, Stat

_Number = tuple[Kind, Tensor] | tuple[Kind, Tensor, Tensor]
"""How a metric merges, the sum or extreme over the loss tokens, and how many there are if not all of them."""


def compute_loss(log_probs: Tensor, batch: PolicyLossBatch, algorithm: AlgorithmConfig, loss: PolicyLoss) -> LossOutput:
    """Return the micro-batch's part of the loss and its metrics; `losses.compute_policy_loss` looks up `loss`.

    Means of metrics are over loss tokens, except `actor/policy_loss`, `actor/kl_loss` and `actor/entropy_loss`, which
    are weighted by loss weight (for aggregations that average, the loss itself).
    """
    index = batch.loss_mask.nonzero(as_tuple=True)[0]
    inputs = _inputs(widen(log_probs[index]), index, batch)
    weights = _pick(batch.loss_weights, index, inputs.log_probs)
    token_losses = loss.function(inputs, algorithm.policy_loss)
    losses = token_losses.losses
    if batch.correction_weights is not None:
        losses = losses * _pick(batch.correction_weights, index, losses)
    terms = {"actor/policy_loss": losses}
    numbers = _ratio_numbers(inputs, token_losses, batch.is_first_step and batch.old_log_probs is not None)
    numbers |= _rollout_numbers(inputs, batch, index, algorithm)
    read = [inputs.old_log_probs, inputs.advantages]
    if batch.entropy is not None:
        entropy = widen(batch.entropy[index])
        numbers["actor/entropy/mean"] = (Kind.mean, entropy.detach().sum())
        if algorithm.entropy.coef != 0:
            terms["actor/entropy_loss"] = -algorithm.entropy.coef * entropy
    if algorithm.kl.in_loss.coef > 0:
        assert batch.ref_log_probs is not None, "KL in loss needs reference log-probs"
        difference = inputs.log_probs - _pick(batch.ref_log_probs, index, losses)
        kl, kl_numbers = _kl_in_loss(difference, algorithm.kl.in_loss.estimator)
        terms["actor/kl_loss"] = algorithm.kl.in_loss.coef * kl
        numbers |= kl_numbers
        read.append(difference.detach())
    parts = torch.stack([(weights * term).sum() for term in terms.values()])
    read += [term.detach() for term in terms.values()]
    total = parts.sum() + (weights * poison(inputs.log_probs, read)).sum()
    return LossOutput(loss=total, metrics=_collect(numbers, dict(zip(terms, parts.detach())), weights))


def _inputs(current: Tensor, index: Tensor, batch: PolicyLossBatch) -> LossInputs:
    old = current.detach() if batch.old_log_probs is None else _pick(batch.old_log_probs, index, current)
    return LossInputs(
        log_probs=current,
        old_log_probs=old,
        advantages=_pick(batch.advantages, index, current),
        sequence=torch.searchsorted(batch.offsets[1:], index, right=True),
        num_sequences=len(batch.offsets) - 1,
        selected=None if batch.selected is None else batch.selected[index],
    )


def _pick(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    return values[index].to(like.dtype)


def _kl_in_loss(difference: Tensor, estimator: str) -> tuple[Tensor, dict[str, _Number]]:
    """Return the KL per token [m] and its numbers; difference [m] is policy minus reference log-prob."""
    kl = compute_kl(difference, estimator)
    numbers: dict[str, _Number] = {"actor/kl/mean": (Kind.mean, kl.detach().sum())}
    if estimator.startswith("k3"):
        numbers["kl/capped_fraction"] = (Kind.mean, k3_is_capped(difference.detach()).sum())
    return kl, numbers


def _ratio_numbers(inputs: LossInputs, token_losses: TokenLosses, first_step: bool) -> dict[str, _Number]:
    moved = (inputs.log_probs - inputs.old_log_probs).detach()
    numbers: dict[str, _Number] = {"actor/approx_kl": (Kind.mean, compute_kl(-moved, "k3").sum())}
    if first_step and len(moved):
        numbers["actor/first_step_log_ratio/max"] = (Kind.max, moved.abs().max())
    if token_losses.ratio is not None and len(moved):
        numbers["actor/ratio/mean"] = (Kind.mean, token_losses.ratio.sum())
        numbers["actor/ratio/min"] = (Kind.min, token_losses.ratio.min())
        numbers["actor/ratio/max"] = (Kind.max, token_losses.ratio.max())
    if token_losses.clipped is not None:
        numbers["actor/clip_fraction"] = (Kind.mean, token_losses.clipped.sum())
    if token_losses.dual_clipped is not None:
        numbers["actor/dual_clip_fraction"] = (Kind.mean, token_losses.dual_clipped.sum())
    return numbers


def _rollout_numbers(
    inputs: LossInputs, batch: PolicyLossBatch, index: Tensor, algorithm: AlgorithmConfig
) -> dict[str, _Number]:
    """Distance to the rollout engine, by the log-probs of the update's first step, where no pass before the update
    measured it. NaN is what the engine did not report."""
    measured_before = batch.old_log_probs is not None and algorithm.old_log_probs is not OldLogProbs.rollout
    # Without old log-probs the update is one optimizer step.
    moved = batch.old_log_probs is not None and not batch.is_first_step
    if batch.rollout_log_probs is None or measured_before or moved or not len(index):
        return {}
    rollout = _pick(batch.rollout_log_probs, index, inputs.log_probs)
    known = ~rollout.isnan()
    distance = torch.where(known, (inputs.log_probs.detach() - rollout).abs(), 0.0)
    return {
        "actor/rollout_log_prob_diff/max": (Kind.max, distance.max(), known.sum()),
        "actor/rollout_log_prob_diff/mean": (Kind.mean, distance.sum(), known.sum()),
    }


def _collect(numbers: dict[str, _Number], terms: dict[str, Tensor], weights: Tensor) -> Metrics:
    """Bring all numbers to the host in one transfer; each counts the loss tokens, or its own
    number of them."""
    on_device = [number[1].to(weights.dtype) for number in numbers.values()]
    counts = {name: number[2].to(weights.dtype) for name, number in numbers.items() if len(number) > 2}
    host = torch.stack([weights.sum(), *terms.values(), *on_device, *counts.values()]).cpu().numpy()
    term_values, values = host[1 : 1 + len(terms)], host[1 + len(terms) :]
    collected = {name: Stat(Kind.mean, float(value), float(host[0])) for name, value in zip(terms, term_values)}
    own = dict(zip(counts, values[len(numbers) :]))
    for (name, number), value in zip(numbers.items(), values):
        collected[name] = Stat(number[0], float(value), float(own.get(name, len(weights))))
    return collected
