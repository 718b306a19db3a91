"""The same mathematics written plainly: transformers, one sequence at a time, autograd, torch's AdamW and SGD.

Shapes: L tokens of one sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from megappo.batch.stages import Experience
from megappo.config.optim import OptimConfig
from tests.train.batches import WHITENING, weights_of

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ENTROPY_COEF, KL_COEF = 0.02, 0.3
VALUE_CLIP = 0.4
TEMPERATURE = 0.7


@dataclass
class PlainResult:
    """What a forward pass and one optimizer step gave."""

    numbers: torch.Tensor
    """[N] log-probs or values, 0 off the response mask."""
    entropy: float
    """Mean over response tokens (0 for values)."""
    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """After clipping."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the step."""


@dataclass
class Sequence:
    """One sequence of an experience, its fields as tensors [L - 1] for tokens 1 to L - 1."""

    tokens: torch.Tensor
    """[L]."""
    start: int
    """Position of its first token in the batch."""
    weight: float
    fields: dict[str, torch.Tensor]


FIELDS = ("advantages", "old_log_probs", "ref_log_probs", "values", "returns", "correction_weights")


def sequences_of(experience: Experience) -> Iterator[Sequence]:
    weights = weights_of(experience)
    for index, sequence_id in enumerate(experience.sequence_ids.tolist()):
        start, stop = int(experience.offsets[index]), int(experience.offsets[index + 1])
        fields = {name: torch.from_numpy(getattr(experience, name)[start + 1 : stop]) for name in FIELDS}
        fields |= {
            name: torch.from_numpy(getattr(experience, name)[start + 1 : stop])
            for name in ("loss_mask", "response_mask")
        }
        tokens = torch.from_numpy(experience.tokens[start:stop]).long()
        yield Sequence(tokens=tokens, start=start, weight=weights[sequence_id], fields=fields)


def train_actor(folder: Path, experience: Experience, optim: OptimConfig) -> PlainResult:
    """Log-probs, entropy, and one step of PPO with entropy bonus and KL in the loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    numbers, entropy, loss = policy_loss(model, experience)
    return step(model, loss, optim, numbers, entropy)


def policy_loss(model: PreTrainedModel, experience: Experience) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Log-probs [N], mean entropy, and the loss."""
    numbers = torch.zeros(experience.num_tokens)
    losses, entropies = [], []
    for sequence in sequences_of(experience):
        logits = model(sequence.tokens[None]).logits[0, :-1] / TEMPERATURE
        log_p = torch.log_softmax(logits.double(), -1)
        chosen = log_p.gather(1, sequence.tokens[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        response, kept = sequence.fields["response_mask"], sequence.fields["loss_mask"]
        numbers[sequence.start + 1 :][: len(chosen)] = torch.where(response, chosen.detach().float(), 0.0)
        entropies.append(entropy[response].detach())

        advantages = (sequence.fields["advantages"][kept] - WHITENING.mean) * WHITENING.inverse_std
        ratio = (chosen[kept] - sequence.fields["old_log_probs"][kept]).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
        difference = chosen[kept] - sequence.fields["ref_log_probs"][kept]
        kl = ((-difference).exp() - 1 + difference).clamp(max=10.0)  # the cap of the k3 estimator
        token_loss = surrogate * sequence.fields["correction_weights"][kept]
        token_loss = token_loss + KL_COEF * kl - ENTROPY_COEF * entropy[kept]
        losses.append(sequence.weight * token_loss.sum())
    return numbers, float(torch.cat(entropies).mean()), torch.stack(losses).sum()


def train_critic(folder: Path, experience: Experience, optim: OptimConfig) -> PlainResult:
    """Values of the states before the tokens, and one step on the clipped value loss."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    numbers, loss = value_loss(model, experience)
    return step(model, loss, optim, numbers, 0.0)


def value_loss(model: PreTrainedModel, experience: Experience) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [N] and the loss."""
    numbers = torch.zeros(experience.num_tokens)
    losses = []
    for sequence in sequences_of(experience):
        hidden = model.model(sequence.tokens[None]).last_hidden_state[0]
        values = model.score(hidden)[:-1, 0]
        response, kept = sequence.fields["response_mask"], sequence.fields["loss_mask"]
        numbers[sequence.start + 1 :][: len(values)] = torch.where(response, values.detach(), 0.0)
        old, returns = sequence.fields["values"][kept], sequence.fields["returns"][kept]
        bounded = torch.minimum(torch.maximum(values[kept], old - VALUE_CLIP), old + VALUE_CLIP)
        error = torch.maximum((values[kept] - returns) ** 2, (bounded - returns) ** 2)
        losses.append(sequence.weight * 0.5 * error.sum())
    return numbers, torch.stack(losses).sum()


def weights_after_sgd(
    role: str, folder: Path, experience: Experience, optim: OptimConfig, *, steps: int
) -> dict[str, torch.Tensor]:
    """Weights after some steps of SGD with momentum, each on the whole experience."""
    if role == "actor":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    sgd = torch.optim.SGD(parameter_groups(model, optim), lr=optim.lr, momentum=optim.momentum)
    for _ in range(steps):
        sgd.zero_grad()
        loss = policy_loss(model, experience)[-1] if role == "actor" else value_loss(model, experience)[-1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        sgd.step()
    return saved(model)


def parameter_groups(model: PreTrainedModel, optim: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    decays: Callable[[torch.Tensor], bool] = lambda parameter: parameter.ndim > 1
    return [
        {"params": [p for p in parameters if decays(p)], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]


def step(
    model: PreTrainedModel, loss: torch.Tensor, optim: OptimConfig, numbers: torch.Tensor, entropy: float
) -> PlainResult:
    """Backward, clip, AdamW."""
    loss.backward()
    named = dict(model.named_parameters())
    norm = torch.nn.utils.clip_grad_norm_(named.values(), optim.clip_grad)
    groups = parameter_groups(model, optim)
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    assert len(gradients) == len(named)
    torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps).step()
    weights = saved(model)
    for name, parameter in named.items():
        parameter.data = gradients[name]
    return PlainResult(numbers, entropy, loss.item(), float(norm), saved(model), weights)


def saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Its tensors under the names that they have in a model folder (experts are fused in memory)."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def smallest_router_margin(folder: Path, experience: Experience) -> float:
    """Smallest difference of probability between the last expert that is chosen for a token and the next one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen = model.config.num_experts_per_tok
    margins = []
    for sequence in sequences_of(experience):
        for logits in model(sequence.tokens[None], output_router_logits=True).router_logits:
            ordered = torch.softmax(logits, -1).sort(-1, descending=True).values
            margins.append(float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))
    return min(margins)
