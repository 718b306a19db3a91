"""`megappo inspect algorithm`: what an algorithm makes of a person's own numbers.

Shapes: B sequences, N response tokens of all sequences, of which the mask tells those sampled by the policy. All
numbers are float64. The functions are those of a run; only the sharding is missing.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megappo.algo.advantages import (
    compute_sequence_advantages,
    estimator_of,
    group_metrics,
    needs_sequence_advantages,
)
from megappo.algo.advantages.base import SequenceInputs, TokenInputs
from megappo.algo.aggregation import compute_loss_weights
from megappo.algo.correction import correct
from megappo.algo.diagnostics import merge_mismatch
from megappo.algo.errors import AlgorithmInputError
from megappo.algo.experience import (
    Estimates,
    correct_and_truncate,
    estimate,
    merge_experience_metrics,
    merge_whitening,
)
from megappo.algo.kl import KLCoefficient
from megappo.algo.losses import (
    PolicyLossBatch,
    ValueLossBatch,
    aggregation_of,
    compute_policy_loss,
    compute_value_loss,
    policy_loss_of,
)
from megappo.algo.masked import compact, count_tokens, whiten
from megappo.algo.scan import suffix_sums
from megappo.algo.selection import LossTokens, select_at_once
from megappo.algo.token_rewards import move_onto_tokens, penalize, place_on_last_token
from megappo.batch.stages import RolloutBatch
from megappo.cli.algorithm_case import AlgorithmCase, CaseError, read_case
from megappo.cli.case_needs import check_needs
from megappo.config.algorithm import Aggregation, OldLogProbs
from megappo.config.algorithm_rules import algorithm_notes
from megappo.observability import metrics
from megappo.observability.metrics import Metrics


def inspect_algorithm(path: str) -> int:
    """Print what the algorithm makes of the case in a JSON file as JSON; return the exit code.

    Raises:
        DataError, ConfigError: the case cannot be taken; nothing is printed then.
    """
    result = run_case(read_case(Path(path)))
    for note in result.pop("notes"):
        print(note, file=sys.stderr)
    json.dump(result, sys.stdout)
    print()
    return 0


def run_case(case: AlgorithmCase) -> dict[str, Any]:  # Any: the printed object
    """Return the printed object and `notes` (why something is null).

    Raises:
        CaseError: the algorithm cannot take the sequences.
    """
    check_needs(case)
    # Both come first: a loss that cannot be imported is refused whether or not there are log-probs for it.
    estimator_of(case.algorithm)
    policy_loss_of(case.algorithm)
    try:
        # Numbers that are not finite are in the result and the notes say so; numpy need not.
        with np.errstate(all="ignore"):
            return _Inspection(case).result()
    except AlgorithmInputError as error:
        raise CaseError([error]) from error


class _Inspection:
    """One case on its way from rewards to the gradient."""

    def __init__(self, case: AlgorithmCase) -> None:
        self.case = case
        self.algorithm = case.algorithm
        self.masked = compact(case.mask, case.offsets)
        self.metrics: Metrics = {}
        self.notes = algorithm_notes(case.algorithm)

    def result(self) -> dict[str, Any]:
        rewards = self._token_rewards()
        estimates = None if rewards is None else self._estimates(rewards)
        advantages = returns = None
        output: dict[str, Any] = {"loss": None, "gradient": None, "value_loss": None}
        loss_mask = self._loss_mask(estimates)
        self._compare_what_is_not_read()
        if rewards is not None:
            returns = self._returns(rewards, estimates)
        if estimates is not None:
            whitened = whiten(estimates.advantages, merge_whitening([estimates.totals]))
            advantages = np.where(self.case.mask, whitened, 0.0)
            self.metrics |= merge_experience_metrics([estimates.totals])
            output["loss"], output["gradient"] = self._policy_loss(estimates, advantages)
        if returns is not None:
            output["value_loss"] = self._value_loss(returns, loss_mask)
        return {
            "token_rewards": self._split(rewards),
            "advantages": self._split(advantages),
            "returns": self._split(returns),
            "mask": self._split(loss_mask.astype(int)),
            **output,
            "metrics": metrics.values(self.metrics),
            "notes": self.notes,
        }

    def _given(self, name: str) -> np.ndarray | None:
        """Return a per-token field [N], anything off the mask; None where it is needed and not given."""
        values = self.case.tokens.get(name)
        if values is None and not self.case.mask.any():
            return np.zeros(len(self.case.mask))
        return values

    def _old_log_probs(self) -> np.ndarray | None:
        """Log-probs before the update, [N]: as given; with `auto` the current ones stand for them."""
        if self.algorithm.old_log_probs is OldLogProbs.rollout:
            return self._given("rollout_log_probs")
        old = self._given("old_log_probs")
        return self._given("log_probs") if old is None else old

    def _token_rewards(self) -> np.ndarray | None:
        """Token rewards [N], 0 off the mask; None: nobody has any."""
        case, in_reward = self.case, self.algorithm.kl.in_reward
        if case.scores is None:
            self.notes.append("no sequence has a score or rewards: nothing after the mask is computed")
            return None
        rewards = place_on_last_token(case.scores, self.masked)
        if "rewards" in case.tokens:
            rewards = rewards + move_onto_tokens(case.tokens["rewards"], self.masked, case.offsets)
        difference, old, ref = None, self._old_log_probs(), self._given("ref_log_probs")
        if in_reward.coef > 0 and old is not None and ref is not None:
            difference = self.masked.gather(old) - self.masked.gather(ref)
        rewards, kl, counts = penalize(
            rewards, self.masked, difference=difference, algorithm=self.algorithm, kl_coef=in_reward.coef
        )
        counts["rollout/truncated_ratio"] = metrics.mean(case.truncated.sum(), len(case.truncated))
        if in_reward.coef > 0:
            coefficient = KLCoefficient(in_reward)
            counts["kl/in_reward/coef"] = metrics.mean(coefficient.value, 1)
            coefficient.update([kl])
            counts["kl/in_reward/next_coef"] = metrics.mean(coefficient.value, 1)
        self.metrics |= counts
        return self.masked.scatter(rewards, dtype=np.float64)

    def _estimates(self, rewards: np.ndarray) -> Estimates | None:
        case = self.case
        inputs = SequenceInputs(
            scores=self.masked.sums(self.masked.gather(rewards)),
            sequence_ids=np.arange(len(case.group_ids)),
            group_ids=case.group_ids,
            response_tokens=self.masked.lengths,
            parts=case.parts,
            greedy_scores=case.greedy_scores,
        )
        if case.has_group.any():
            self.metrics |= group_metrics(inputs, self.algorithm)
        if self.algorithm.advantage.name == "gae" and self._given("values") is None:
            self.notes.append("advantages, returns and loss are null: gae, the default, needs `values`")
            return None
        sequence_advantages = None
        if needs_sequence_advantages(self.algorithm):
            sequence_advantages = compute_sequence_advantages(inputs, self.algorithm)
        token_inputs = TokenInputs(
            mask=case.mask,
            offsets=case.offsets,
            rewards=rewards,
            group_ids=case.group_ids,
            sequence_advantages=sequence_advantages,
            values=self._given("values"),
            old_log_probs=self._old_log_probs(),
            sum_pi_squared=self._given("sum_pi_squared"),
        )
        return estimate(self._rollout_batch(), token_inputs, truncated=case.truncated, algorithm=self.algorithm)

    def _loss_mask(self, estimates: Estimates | None) -> np.ndarray:
        """Response tokens that take part in the loss, [N] bool; correction needs no advantages, so without them it is
        made and measured all the same."""
        if estimates is not None:
            return estimates.loss_mask
        corrected = correct_and_truncate(
            self._rollout_batch(), self._old_log_probs(), truncated=self.case.truncated, algorithm=self.algorithm
        )
        self.metrics |= corrected.metrics | merge_mismatch([corrected.mismatch])
        return corrected.loss_mask

    def _compare_what_is_not_read(self) -> None:
        """Old log-probs given beside `old_log_probs: rollout` tell how far the two engines are apart, and no more."""
        given = self.case.tokens.get("old_log_probs")
        if given is None or self.algorithm.old_log_probs is not OldLogProbs.rollout:
            return
        self.notes.append("old_log_probs=rollout: the given old_log_probs are compared with those of the engine only")
        compared = correct(self._rollout_batch(), given, replace(self.algorithm, old_log_probs=OldLogProbs.recompute))
        self.metrics |= compared.metrics | merge_mismatch([compared.mismatch])

    def _rollout_batch(self) -> RolloutBatch:
        """The case as the engine would have returned it; log-probs that are not given are NaN."""
        case, count = self.case, len(self.case.mask)
        return RolloutBatch(
            offsets=case.offsets,
            tokens=np.zeros(count, dtype=np.int32),
            response_mask=case.mask,
            rollout_log_probs=case.tokens.get("rollout_log_probs", np.full(count, np.nan)),
            sequence_ids=np.arange(len(case.group_ids)),
            group_ids=case.group_ids,
        )

    def _returns(self, rewards: np.ndarray, estimates: Estimates | None) -> np.ndarray | None:
        """What a critic would learn, [N]: those of the estimator, else the discounted sum of the rewards to come."""
        if estimates is not None and estimates.returns is not None:
            return estimates.returns
        if self.algorithm.advantage.name == "gae":
            return None
        return suffix_sums(rewards, self.case.mask, self.case.offsets, self.algorithm.advantage.gamma)

    def _weights(self, loss_mask: np.ndarray, mode: Aggregation) -> torch.Tensor:
        """Loss weight of each token, [N]; all sequences are one mini-batch."""
        weights = compute_loss_weights(
            count_tokens(loss_mask, self.case.offsets),
            self.case.group_ids,
            mode=mode,
            constant_length=self.algorithm.policy_loss.constant_length,
        )
        return torch.as_tensor(np.repeat(weights, np.diff(self.case.offsets)))

    def _policy_loss(self, estimates: Estimates, advantages: np.ndarray) -> tuple[float | None, list[Any] | None]:
        given = self._given("log_probs")
        if given is None or "log_probs" not in self.case.tokens:
            return None, None
        log_probs = torch.as_tensor(given).requires_grad_()
        old = estimates.old_log_probs
        # Without old log-probs the detached current ones take part, which `None` asks for.
        is_current = self.algorithm.old_log_probs is OldLogProbs.auto and "old_log_probs" not in self.case.tokens
        batch = PolicyLossBatch(
            offsets=torch.as_tensor(self.case.offsets),
            loss_mask=torch.as_tensor(estimates.loss_mask),
            loss_weights=self._weights(estimates.loss_mask, aggregation_of(self.algorithm)),
            advantages=torch.as_tensor(advantages),
            old_log_probs=None if is_current else _optional(old),
            ref_log_probs=_optional(self._given("ref_log_probs")),
            rollout_log_probs=_optional(self._given("rollout_log_probs")),
            correction_weights=_optional(estimates.correction_weights),
            entropy=_optional(self._given("entropy")),
        )
        if policy_loss_of(self.algorithm).declaration.selects_tokens:
            batch.selected = torch.as_tensor(self._selected(estimates, advantages))
        output = compute_policy_loss(log_probs, batch, self.algorithm)
        (gradient,) = torch.autograd.grad(output.loss, log_probs)
        self.metrics |= output.metrics
        loss = float(output.loss.detach())
        if not (np.isfinite(loss) and bool(gradient.isfinite().all())):
            self.notes.append("the loss or its gradient is not finite: a run would skip this step and count it")
        return loss, self._split(gradient.numpy())

    def _selected(self, estimates: Estimates, advantages: np.ndarray) -> np.ndarray:
        """Which tokens a loss like clip_cov treats apart, [N] bool; advantages [N] are whitened."""
        assert estimates.old_log_probs is not None
        kept = compact(estimates.loss_mask, self.case.offsets)
        tokens = LossTokens(
            old_log_probs=kept.gather(estimates.old_log_probs),
            advantages=kept.gather(advantages),
            sequence_ids=kept.sequence,
            positions=kept.index - self.case.offsets[kept.sequence],
        )
        return kept.scatter(select_at_once(tokens, self.algorithm, whitening=None), dtype=np.bool_)

    def _value_loss(self, returns: np.ndarray, loss_mask: np.ndarray) -> float | None:
        values, old = self._given("new_values"), self._given("values")
        if values is None or old is None or "new_values" not in self.case.tokens:
            return None
        batch = ValueLossBatch(
            old_values=torch.as_tensor(old),
            returns=torch.as_tensor(returns),
            loss_mask=torch.as_tensor(loss_mask),
            loss_weights=self._weights(loss_mask, Aggregation.token_mean),
        )
        output = compute_value_loss(torch.as_tensor(values), batch, self.algorithm)
        self.metrics |= output.metrics
        return float(output.loss)

    def _split(self, values: np.ndarray | None) -> list[Any] | None:
        """Return values [N] as one list per sequence."""
        if values is None:
            return None
        return [part.tolist() for part in np.split(values, self.case.offsets[1:-1])][: len(self.case.group_ids)]


def _optional(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.as_tensor(values)
