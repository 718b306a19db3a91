"""Adapters alone, as PEFT (tried with 0.21) reads them: adapter_config.json and adapter_model.safetensors."""

import json
from dataclasses import replace
from pathlib import Path

from megappo.config.lora import LoraConfig
from megappo.conversion.stored import StoredTensor

_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module of the model."""


def adapter_file_name() -> str:
    """Return the name of the only weight file."""
    return "adapter_model.safetensors"


def peft_name(tensor: StoredTensor) -> StoredTensor:
    """Return a factor, or a value head trained beside them, under the name that it has in PEFT's file."""
    return replace(tensor, hugging_face=tuple(_PREFIX + name for name in tensor.hugging_face))


def adapter_config(lora: LoraConfig, base: Path, role: str) -> str:
    """Return the content of adapter_config.json.

    Args:
        base: Hugging Face folder of the model beside which the adapters were trained.
        role: actor, or critic or reward_model, whose value head was trained whole.
    """
    has_value_head = role != "actor"
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_value_head else "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "modules_to_save": ["score"] if has_value_head else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2) + "\n"
