"""What config.json of a written model says otherwise than the one that it started from. Torch-free."""

from collections.abc import Mapping
from typing import Any


def config_changes(source: Mapping[str, Any], *, dtype: str, has_value_head: bool) -> dict[str, object]:
    """Return the keys that differ. A value model is written as `...ForSequenceClassification` with one label.

    Args:
        source: config.json of the model that it started from. Any: values of a JSON object.
        dtype: of the written weights, such as `bfloat16`.
    """
    # transformers 5 says dtype, transformers 4 torch_dtype.
    keys = [key for key in ("dtype", "torch_dtype") if key in source] or ["dtype"]
    changes: dict[str, object] = dict.fromkeys(keys, dtype)
    if has_value_head:
        changes |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        if known := source.get("architectures"):
            changes["architectures"] = [str(name).replace("ForCausalLM", "ForSequenceClassification") for name in known]
    return changes
