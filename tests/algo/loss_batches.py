"""Micro-batches for the tests of the losses, and a brute-force loss written from the formulas, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megappo.algo.aggregation import compute_loss_weights
from megappo.algo.losses import LossOutput, PolicyLossBatch, aggregation_of, compute_policy_loss
from megappo.batch.fields import offsets_of, token_index
from megappo.config.algorithm import Aggregation, AlgorithmConfig, Divergence, PolicyLossConfig

TOKEN_FIELDS = (
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "advantages",
    "correction_weights",
    "entropy",
)


@dataclass
class LossCase:
    """A mini-batch of B sequences with N tokens; every field of TOKEN_FIELDS is [N] float64."""

    offsets: np.ndarray
    loss_mask: np.ndarray
    group_ids: np.ndarray
    selected: np.ndarray
    log_probs: np.ndarray
    old_log_probs: np.ndarray
    ref_log_probs: np.ndarray
    rollout_log_probs: np.ndarray
    advantages: np.ndarray
    correction_weights: np.ndarray
    entropy: np.ndarray

    @property
    def loss_tokens(self) -> np.ndarray:
        cut = np.concatenate([[0], np.cumsum(self.loss_mask)])
        return np.diff(cut[self.offsets])

    def select(self, rows: Sequence[int]) -> "LossCase":
        chosen = np.array(rows, dtype=np.int64)
        index = token_index(self.offsets, chosen)
        per_token = {name: getattr(self, name)[index] for name in ("loss_mask", "selected", *TOKEN_FIELDS)}
        lengths = np.diff(self.offsets)[chosen]
        return LossCase(offsets=offsets_of(lengths), group_ids=self.group_ids[chosen], **per_token)


def make_case(seed: int, lengths: Sequence[int], *, spread: float = 0.5, uniform: bool = False) -> LossCase:
    """Return a random case. `spread` is the size of log-ratios; `uniform`: one advantage per sequence."""
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    count, sequences = int(offsets[-1]), len(lengths)
    old = -rng.exponential(size=count) - 0.05
    advantages = np.repeat(rng.normal(size=sequences), lengths) if uniform else rng.normal(size=count)
    return LossCase(
        offsets=offsets,
        loss_mask=rng.random(count) < 0.7,
        group_ids=rng.integers(0, max(1, sequences // 2), sequences),
        selected=rng.random(count) < 0.3,
        log_probs=np.minimum(old + spread * rng.normal(size=count), -0.01),
        old_log_probs=old,
        ref_log_probs=old + 0.3 * rng.normal(size=count),
        rollout_log_probs=old + 0.1 * rng.normal(size=count),
        advantages=advantages,
        correction_weights=rng.random(count) + 0.5,
        entropy=rng.random(count),
    )


def run_loss(
    case: LossCase,
    algorithm: AlgorithmConfig,
    *,
    rows: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    weights: np.ndarray | None = None,
    without: Sequence[str] = (),
) -> tuple[LossOutput, np.ndarray]:
    """Return the loss of the given sequences (default: all) and its gradient for log_probs [n].

    Args:
        weights: [B] loss weights of the whole mini-batch; None: from the case.
        without: optional fields to leave out.
    """
    rows = list(range(len(case.offsets) - 1)) if rows is None else list(rows)
    weights = weights_of(case, algorithm) if weights is None else weights
    part = case.select(rows)
    tensors = {name: torch.tensor(getattr(part, name), dtype=dtype) for name in TOKEN_FIELDS if name not in without}
    log_probs = tensors.pop("log_probs").requires_grad_()
    batch = PolicyLossBatch(
        offsets=torch.as_tensor(part.offsets),
        loss_mask=torch.as_tensor(part.loss_mask),
        loss_weights=torch.tensor(np.repeat(weights[rows], np.diff(part.offsets)), dtype=dtype),
        selected=torch.as_tensor(part.selected),
        **tensors,  # pyright: ignore[reportArgumentType]  # names are those of TOKEN_FIELDS
    )
    output = compute_policy_loss(log_probs, batch, algorithm)
    output.loss.backward()
    assert log_probs.grad is not None
    return output, log_probs.grad.double().numpy()


def weights_of(case: LossCase, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return the loss weights [B] of the whole case."""
    return compute_loss_weights(
        case.loss_tokens,
        case.group_ids,
        mode=aggregation_of(algorithm),
        constant_length=algorithm.policy_loss.constant_length,
    )


def brute_force(case: LossCase, algorithm: AlgorithmConfig) -> tuple[float, np.ndarray]:
    """Return loss and gradient [N] from the formulas, sequence by sequence and token by token."""
    log_probs = torch.tensor(case.log_probs, dtype=torch.float64, requires_grad=True)
    per_sequence: list[list[Tensor]] = []
    for start, end in zip(case.offsets[:-1], case.offsets[1:]):
        at = [t for t in range(start, end) if case.loss_mask[t]]
        policy = _TOKEN_LOSSES[algorithm.policy_loss.name](case, at, log_probs, algorithm.policy_loss)
        tokens = []
        for t, loss in zip(at, policy):
            total = loss * case.correction_weights[t]
            total = total - algorithm.entropy.coef * case.entropy[t]
            d = log_probs[t] - case.ref_log_probs[t]
            tokens.append(total + algorithm.kl.in_loss.coef * _KL[algorithm.kl.in_loss.estimator](d))
        per_sequence.append(tokens)
    loss = _aggregate(per_sequence, case.group_ids, algorithm)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.numpy()


