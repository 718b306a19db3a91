"""Random weights: the same wherever the same parameter lies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.models.parameters import mapped_parameters
from megappo.train.actor import ActorTrainer
from tests.dist_world import DistWorld

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def starting_weights(folder: str, layout: ParallelismConfig) -> dict[str, torch.Tensor]:
    """This rank's parameters under the names of the Hugging Face tensors they are made of."""
    config = RunConfig()
    config.model.path, config.model.random_weights = folder, True
    config.actor.parallelism = layout
    trainer = ActorTrainer(config, backend=CPU)
    found: dict[str, torch.Tensor] = {}
    for chunk in trainer.chunks:
        for parameter, mapped in mapped_parameters(chunk):
            found[" ".join(mapped.hugging_face)] = parameter.detach().clone()
    return found


def start(world: DistWorld, folder: Path, layout: ParallelismConfig, **size: Any) -> list[dict[str, torch.Tensor]]:
    return world.run(starting_weights, parallelism=layout, folder=str(folder), layout=layout, **size)


def test_shards_differ_and_what_is_replicated_does_not(world: DistWorld, folder: Path):
    first, second = start(world, folder, ParallelismConfig(tensor=2))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        if weight.dim() == 1:
            expected = 0.0 if "bias" in name else 1.0
            assert (weight == expected).all() and (second[name] == expected).all(), name
        else:
            assert not torch.equal(weight, second[name]), name
            assert float(weight.std()) == pytest.approx(0.02, rel=0.15), name
            assert abs(float(weight.mean())) < 0.002, name


def test_replicas_and_both_ends_of_a_tied_embedding_are_equal(world: DistWorld, folder: Path):
    first, second = start(world, folder, ParallelismConfig(), world_size=2)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    front, back = start(world, folder, ParallelismConfig(pipeline=2))
    name = "model.embed_tokens.weight"
    assert torch.equal(front[name], back[name])
    assert torch.equal(front[name], first[name]), "unsplit parameters do not depend on the layout"
