"""Tiny models of every family, as in the tests of models, with what else lies in a Hugging Face folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.models.conftest import CONFIGS, EXPERTS, SHAPE, MakeModel, make_model

__all__ = ["make_model"]

SIDE_FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": json.dumps({"eos_token_id": [1, 2], "transformers_version": "5.0.0"}),
}
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(make_model: MakeModel, tmp_path: Path) -> MakeFolder:
    """Return a function that makes a folder of its own, with a tokenizer and other files, that a test may break."""

    def make(family: str, **changes: Any) -> Path:
        folder = tmp_path / f"hf_{len(list(tmp_path.iterdir()))}"
        shutil.copytree(make_model(family, **changes), folder)
        for name, text in SIDE_FILES.items():
            (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture(scope="session")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a value model of a family, as transformers has it."""

    def make(family: str) -> Path:
        torch.manual_seed(1)
        config = CONFIGS[family](**{**SHAPE, **EXPERTS.get(family, {}), "num_labels": 1, "pad_token_id": 0})
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path_factory.mktemp("value") / "model"
        model.save_pretrained(folder)
        return folder

    return make


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: value for file in folder.glob("model*.safetensors") for name, value in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, types and bits are the same."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the only weight file of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
