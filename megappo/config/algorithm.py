"""The algorithm: advantage, losses, KL, correction. The same keys serve a run and `megappo inspect algorithm`."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum


class KLController(Enum):
    """How the KL-in-reward coefficient moves between steps."""

    fixed = "fixed"
    adaptive = "adaptive"


class OldLogProbs(Enum):
    """Where the log-probs before the update, lp_old, come from.

    Formula: recompute: a pass of the trainer before the update. auto: the same pass, left out where the batch is used
        for one optimizer step and nothing before the update reads lp_old (KL in reward, correction,
        optimal_token_baseline, clip_cov and kl_cov do; a critic reads values alone): lp_old is then lp itself,
        detached, so that r = 1. rollout: as reported by the engine that sampled.
    Source: Hilton et al. 2022, arXiv:2110.00641, tell the policy that bounds the step from the one that sampled.
    Config: old_log_probs.
    Use: auto; recompute measures how far engine and trainer differ in every step. With either, lp_old is of the
        weights at the start of the update, so r says nothing of rollouts that older weights sampled
        (controller=one_step_off, rollout.partial, sampling.oversample): correction.weight accounts for those, or
        rollout, whose r is to the policy that sampled.
    """

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"


class Aggregation(StrEnum):
    """How token losses become one number. N tokens and S sequences on the loss mask of the whole mini-batch."""

    token_mean = "token_mean"
    """sum / N."""
    sequence_mean_token_mean = "sequence_mean_token_mean"
    """Mean over S of each sequence's token mean."""
    sequence_mean_token_sum = "sequence_mean_token_sum"
    """sum / S."""
    token_sum_constant = "token_sum_constant"
    """sum / (S * constant_length)."""
    prompt_mean = "prompt_mean"
    """Mean over prompts of the token mean within the prompt."""


class CorrectionLevel(Enum):
    """What an importance weight belongs to."""

    token = "token"
    sequence = "sequence"
    """The product over the response tokens of the sequence."""


class CorrectionMode(Enum):
    """What happens to an importance weight out of bounds."""

    truncate = "truncate"
    """min(weight, high)."""
    mask = "mask"
    """0 outside [low, high]; the denominators stay."""


class RejectLevel(Enum):
    """What a rejection looks at, and removes."""

    token = "token"
    sequence_sum = "sequence_sum"
    sequence_mean = "sequence_mean"
    sequence_max = "sequence_max"


class RejectEstimator(Enum):
    """Per-token measure of the difference d = rollout log-prob - old log-prob."""

    ratio = "ratio"
    """exp(-d)."""
    k1 = "k1"
    """d."""
    k2 = "k2"
    """d^2 / 2."""
    k3 = "k3"
    """exp(-d) - 1 + d."""


class Divergence(Enum):
    """dppo: the divergence that bounds the move of a token."""

    total_variation = "total_variation"
    """|pi - pi_old| of the sampled token."""
    binary_kl = "binary_kl"
    """KL(pi_old || pi) of "this token or any other"."""


class OnExhausted(Enum):
    """What happens when dynamic sampling runs out of rounds with too few groups."""

    train_partial = "train_partial"
    """Train on the groups there are."""
    carry_over = "carry_over"
    """Train nothing; the groups count towards the next step."""
    stop = "stop"
    """End the run, saying how many groups were kept and dropped."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    """Advantage estimator and its constants. A constant that the estimator does not use must stay at its default."""

    name: str = "gae"
    """Registry name (`megappo.algo.advantages.ESTIMATORS`) or `package.module:function`."""
    gamma: float = 1.0
    """gae, reinforce_plus_plus: discount per response token."""
    lam: float = 1.0
    """gae: weight of longer returns."""
    whiten: bool = True
    """gae, reinforce_plus_plus, reinforce_plus_plus_baseline: whiten advantages over all response tokens of the
    global batch; gdpo: over its sequences."""
    normalize_by_std: bool = True
    """grpo: divide by the group's standard deviation; false is Dr.GRPO."""
    alpha: float | None = None
    """gpg: factor of the advantages; null: sequences / sequences in groups with signal."""
    reward_keys: list[str] = field(default_factory=list)
    """gdpo: names of the reward parts."""
    weights: list[float] = field(default_factory=list)
    """gdpo: weight of each reward part; empty: 1 each."""


