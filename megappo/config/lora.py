"""Low-rank adapters beside frozen weights, and the rules about them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megappo.errors import Violation

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): weights stay as they are, and the chosen matrices of every layer learn
    an update alpha / rank * B A beside them, with `rank` rows in A and columns in B. A critic's value head is trained
    whole. Engines and exported models get the sum."""

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: [*ATTENTION_TARGETS, *MLP_TARGETS])
    """Hugging Face names of matrices, as in PEFT's target_modules: q_proj, k_proj, v_proj (which Megatron fuses into
    linear_qkv), o_proj (linear_proj), gate_proj, up_proj (linear_fc1), down_proj (linear_fc2). Experts take none."""


def lora_violations(lora: LoraConfig | None, *, key: str) -> Iterator[Violation]:
    """Yield what is wrong with the adapters themselves, whatever the model.

    Args:
        key: of the section, for example actor.lora.
    """
    if lora is None:
        return
    known = (*ATTENTION_TARGETS, *MLP_TARGETS)
    names = f"some of {', '.join(known)}"
    if not lora.targets:
        yield Violation(
            key=f"{key}.targets", value="[]", rule="must not be empty", remedy=f"name {names}, or set {key}=null"
        )
    for name in dict.fromkeys(lora.targets):
        if name not in known:
            yield Violation(key=f"{key}.targets", value=name, rule="is no matrix of a layer", remedy=f"use {names}")
        elif lora.targets.count(name) > 1:
            yield Violation(key=f"{key}.targets", value=name, rule="is named twice", remedy="name it once")


def lora_on_experts(lora: LoraConfig | None, *, has_experts: bool, key: str) -> list[Violation]:
    """Experts take no adapters, and naming a matrix that only some layers would get would hide that."""
    named = [name for name in lora.targets if name in MLP_TARGETS] if lora is not None and has_experts else []
    rule = "is for dense models: the experts of this one take no adapters"
    remedy = f"use {key}.targets=[{','.join(ATTENTION_TARGETS)}]"
    return [Violation(key=f"{key}.targets", value=name, rule=rule, remedy=remedy) for name in named]