def _like_k2(value: Tensor, d: Tensor) -> Tensor:
    """The given value with the gradient of d^2 / 2."""
    return value.detach() + d.detach() * (d - d.detach())


_KL: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "k1+": lambda d: _like_k2(d, d),
    "k3+": lambda d: _like_k2(torch.exp(-d) - 1 + d, d),
}


def _mean(numbers: list[Tensor]) -> Tensor:
    return torch.stack(numbers).mean()


def _aggregate(per_sequence: list[list[Tensor]], groups: np.ndarray, algorithm: AlgorithmConfig) -> Tensor:
    mode = aggregation_of(algorithm)
    filled = [tokens for tokens in per_sequence if tokens]
    everything = [token for tokens in filled for token in tokens]
    if mode is Aggregation.token_mean:
        return _mean(everything)
    if mode is Aggregation.sequence_mean_token_mean:
        return _mean([_mean(tokens) for tokens in filled])
    if mode is Aggregation.sequence_mean_token_sum:
        return torch.stack(everything).sum() / len(filled)
    if mode is Aggregation.token_sum_constant:
        assert algorithm.policy_loss.constant_length is not None
        return torch.stack(everything).sum() / (len(filled) * algorithm.policy_loss.constant_length)
    prompts: dict[int, list[Tensor]] = {}
    for group, tokens in zip(groups.tolist(), per_sequence):
        prompts.setdefault(group, []).extend(tokens)
    return _mean([_mean(tokens) for tokens in prompts.values() if tokens])


_Losses = Callable[[LossCase, list[int], Tensor, PolicyLossConfig], list[Tensor]]


def _by_token(one: Callable[[Tensor, Tensor, float, float, bool, PolicyLossConfig], Tensor]) -> _Losses:
    """Lift a loss of (lp, r, A, lp_old, selected, config) to the tokens of a sequence."""

    def losses(case: LossCase, at: list[int], log_probs: Tensor, config: PolicyLossConfig) -> list[Tensor]:
        return [
            one(
                log_probs[t],
                torch.exp(log_probs[t] - case.old_log_probs[t]),
                float(case.advantages[t]),
                float(case.old_log_probs[t]),
                bool(case.selected[t]),
                config,
            )
            for t in at
        ]

    return losses


def _surrogate(r: Tensor, a: float, config: PolicyLossConfig) -> Tensor:
    loss = torch.maximum(-a * r, -a * r.clamp(1 - config.clip.low, 1 + config.clip.high))
    if config.clip.dual is not None and a < 0:
        loss = torch.minimum(loss, torch.tensor(-a * config.clip.dual, dtype=loss.dtype))
    return loss


def _ppo(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    return _surrogate(r, a, config)


def _cispo(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    return -r.detach().clamp(1 - config.clip.low, 1 + config.clip.high) * a * lp


def _sapo(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    tau = config.tau_positive if a > 0 else config.tau_negative
    return -a * (1 / (1 + torch.exp(-tau * (r - 1)))) * 4 / tau


def _gpg(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    return -a * lp


def _dppo(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    p, q = np.exp(old), np.exp(lp.item())
    away = (a > 0 and r > 1) or (a < 0 and r < 1)
    divergence = abs(q - p)
    if config.divergence is Divergence.binary_kl:
        divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    loss = -a * r
    delta = config.delta or {Divergence.total_variation: 0.15, Divergence.binary_kl: 0.05}[config.divergence]
    return loss.detach() + 0 * lp if away and divergence > delta else loss


def _clip_cov(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    loss = _surrogate(r, a, config)
    return loss.detach() + 0 * lp if selected else loss


def _kl_cov(lp: Tensor, r: Tensor, a: float, old: float, selected: bool, config: PolicyLossConfig) -> Tensor:
    return -a * r + (config.selected_kl_coef * (lp - old).abs() if selected else 0)


def _gspo(case: LossCase, at: list[int], log_probs: Tensor, config: PolicyLossConfig) -> list[Tensor]:
    if not at:
        return []
    # The straight-through ratio: the value of the sequence's, the gradient of the token's.
    s = torch.exp(_mean([log_probs[t].detach() - case.old_log_probs[t] for t in at]))
    ratios = [s * torch.exp(log_probs[t] - log_probs[t].detach()) for t in at]
    return [_surrogate(ratio, float(case.advantages[t]), config) for ratio, t in zip(ratios, at)]


def _gmpo(case: LossCase, at: list[int], log_probs: Tensor, config: PolicyLossConfig) -> list[Tensor]:
    if not at:
        return []
    bounded = []
    for t in at:
        x = log_probs[t] - case.old_log_probs[t]
        bounded.append(x.clamp(max=config.clip.high) if case.advantages[t] >= 0 else x.clamp(min=-config.clip.low))
    ratio = torch.exp(_mean(bounded))
    return [-float(case.advantages[t]) * ratio for t in at]


_TOKEN_LOSSES: dict[str, _Losses] = {
    "ppo_clip": _by_token(_ppo),
    "cispo": _by_token(_cispo),
    "sapo": _by_token(_sapo),
    "gpg": _by_token(_gpg),
    "dppo": _by_token(_dppo),
    "clip_cov": _by_token(_clip_cov),
    "kl_cov": _by_token(_kl_cov),
    "gspo": _gspo,
    "gmpo": _gmpo,
}
