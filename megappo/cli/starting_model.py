"""The model that `megappo sft` would start with, where it makes one: described before it is there."""

from pathlib import Path

from megappo.config.data import DataConfig
from megappo.config.model import RandomModelConfig


def write_starting_config(model: RandomModelConfig, data: DataConfig, folder: Path) -> Path:
    """Write the config.json of the model into a folder, which is returned.

    Args:
        data: of which the characters are taken.

    Raises:
        DataError: it cannot be read.
    """
    # transformers takes seconds to import.
    from megappo.data.starting_tokenizer import starting_tokenizer
    from megappo.models.random_model import random_model_config

    random_model_config(model, starting_tokenizer(data)).save_pretrained(folder)
    return folder
