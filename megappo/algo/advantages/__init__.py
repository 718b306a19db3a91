"""Advantage estimators, by name.

To add one: write its stage function (docstring: Formula, Source, Config, Use), declare it in
`megappo.config.algorithm_declarations.ESTIMATOR_DECLARATIONS`, register it below; the contract tests then run on it.
From outside: `package.module:name` of an `Estimator`, or of a plain function (SequenceInputs, AdvantageConfig) -> [B].
"""

import numpy as np

from megappo.algo.advantages.base import Estimator, SequenceInputs, SequenceStage
from megappo.algo.advantages.group_relative import (
    best_leads,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    parts_differ,
    reinforce_plus_plus_baseline,
    rloo,
)
from megappo.algo.advantages.returns import (
    beats_or_misses_greedy,
    gae,
    reinforce_plus_plus,
    remax,
    remax_baseline,
)
from megappo.algo.advantages.token_baseline import optimal_token_baseline
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS as DECLARED
from megappo.config.algorithm_declarations import AdvantageScope, EstimatorDeclaration
from megappo.observability import metrics
from megappo.observability.metrics import Metrics
from megappo.registry import Registry, RegistryError

ESTIMATORS: Registry[Estimator | SequenceStage] = Registry("advantage estimator")
ESTIMATORS.register("gae", Estimator(declaration=DECLARED["gae"], token_stage=gae))
ESTIMATORS.register("grpo", Estimator(declaration=DECLARED["grpo"], sequence_stage=grpo))
ESTIMATORS.register("rloo", Estimator(declaration=DECLARED["rloo"], sequence_stage=rloo))
ESTIMATORS.register(
    "reinforce_plus_plus", Estimator(declaration=DECLARED["reinforce_plus_plus"], token_stage=reinforce_plus_plus)
)
ESTIMATORS.register(
    "reinforce_plus_plus_baseline",
    Estimator(declaration=DECLARED["reinforce_plus_plus_baseline"], sequence_stage=reinforce_plus_plus_baseline),
)
ESTIMATORS.register(
    "remax",
    Estimator(
        declaration=DECLARED["remax"],
        sequence_stage=remax_baseline,
        token_stage=remax,
        signal_stage=beats_or_misses_greedy,
    ),
)
ESTIMATORS.register("opo", Estimator(declaration=DECLARED["opo"], sequence_stage=opo))
ESTIMATORS.register("gpg", Estimator(declaration=DECLARED["gpg"], sequence_stage=gpg))
ESTIMATORS.register(
    "grpo_passk",
    Estimator(declaration=DECLARED["grpo_passk"], sequence_stage=grpo_passk, signal_stage=best_leads),
)
ESTIMATORS.register("maxrl", Estimator(declaration=DECLARED["maxrl"], sequence_stage=maxrl))
ESTIMATORS.register("gdpo", Estimator(declaration=DECLARED["gdpo"], sequence_stage=gdpo, signal_stage=parts_differ))
ESTIMATORS.register(
    "optimal_token_baseline",
    Estimator(declaration=DECLARED["optimal_token_baseline"], token_stage=optimal_token_baseline),
)


def estimator_of(algorithm: AlgorithmConfig) -> Estimator:
    """Return the configured estimator. Raises RegistryError for a name that is unknown or names no estimator."""
    entry = ESTIMATORS.get(algorithm.advantage.name)
    if isinstance(entry, Estimator):
        if algorithm.advantage.name not in ESTIMATORS.names():
            _refuse_needs(algorithm.advantage.name, entry.declaration)
        return entry
    if not callable(entry):
        raise RegistryError(f"{algorithm.advantage.name} is neither an Estimator nor a function of its sequence stage")
    return Estimator(declaration=EstimatorDeclaration(scope=AdvantageScope.sequence), sequence_stage=entry)


def _refuse_needs(name: str, declared: EstimatorDeclaration) -> None:
    """Raise RegistryError for an estimator from outside that asks for a pass which a run plans, without importing it,
    from the declarations of built-in ones."""
    for need in ("reads_old_log_probs", "reads_sum_pi_squared", "reads_greedy_scores"):
        if getattr(declared, need):
            rule = f"declares {need}, which a run provides to built-in estimators only"
            raise RegistryError(f"{name} {rule} (declare and register it as the docstring of {__name__} says)")


def needs_values(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantages need a critic."""
    return estimator_of(algorithm).declaration.needs_values


def needs_sequence_advantages(algorithm: AlgorithmConfig) -> bool:
    """Whether `compute_sequence_advantages` runs before the experience is built."""
    return estimator_of(algorithm).sequence_stage is not None


def whitens_tokens(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages are whitened over the response tokens of the global batch."""
    return algorithm.advantage.whiten and estimator_of(algorithm).declaration.whitens


def compute_sequence_advantages(inputs: SequenceInputs, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return the advantages [B] float64 of an estimator of scope `sequence`, before whitening over tokens.

    Empty sequences get 0 and take part in no statistic. Bitwise the same for any order of the sequences.

    Raises:
        AlgorithmInputError: a sequence brings what the estimator cannot take; names the sequence and the field.
        RegistryError: an estimator from outside gave something else than one number a sequence.
    """
    stage = estimator_of(algorithm).sequence_stage
    assert stage is not None, "only estimators of scope sequence run on the controller"
    rows = np.flatnonzero(inputs.response_tokens > 0)
    advantages = np.zeros(len(inputs.scores))
    if rows.size:
        # A score that is not finite makes advantages that are not: the update reports them, numpy need not.
        with np.errstate(invalid="ignore"):
            found = np.asarray(stage(inputs.select(rows), algorithm.advantage))
        if found.shape != rows.shape:
            rule = f"gave advantages of shape {found.shape}, must give one for each of {rows.size} sequences"
            raise RegistryError(f"{algorithm.advantage.name} {rule}")
        advantages[rows] = found
    return advantages


def signal_by_group(inputs: SequenceInputs, algorithm: AlgorithmConfig) -> dict[int, bool]:
    """Return, for every group id, whether the configured estimator learns anything from the group: it does not where
    it would give every sample an advantage of 0, nor from a group of empty sequences.

    Raises:
        AlgorithmInputError: as `compute_sequence_advantages`.
    """
    found: dict[int, bool] = dict.fromkeys(np.unique(inputs.group_ids).tolist(), False)
    rows = np.flatnonzero(inputs.response_tokens > 0)
    if not rows.size:
        return found
    occupied = inputs.select(rows)
    with np.errstate(invalid="ignore"):
        signal = estimator_of(algorithm).signal_stage(occupied, algorithm.advantage)
    return found | dict.fromkeys(occupied.group_ids[signal].tolist(), True)


def group_metrics(inputs: SequenceInputs, algorithm: AlgorithmConfig) -> Metrics:
    """Return counts of the groups of a batch; means are over groups with at least one non-empty sequence."""
    rows = np.flatnonzero(inputs.response_tokens > 0)
    if not rows.size:
        return {}
    _, sizes = np.unique(inputs.group_ids[rows], return_counts=True)
    count, with_signal = len(sizes), sum(signal_by_group(inputs, algorithm).values())
    return {
        "rollout/groups": metrics.total(count),
        "rollout/group_size/mean": metrics.mean(len(rows), count),
        "rollout/groups_without_signal": metrics.mean(count - with_signal, count),
    }
