"""Policy losses, by name, and the value loss.

To add one: write its function (docstring: Formula, Source, Config, Use), declare it in
`megappo.config.algorithm_declarations.LOSS_DECLARATIONS`, register it below; the contract tests then run on it. From
outside: `package.module:name` of a `PolicyLoss`, or of a plain function (LossInputs, PolicyLossConfig) -> TokenLosses.
"""

from torch import Tensor

from megappo.algo.losses.base import (
    LossInputs,
    LossOutput,
    PolicyLoss,
    PolicyLossBatch,
    PolicyLossFunction,
    TokenLosses,
)
from megappo.algo.losses.clipped import cispo, gmpo, gspo, ppo_clip
from megappo.algo.losses.policy import compute_loss
from megappo.algo.losses.unclipped import clip_cov, dppo, gpg, kl_cov, sapo
from megappo.algo.losses.value import ValueLossBatch, compute_value_loss
from megappo.config.algorithm import Aggregation, AlgorithmConfig
from megappo.config.algorithm_declarations import LOSS_DECLARATIONS as DECLARED
from megappo.config.algorithm_declarations import LossDeclaration
from megappo.registry import Registry, RegistryError

__all__ = [
    "POLICY_LOSSES",
    "LossInputs",
    "LossOutput",
    "PolicyLoss",
    "PolicyLossBatch",
    "TokenLosses",
    "ValueLossBatch",
    "aggregation_of",
    "compute_policy_loss",
    "compute_value_loss",
    "policy_loss_of",
]

POLICY_LOSSES: Registry[PolicyLoss | PolicyLossFunction] = Registry("policy loss")
POLICY_LOSSES.register("ppo_clip", PolicyLoss(declaration=DECLARED["ppo_clip"], function=ppo_clip))
POLICY_LOSSES.register("gspo", PolicyLoss(declaration=DECLARED["gspo"], function=gspo))
POLICY_LOSSES.register("cispo", PolicyLoss(declaration=DECLARED["cispo"], function=cispo))
POLICY_LOSSES.register("sapo", PolicyLoss(declaration=DECLARED["sapo"], function=sapo))
POLICY_LOSSES.register("gmpo", PolicyLoss(declaration=DECLARED["gmpo"], function=gmpo))
POLICY_LOSSES.register("gpg", PolicyLoss(declaration=DECLARED["gpg"], function=gpg))
POLICY_LOSSES.register("dppo", PolicyLoss(declaration=DECLARED["dppo"], function=dppo))
POLICY_LOSSES.register("clip_cov", PolicyLoss(declaration=DECLARED["clip_cov"], function=clip_cov))
POLICY_LOSSES.register("kl_cov", PolicyLoss(declaration=DECLARED["kl_cov"], function=kl_cov))


def policy_loss_of(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the configured policy loss. Raises RegistryError for a name that is unknown or names no loss."""
    entry = POLICY_LOSSES.get(algorithm.policy_loss.name)
    if isinstance(entry, PolicyLoss):
        if entry.declaration.selects_tokens and algorithm.policy_loss.name not in POLICY_LOSSES.names():
            rule = "declares selects_tokens, which a run provides to built-in losses only"
            remedy = f"declare and register it as the docstring of {__name__} says"
            raise RegistryError(f"{algorithm.policy_loss.name} {rule} ({remedy})")
        return entry
    if not callable(entry):
        raise RegistryError(f"{algorithm.policy_loss.name} is neither a PolicyLoss nor a function")
    return PolicyLoss(declaration=LossDeclaration(), function=entry)


def aggregation_of(algorithm: AlgorithmConfig) -> Aggregation:
    """Return the configured aggregation, or the loss's own.

    Raises:
        RegistryError: as `policy_loss_of`; or a loss from outside is defined with another aggregation only.
    """
    given, declared = algorithm.policy_loss.aggregation, policy_loss_of(algorithm).declaration
    if declared.fixed_aggregation and given not in (None, declared.aggregation):
        raise RegistryError(
            f"algorithm.policy_loss.aggregation={given} conflicts with {algorithm.policy_loss.name}, defined with "
            f"{declared.aggregation} (leave it out)"
        )
    return given or declared.aggregation


def compute_policy_loss(log_probs: Tensor, batch: PolicyLossBatch, algorithm: AlgorithmConfig) -> LossOutput:
    """Return one micro-batch's part of the policy's loss: policy loss, KL in loss and entropy bonus.

    Args:
        log_probs: [n] of the sampled tokens under the policy, with gradient; any float dtype, computed in fp32 or more.
        batch: whole sequences; entries off the loss mask are never read and get a gradient of exactly 0.
    """
    return compute_loss(log_probs, batch, algorithm, policy_loss_of(algorithm))
