"""Low-rank adapters written plainly: transformers in double precision, each adapted matrix replaced by
W + alpha / rank * B A, autograd.

Shapes: I input and O output features of a matrix, r rank.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megappo.batch.stages import Experience
from megappo.config.lora import LoraConfig
from megappo.config.optim import OptimConfig
from tests.train import plain

Tensors = dict[str, torch.Tensor]


@dataclass
class PlainAdapters:
    """What a forward pass and some SGD steps on the adapters (and a value head) gave."""

    numbers: torch.Tensor
    """[N] log-probs or values before the steps."""
    losses: list[float]
    """Of each step, before it."""
    norms: list[float]
    """Gradient norms, before clipping."""
    gradient: Tensors
    """Of the first step, after clipping; by PEFT's names, and score.weight."""
    trained: Tensors
    """After the last step; by the same names."""
    merged: Tensors
    """All weights of the model after the last step."""


def random_adapters(folder: Path, lora: LoraConfig) -> Tensors:
    """Numbers for the factors of every target, B not zero; by PEFT's names."""
    generator = torch.Generator().manual_seed(3)
    factors: Tensors = {}
    for name, weight in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict().items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.split(".")[-1] in lora.targets:
            rows, columns = weight.shape
            factors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(lora.rank, columns, generator=generator)
            factors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(rows, lora.rank, generator=generator)
    return factors


def train(
    role: str,
    folder: Path,
    factors: Tensors,
    experience: Experience,
    lora: LoraConfig,
    optim: OptimConfig,
    *,
    steps: int,
) -> PlainAdapters:
    """Start from the factors and take SGD steps, all on the whole experience."""
    kind = AutoModelForCausalLM if role == "actor" else AutoModelForSequenceClassification
    # torch's grouped product of experts knows no double precision.
    model = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    model.requires_grad_(False)
    trained = {name: factor.double().requires_grad_() for name, factor in factors.items()}
    for name in [name for name in trained if "lora_A" in name]:
        module = model.get_submodule(name.removesuffix(".lora_A.weight"))
        pair = trained[name], trained[name.replace("lora_A", "lora_B")]
        module.forward = _adapted(module.weight, module.bias, *pair, scale=lora.alpha / lora.rank)  # type: ignore[assignment]
    if role == "critic":
        trained["score.weight"] = model.score.weight.requires_grad_()
    found = PlainAdapters(torch.empty(0), [], [], {}, {}, {})
    for _ in range(steps):
        if role == "actor":
            numbers, _, loss = plain.policy_loss(model, experience)
        else:
            numbers, loss = plain.value_loss(model, experience)
        for tensor in trained.values():
            tensor.grad = None
        loss.backward()
        found.losses.append(loss.item())
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), optim.clip_grad)))
        gradient = {name: tensor.grad.clone() for name, tensor in trained.items() if tensor.grad is not None}
        if not found.gradient:
            found.numbers, found.gradient = numbers, gradient
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor -= optim.lr * (gradient[name] + optim.weight_decay * tensor)
    found.trained = {name: tensor.detach().clone() for name, tensor in trained.items()}
    found.merged = merged(plain.saved(model), found.trained, lora)
    return found


def _adapted(weight: torch.Tensor, bias: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor, *, scale: float):
    return lambda input: torch.nn.functional.linear(input, weight + scale * (up @ down), bias)


def merged(weights: Tensors, adapters: Tensors, lora: LoraConfig) -> Tensors:
    """The weights with W + alpha / rank * B A in place of each adapted W, in double precision; a head as trained."""
    result = dict(weights)
    for name, tensor in adapters.items():
        if "lora_A" in name:
            weight = name.replace("lora_A.", "")
            product = adapters[name.replace("lora_A", "lora_B")].double() @ tensor.double()
            result[weight] = weights[weight].double() + lora.alpha / lora.rank * product
        elif "lora_B" not in name:
            result[name] = tensor
    return result
