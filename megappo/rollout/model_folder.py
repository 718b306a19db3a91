"""What engines read of a Hugging Face model folder besides its weights."""

import json
from pathlib import Path
from typing import Any

from megappo.weights.safetensors_io import HuggingFaceWeights

TIED_HEAD = "lm_head.weight"


def read_end_tokens(folder: Path) -> list[int]:
    """Return every end-of-sequence token id that generation_config.json or config.json names, sorted."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(ids)


def read_vocabulary_size(folder: Path) -> int:
    """Return the number of token embeddings that config.json names."""
    config = _read_json(folder / "config.json")
    return int(config.get("text_config", config)["vocab_size"])


def read_weight_names(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the folder's parameters: those that a full set of weights must hold, and those it may.

    Raises:
        CheckpointError: the folder holds no safetensors.
    """
    with HuggingFaceWeights(folder) as weights:
        names = {name for name in weights.names() if not name.endswith("rotary_emb.inv_freq")}  # not parameters
    optional = {TIED_HEAD} if _read_json(folder / "config.json").get("tie_word_embeddings") else set()
    if TIED_HEAD not in names:
        optional = {TIED_HEAD}
    return names - optional, optional


def _read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
