"""Rules about what this version cannot do: asked for, it is refused here and not deep in a worker."""

from megappo.config.model import FamilySource
from megappo.config.model_families import MODEL_FAMILIES
from megappo.config.run import RunConfig
from megappo.errors import Violation


def bridge_cannot_be_installed_beside_the_engine(config: RunConfig) -> list[Violation]:
    """Megatron-Bridge 0.6.2 takes transformers up to 5.12.1 and 0.3.1, the last one for Python 3.11, below 5.0; SGLang
    0.5.23 takes 5.19.0 alone."""
    if config.model.family is not FamilySource.bridge:
        return []
    return [
        Violation(
            key="model.family",
            value="bridge",
            rule="cannot be had: Megatron-Bridge takes no release of transformers that SGLang takes, so the two cannot "
            "be installed together",
            remedy=f"use auto with one of {', '.join(sorted(MODEL_FAMILIES))}; a new family is a name table and a "
            "registration, see megappo/models/families.py",
        )
    ]
