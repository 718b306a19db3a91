"""The loss of a reward model on pairs of texts of which one is preferred.

Shapes: P pairs of a micro-batch.
"""

import torch
from torch import Tensor

from megappo.algo.losses.base import LossOutput
from megappo.observability import metrics


def compute_preference_loss(chosen: Tensor, rejected: Tensor, *, margins: Tensor, weights: Tensor) -> LossOutput:
    """Negative log-likelihood of the preferences under the Bradley-Terry model.

    Formula: sum of weight * -log sigmoid(s_chosen - s_rejected - margin).
    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2.

    Metrics, means over pairs: `reward_model/accuracy` counts s_chosen > s_rejected (equal scores are wrong),
    `reward_model/difference/mean` is s_chosen - s_rejected, `reward_model/chosen/mean` and `reward_model/rejected/mean`
    the two; `reward_model/preference_loss` is the loss of a pair, weighted.

    Args:
        chosen: [P] scores of the preferred texts, with gradient.
        rejected: [P] of the others.
        margins: [P] by how much the first should be higher.
        weights: [P] of each pair in the loss of the mini-batch.
    """
    chosen, rejected = chosen.float(), rejected.float()
    differences = chosen - rejected
    losses = -torch.nn.functional.logsigmoid(differences - margins)
    loss = (weights * losses).sum()
    sums = [loss, weights.sum(), (differences > 0).sum(), differences.sum(), chosen.sum(), rejected.sum()]
    host = torch.stack([number.detach().to(loss.dtype) for number in sums]).cpu().numpy()
    pairs = len(losses)
    return LossOutput(
        loss=loss,
        metrics={
            "reward_model/preference_loss": metrics.mean(host[0], host[1]),
            "reward_model/accuracy": metrics.mean(host[2], pairs),
            "reward_model/difference/mean": metrics.mean(host[3], pairs),
            "reward_model/chosen/mean": metrics.mean(host[4], pairs),
            "reward_model/rejected/mean": metrics.mean(host[5], pairs),
        },
    )
