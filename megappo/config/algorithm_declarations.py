"""What each built-in estimator and policy loss declares: scope, needs, the config keys it reads, its aggregations.

The rules (torch-free) and the registries of `megappo.algo` both read these tables, so they cannot disagree.
"""

from dataclasses import dataclass
from enum import StrEnum

from megappo.config.algorithm import Aggregation, AlgorithmConfig


class AdvantageScope(StrEnum):
    """Which numbers an estimator looks at, hence where it runs."""

    sequence = "sequence"
    """Scores and groups of the whole batch: the controller."""
    token = "token"
    """Tokens of the same sequence: the shard that holds it."""
    group_token = "group_token"
    """Tokens of the whole group: a shard that holds whole groups."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EstimatorDeclaration:
    """Declaration of an advantage estimator."""

    scope: AdvantageScope
    keys: frozenset[str] = frozenset()
    """Keys of `algorithm.advantage` it reads, besides name."""
    needs_values: bool = False
    """Reads critic values, so a critic is trained."""
    whitens: bool = False
    """Its token advantages are whitened over the response tokens of the global batch while `whiten` is true."""
    compares_groups: bool = False
    """Compares the samples of one prompt: gives nothing with one sample per prompt."""
    reads_old_log_probs: bool = False
    reads_sum_pi_squared: bool = False
    """Needs the sum over the vocabulary of squared probabilities at every response token."""
    reads_greedy_scores: bool = False
    """Needs the score of a greedy answer to each prompt, sampled beside the others."""
    reads_penalties: bool = True
    """Sees KL in reward and the over-long penalty."""
    refuses_negative_scores: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class LossDeclaration:
    """Declaration of a policy loss."""

    keys: frozenset[str] = frozenset()
    """Keys of `algorithm.policy_loss` it reads, besides name, aggregation and constant_length; `clip.low` and so on."""
    aggregation: Aggregation = Aggregation.token_mean
    """The one used when none is configured."""
    fixed_aggregation: bool = False
    """Defined with its own aggregation only."""
    selects_tokens: bool = False
    """Needs the token selection that is made once per update."""


_SEQUENCE, _TOKEN = AdvantageScope.sequence, AdvantageScope.token

ESTIMATOR_DECLARATIONS: dict[str, EstimatorDeclaration] = {
    "gae": EstimatorDeclaration(
        scope=_TOKEN, keys=frozenset({"gamma", "lam", "whiten"}), needs_values=True, whitens=True
    ),
    "grpo": EstimatorDeclaration(scope=_SEQUENCE, keys=frozenset({"normalize_by_std"}), compares_groups=True),
    "rloo": EstimatorDeclaration(scope=_SEQUENCE, compares_groups=True),
    "reinforce_plus_plus": EstimatorDeclaration(scope=_TOKEN, keys=frozenset({"gamma", "whiten"}), whitens=True),
    "reinforce_plus_plus_baseline": EstimatorDeclaration(
        scope=_SEQUENCE, keys=frozenset({"whiten"}), whitens=True, compares_groups=True
    ),
    "remax": EstimatorDeclaration(scope=_SEQUENCE, reads_greedy_scores=True),
    "opo": EstimatorDeclaration(scope=_SEQUENCE, compares_groups=True),
    "gpg": EstimatorDeclaration(scope=_SEQUENCE, keys=frozenset({"alpha"}), compares_groups=True),
    "grpo_passk": EstimatorDeclaration(scope=_SEQUENCE, compares_groups=True),
    "maxrl": EstimatorDeclaration(scope=_SEQUENCE, compares_groups=True, refuses_negative_scores=True),
    "gdpo": EstimatorDeclaration(
        scope=_SEQUENCE,
        keys=frozenset({"whiten", "reward_keys", "weights"}),
        compares_groups=True,
        reads_penalties=False,
    ),
    "optimal_token_baseline": EstimatorDeclaration(
        scope=AdvantageScope.group_token, compares_groups=True, reads_old_log_probs=True, reads_sum_pi_squared=True
    ),
}

_CLIP = frozenset({"clip.low", "clip.high"})
_SEQUENCE_MEAN = Aggregation.sequence_mean_token_mean

LOSS_DECLARATIONS: dict[str, LossDeclaration] = {
    "ppo_clip": LossDeclaration(keys=_CLIP | {"clip.dual"}),
    "gspo": LossDeclaration(keys=_CLIP, aggregation=_SEQUENCE_MEAN, fixed_aggregation=True),
    "cispo": LossDeclaration(keys=_CLIP),
    "sapo": LossDeclaration(
        keys=frozenset({"tau_positive", "tau_negative"}), aggregation=_SEQUENCE_MEAN, fixed_aggregation=True
    ),
    "gmpo": LossDeclaration(keys=_CLIP, aggregation=_SEQUENCE_MEAN, fixed_aggregation=True),
    "gpg": LossDeclaration(),
    "dppo": LossDeclaration(keys=frozenset({"divergence", "delta"})),
    "clip_cov": LossDeclaration(
        keys=_CLIP | {"selected_fraction", "covariance_low", "covariance_high"}, selects_tokens=True
    ),
    "kl_cov": LossDeclaration(keys=frozenset({"selected_fraction", "selected_kl_coef"}), selects_tokens=True),
}


def reads_old_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Whether something before the update (KL in reward, correction, advantages, a token selection) reads them, so
    that `old_log_probs: auto` may not leave the pass out."""
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    loss = LOSS_DECLARATIONS.get(algorithm.policy_loss.name)
    return (
        algorithm.kl.in_reward.coef > 0
        or algorithm.correction.is_on
        or (estimator is not None and estimator.reads_old_log_probs)
        or (loss is not None and loss.selects_tokens)
    )


def reads_greedy_scores(algorithm: AlgorithmConfig) -> bool:
    """Whether every prompt also gets a greedy answer."""
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    return estimator is not None and estimator.reads_greedy_scores


def selects_tokens(algorithm: AlgorithmConfig) -> bool:
    """Whether the policy loss treats some tokens apart, chosen once per update."""
    loss = LOSS_DECLARATIONS.get(algorithm.policy_loss.name)
    return loss is not None and loss.selects_tokens


def reads_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads the sum of squared probabilities."""
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    return estimator is not None and estimator.reads_sum_pi_squared
