"""Folders of models with random weights, which engines can load."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.weights.buckets import torch_dtype


def write_random_model(config: dict[str, Any], folder: Path, *, weights: bool, dtype: str = "float32") -> None:
    """Write a model folder, its config.json alone or with weights; one that is there with the same settings stays.

    It names no end token, so that nothing but the stop tokens of a call ends a response. (Any: JSON)
    """
    wanted = config | {"eos_token_id": None, "bos_token_id": None, "torch_dtype": dtype}
    mark = folder / "made_from.json"
    if not weights:
        if not mark.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        return
    if mark.exists() and json.loads(mark.read_text(encoding="utf-8")) == wanted:
        return
    mark.unlink(missing_ok=True)
    torch.manual_seed(0)
    settings = AutoConfig.for_model(**wanted)
    AutoModelForCausalLM.from_config(settings, dtype=torch_dtype(dtype)).save_pretrained(folder)
    mark.write_text(json.dumps(wanted), encoding="utf-8")
