"""What the algorithm of a case needs from its sequences."""

from collections.abc import Callable, Iterator

import numpy as np

from megappo.algo.errors import AlgorithmInputError
from megappo.cli.algorithm_case import AlgorithmCase, CaseError
from megappo.config.algorithm import Aggregation, OldLogProbs
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS, reads_old_log_probs


def check_needs(case: AlgorithmCase) -> None:
    """Raise CaseError naming the first sequence that lacks each needed field."""
    faults = [
        AlgorithmInputError(int(rows.argmax()), field, f"is missing, {why}")
        for field, rows, why in _missing(case)
        if rows.any()
    ]
    faults += _small_groups(case)
    if faults:
        raise CaseError(faults)


_Absent = Callable[[str], np.ndarray]
"""Field -> [B] bool of the sequences that lack it."""
_Need = tuple[str, np.ndarray, str]
"""Field, [B] bool of the sequences that lack it, who needs it."""


def _missing(case: AlgorithmCase) -> Iterator[_Need]:
    algorithm, occupied = case.algorithm, case.occupied
    nobody = np.zeros_like(occupied)

    def absent(field: str) -> np.ndarray:
        return nobody if field in case.tokens else occupied

    has_loss = "log_probs" in case.tokens
    yield from _missing_for_rewards(case, absent)
    if algorithm.old_log_probs is OldLogProbs.rollout and (has_loss or reads_old_log_probs(algorithm)):
        yield "rollout_log_probs", absent("rollout_log_probs"), "old_log_probs=rollout needs it"
    elif algorithm.old_log_probs is OldLogProbs.recompute and (has_loss or reads_old_log_probs(algorithm)):
        yield "old_log_probs", absent("old_log_probs"), "old_log_probs=recompute needs it"
    if algorithm.correction.is_on:
        yield "rollout_log_probs", absent("rollout_log_probs"), "rollout correction needs it"
        if algorithm.old_log_probs is OldLogProbs.auto and not has_loss:
            yield "old_log_probs", absent("old_log_probs"), "rollout correction needs it"
    if not has_loss:
        return
    if algorithm.kl.in_loss.coef > 0:
        yield "ref_log_probs", absent("ref_log_probs"), "KL in loss needs it"
    if algorithm.entropy.coef != 0:
        yield "entropy", absent("entropy"), "the entropy bonus needs it"
    if algorithm.policy_loss.aggregation is Aggregation.prompt_mean:
        yield "group", occupied & ~case.has_group, "prompt_mean needs it"


def _missing_for_rewards(case: AlgorithmCase, absent: _Absent) -> Iterator[_Need]:
    """Needs of token rewards, advantages and the value loss."""
    algorithm, occupied = case.algorithm, case.occupied
    if "new_values" in case.tokens:
        yield "values", absent("values"), "new_values needs it as the value before the update"
    if case.scores is None:
        return
    name = algorithm.advantage.name
    if name == "gae" and case.names_advantage:
        yield "values", absent("values"), "gae needs it"
    if algorithm.kl.in_reward.coef > 0:
        yield "ref_log_probs", absent("ref_log_probs"), "KL in reward needs it"
    declared = ESTIMATOR_DECLARATIONS.get(name)
    reads_old = algorithm.kl.in_reward.coef > 0 or (declared is not None and declared.reads_old_log_probs)
    if reads_old and algorithm.old_log_probs is OldLogProbs.auto and "log_probs" not in case.tokens:
        yield "old_log_probs", absent("old_log_probs"), "KL in reward or the advantage needs it"
    if name == "remax" and case.greedy_scores is None:
        yield "greedy_score", occupied, "remax needs it"
    if name == "optimal_token_baseline":
        yield "sum_pi_squared", absent("sum_pi_squared"), "optimal_token_baseline needs it"
    if declared is not None and declared.compares_groups:
        yield "group", occupied & ~case.has_group, f"{name} compares the samples of a group"


def _small_groups(case: AlgorithmCase) -> list[AlgorithmInputError]:
    """grpo_passk takes no case of groups of one, as no run of one sample per prompt; among others they are what
    dropped samples leave, and get 0."""
    if case.algorithm.advantage.name != "grpo_passk" or case.scores is None or not case.has_group.any():
        return []
    if np.bincount(case.group_ids).max() > 1:
        return []
    rule = "has one sequence only, as all groups, and grpo_passk compares at least two"
    return [AlgorithmInputError(int(case.has_group.argmax()), "group", rule)]
