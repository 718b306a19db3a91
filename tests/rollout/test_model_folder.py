"""What engines read of a model folder, and the check of what a hand-over held."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megappo.errors import EngineError
from megappo.rollout.model_folder import read_end_tokens, read_vocabulary_size, read_weight_names
from megappo.rollout.weight_update import WeightUpdate


def folder_with(path: Path, names: list[str], **files: object) -> Path:
    save_file({name: torch.zeros(1) for name in names}, path / "model.safetensors")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_end_tokens_are_those_of_both_files(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, ["a"], config={"eos_token_id": 7}, generation_config={"eos_token_id": [3, 7]})
    assert read_end_tokens(folder) == [3, 7]
    assert read_end_tokens(folder_with(tmp_path, ["a"], config={"eos_token_id": None}, generation_config={})) == []


def test_the_vocabulary_is_that_of_the_text_model(tmp_path: Path) -> None:
    assert read_vocabulary_size(folder_with(tmp_path, ["a"], config={"vocab_size": 9})) == 9
    assert read_vocabulary_size(folder_with(tmp_path, ["a"], config={"text_config": {"vocab_size": 8}})) == 8


def test_a_tied_head_is_optional_and_buffers_are_no_parameters(tmp_path: Path) -> None:
    names = ["a", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert read_weight_names(folder_with(tmp_path, names, config={})) == ({"a", "lm_head.weight"}, set())
    tied = folder_with(tmp_path, names, config={"tie_word_embeddings": True})
    assert read_weight_names(tied) == ({"a"}, {"lm_head.weight"})
    assert read_weight_names(folder_with(tmp_path, ["a"], config={})) == ({"a"}, {"lm_head.weight"})


@pytest.fixture
def update() -> WeightUpdate:
    return WeightUpdate(name="engine x 0", required=["a", "b"], optional=["head"])


def test_an_engine_is_usable_before_and_after_a_hand_over_and_not_in_it(update: WeightUpdate) -> None:
    update.require_usable()
    update.begin()
    with pytest.raises(EngineError, match="engine x 0: generate: refused"):
        update.require_usable()
    update.receive(["a", "head"])
    update.receive(["b"])
    update.check_names()
    update.complete()
    update.require_usable()


def test_missing_and_unknown_names_are_listed_and_keep_the_engine_unusable(update: WeightUpdate) -> None:
    update.begin()
    update.receive(["a", "c"])
    with pytest.raises(EngineError, match=r"1 missing parameters \(b\) and 1 unknown parameters \(c\)"):
        update.check_names()
    with pytest.raises(EngineError, match="refused"):
        update.require_usable()
    update.begin()  # forgets what came before
    update.receive(["a", "b"])
    update.check_names()


def test_a_bucket_or_an_end_without_a_beginning_is_an_error(update: WeightUpdate) -> None:
    with pytest.raises(EngineError, match="no hand-over is open"):
        update.receive(["a"])
    with pytest.raises(EngineError, match="no hand-over is open"):
        update.check_names()


def test_spoiled_weights_are_refused_with_the_reason(update: WeightUpdate) -> None:
    update.spoil("they were released")
    with pytest.raises(EngineError, match="refused, since they were released"):
        update.require_usable()
