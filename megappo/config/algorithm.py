"""The algorithm: advantage, losses, KL, correction. The same keys serve a run and `megappo inspect algorithm`."""

from dataclasses import dataclass, field
from enum import Enum


class KLController(Enum):
    """How the KL-in-reward coefficient moves between steps."""

    fixed = "fixed"
    adaptive = "adaptive"


class OldLogProbs(Enum):
    """Where the log-probs before the update come from."""

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    """Advantage estimator and its constants; keys that an estimator does not use are ignored only at their default."""

    name: str = "gae"
    """Registry name (`megappo.algo.advantages.ESTIMATORS`) or `package.module:function`."""
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    """gae: whiten advantages over all response tokens of the global batch."""
    normalize_by_std: bool = True
    """grpo: divide by the group's standard deviation; false is Dr.GRPO."""


@dataclass(kw_only=True, slots=True)
class ClipConfig:
    """Ratio clipping: [1 - low, 1 + high]; `dual` (> 1) bounds the loss of negative advantages, null is off."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig:
    """Policy loss, its clip and how token losses are aggregated."""

    name: str = "ppo_clip"
    clip: ClipConfig = field(default_factory=ClipConfig)
    aggregation: str | None = None
    """token_mean, sequence_mean_token_mean, sequence_mean_token_sum, token_sum_constant or prompt_mean; null: the loss's own."""
    constant_length: float | None = None
    """Length L of token_sum_constant, in tokens."""


@dataclass(kw_only=True, slots=True)
class ValueLossConfig:
    """Value loss; `clip` bounds the move of a value away from the old one (null: off)."""

    clip: float | None = 0.5


@dataclass(kw_only=True, slots=True)
class EntropyConfig:
    """Entropy bonus: - coef * H is added to the loss."""

    coef: float = 0.0


@dataclass(kw_only=True, slots=True)
class KLInRewardConfig:
    """KL penalty subtracted from token rewards; on when coef > 0."""

    estimator: str = "k1"
    coef: float = 0.0
    controller: KLController = KLController.fixed
    target: float = 0.1
    horizon: int = 10000


@dataclass(kw_only=True, slots=True)
class KLInLossConfig:
    """KL term added to the policy loss; on when coef > 0."""

    estimator: str = "k3"
    coef: float = 0.0


@dataclass(kw_only=True, slots=True)
class KLConfig:
    """KL to the reference policy; the reference is loaded only if one of the two is on."""

    in_reward: KLInRewardConfig = field(default_factory=KLInRewardConfig)
    in_loss: KLInLossConfig = field(default_factory=KLInLossConfig)


@dataclass(kw_only=True, slots=True)
class CorrectionWeightConfig:
    """Importance weight exp(old - rollout log-prob)."""

    level: str = "token"
    """token or sequence."""
    mode: str = "truncate"
    """truncate (cap at high) or mask (0 outside [low, high])."""
    low: float = 0.5
    high: float = 2.0


@dataclass(kw_only=True, slots=True)
class RejectConfig:
    """Removes tokens or sequences from the loss mask and every denominator."""

    level: str = "token"
    """token, sequence_sum, sequence_mean or sequence_max."""
    estimator: str = "ratio"
    """ratio, k1, k2 or k3."""
    low: float = 0.5
    high: float = 2.0


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Correction of the difference between rollout and training engine."""

    weight: CorrectionWeightConfig | None = None
    reject: list[RejectConfig] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    """Soft penalty for long responses (DAPO)."""

    max_length: int = 4096
    buffer: int = 512
    factor: float = 1.0


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """Everything between scored rollouts and the loss."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    overlong: OverlongConfig | None = None
    mask_truncated: bool = False
    """Take samples that ended by length out of the loss and its denominators."""
    old_log_probs: OldLogProbs = OldLogProbs.auto
    seed: int = 0

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is loaded."""
        return self.kl.in_reward.coef > 0 or self.kl.in_loss.coef > 0
