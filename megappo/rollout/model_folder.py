"""What engines read of a Hugging Face model folder besides its weights."""

import json
from pathlib import Path
from typing import Any

from megappo.config.model_support import key_value_heads
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
    return int(_read_text_config(folder)["vocab_size"])


def read_positions(folder: Path) -> int | None:
    """Return the longest sequence that config.json names, in tokens; None: it names none."""
    return _read_text_config(folder).get("max_position_embeddings")


def read_architecture(folder: Path) -> list[str]:
    """Return the model classes that config.json names."""
    return list(_read_json(folder / "config.json").get("architectures") or [])


def read_weight_names(folder: Path) -> tuple[set[str], set[str]]:
    """Return the names of the folder's parameters: those that a full set of weights must hold, and those it may.

    Raises:
        CheckpointError: the folder holds no safetensors.
    """
    with HuggingFaceWeights(folder) as weights:
        names = {name for name in weights.names() if not name.endswith("rotary_emb.inv_freq")}  # not parameters
    optional = {TIED_HEAD} if has_tied_head(folder) or TIED_HEAD not in names else set[str]()
    return names - optional, optional


def read_weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the folder's tensors. Raises CheckpointError as `read_weight_names`."""
    with HuggingFaceWeights(folder) as weights:
        return {name: weights.shape(name) for name in weights.names()}


def read_key_value_heads(folder: Path) -> int:
    """Return the number of key/value heads that config.json names, or of heads where it names none."""
    return int(key_value_heads(_read_text_config(folder)))


def has_tied_head(folder: Path) -> bool:
    """Return whether config.json says that the output layer is the embedding."""
    return bool(_read_json(folder / "config.json").get("tie_word_embeddings"))


def _read_text_config(folder: Path) -> dict[str, Any]:  # Any: JSON
    """Return what config.json says of the part of the model that reads text."""
    config = _read_json(folder / "config.json")
    return config.get("text_config", config)


def _read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