@dataclass(kw_only=True, slots=True)
class ClipConfig:
    """Ratio clipping: [1 - low, 1 + high]; `dual` (> 1) bounds the loss of negative advantages, null is off.
    gmpo clips log-ratios to [-low, high]."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    """ppo_clip only."""


@dataclass(kw_only=True, slots=True)
class PolicyLossConfig:
    """Policy loss, its constants and how token losses are aggregated. A constant that the loss does not use must
    stay at its default."""

    name: str = "ppo_clip"
    """Registry name (`megappo.algo.losses.POLICY_LOSSES`) or `package.module:function`."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    aggregation: Aggregation | None = None
    """null: the loss's own."""
    constant_length: float | None = None
    """token_sum_constant: the length L, in tokens."""
    tau_positive: float = 1.0
    """sapo: temperature of tokens with positive advantage."""
    tau_negative: float = 1.05
    """sapo: temperature of the other tokens."""
    divergence: Divergence = Divergence.total_variation
    """dppo."""
    delta: float | None = None
    """dppo: largest divergence of a token that still gets a gradient away from the old policy; null: 0.15 of
    total_variation, 0.05 of binary_kl."""
    selected_fraction: float = 0.0002
    """clip_cov, kl_cov: share of the loss tokens that is selected (at least one token)."""
    covariance_low: float = 1.0
    """clip_cov: smallest covariance of a token that may be selected."""
    covariance_high: float = 5.0
    """clip_cov: largest covariance of a token that may be selected."""
    selected_kl_coef: float = 1.0
    """kl_cov: coefficient of |log-prob - old log-prob| on selected tokens."""


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
    """k1, abs, k2, k3, k1+ or k3+."""
    coef: float = 0.0
    controller: KLController = KLController.fixed
    target: float = 0.1
    """adaptive: the KL per token that the coefficient steers to."""
    horizon: int = 10000
    """adaptive: sequences over which the coefficient may move by a fifth of itself."""


@dataclass(kw_only=True, slots=True)
class KLInLossConfig:
    """KL term added to the policy loss; on when coef > 0."""

    estimator: str = "k3"
    """abs, k2, k3, k1+ or k3+ (k1 has no expected gradient)."""
    coef: float = 0.0


@dataclass(kw_only=True, slots=True)
class KLConfig:
    """KL to the reference policy; the reference is loaded only if one of the two is on."""

    in_reward: KLInRewardConfig = field(default_factory=KLInRewardConfig)
    in_loss: KLInLossConfig = field(default_factory=KLInLossConfig)


@dataclass(kw_only=True, slots=True)
class CorrectionWeightConfig:
    """Importance weight exp(old - rollout log-prob), multiplied into the policy loss of each token."""

    level: CorrectionLevel = CorrectionLevel.token
    mode: CorrectionMode = CorrectionMode.truncate
    low: float = 0.5
    """mask: smallest weight kept."""
    high: float = 2.0


@dataclass(kw_only=True, slots=True)
class RejectConfig:
    """Removes tokens or sequences outside [low, high] from the loss mask and every denominator."""

    level: RejectLevel = RejectLevel.token
    estimator: RejectEstimator = RejectEstimator.ratio
    low: float = 0.5
    """In the estimator's own units."""
    high: float = 2.0


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Correction of the difference between rollout and training engine."""

    weight: CorrectionWeightConfig | None = None
    reject: list[RejectConfig] = field(default_factory=list)
    """Each looks at the response tokens before any rejection; what one of them removes is removed."""

    @property
    def is_on(self) -> bool:
        """Whether rollout log-probs are needed."""
        return self.weight is not None or bool(self.reject)


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    """Soft penalty for long responses (DAPO): 0 up to max_length - buffer tokens, -factor from max_length on."""

    max_length: int = 4096
    """Response tokens."""
    buffer: int = 512
    """Response tokens."""
    factor: float = 1.0


@dataclass(kw_only=True, slots=True)
class DynamicSamplingConfig:
    """Dynamic sampling (DAPO): groups from which the estimator learns nothing (for most: whose scores are all equal)
    are dropped and other prompts drawn instead."""

    max_rounds: int = 0
    """Most rounds of generation in one step; 0: off, every group is trained."""
    oversample: float = 1.0
    """Prompts drawn in a round per prompt that is still needed, 1 or more; 1.25 makes up for a fifth of the groups
    being dropped. Groups with signal that a step does not need are the first of the next one."""
    on_exhausted: OnExhausted = OnExhausted.train_partial


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
    sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    seed: int = 0
    """Of the token selection of clip_cov."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is loaded."""
        return self.kl.in_reward.coef > 0 or self.kl.in_loss.coef > 0
