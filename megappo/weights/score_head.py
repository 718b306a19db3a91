"""The score head of a sequence-classification model, seen from its files."""

from pathlib import Path

from megappo.errors import CheckpointError
from megappo.weights.name_map import VALUE_HEAD
from megappo.weights.safetensors_io import HuggingFaceWeights


def check_score_head(folder: str | Path, *, needed: bool) -> None:
    """Read the names and shapes of a model's files, no tensor.

    Args:
        needed: whether there must be a head; one that is there must have one label in any case.

    Raises:
        CheckpointError: there are no weights, no head, or one of several labels.
    """
    with HuggingFaceWeights(folder) as weights:
        labels = weights.shape(VALUE_HEAD)[0] if VALUE_HEAD in weights.names() else None
    if labels is None and needed:
        raise CheckpointError(
            f"{folder} has no {VALUE_HEAD}, the head that scores (give a sequence-classification model with one label, "
            "such as `megappo rm` makes)"
        )
    if labels not in (None, 1):
        raise CheckpointError(
            f"{folder} has a head {VALUE_HEAD} of {labels} labels, and a reward model has one (give a model with one "
            "label, or a language model for `megappo rm`)"
        )
