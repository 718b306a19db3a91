"""Hand-overs of a sparse model to a real SGLang server: its experts are compared, too, and are those that were sent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megappo.config.rollout import SamplingConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.rollout import ENGINES
from megappo.weight_sync import TRANSPORTS
from tests.rollout.conftest import END_TOKENS, VOCABULARY, engine_spec
from tests.rollout.subject import Run, Subject
from tests.rollout.test_engine_contract import ask, largest_difference
from tests.rollout.trainer_process import Trainer

pytestmark = pytest.mark.slow


def make_sparse_model(folder: Path, seed: int) -> Path:
    """Save a random Qwen3-MoE."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=END_TOKENS[0],
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    character_tokenizer(map(chr, range(65, 125))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sparse_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sparse")
    return make_sparse_model(root / "first", seed=0), make_sparse_model(root / "second", seed=1)


@pytest.fixture(scope="module")
def sparse(
    sparse_folders: tuple[Path, Path], trainer: Trainer, run: Run[Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """A server with the first folder's weights."""
    folder = tmp_path_factory.mktemp("sparse-engine")
    engine = ENGINES.get("sglang")(engine_spec(sparse_folders[0], folder / "engine.log"))
    run(engine.start())
    subject = Subject(engine=engine, run=run, trainer=trainer, folder=folder, source=sparse_folders[0])
    subject.join("sparse-source")
    yield subject
    run(engine.stop())


@pytest.mark.parametrize("transport", TRANSPORTS.names())
def test_experts_are_handed_over_and_compared(
    transport: str, sparse: Subject, sparse_folders: tuple[Path, Path]
) -> None:
    names = {tensor.name.rpartition("@")[0] for tensor in sparse.run(sparse.engine.held_tensors())}
    assert {"model.layers.0.mlp.experts.w13_weight", "model.layers.0.mlp.experts.w2_weight"} <= names
    for folder in reversed(sparse_folders):
        sparse.hand_over(folder, transport=transport)  # which compares all tensors
        outputs = sparse.generate(ask(2), SamplingConfig(max_new_tokens=8))
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert largest_difference(model, outputs) < 1e-4


def test_the_checksum_of_experts_is_that_of_their_weights(sparse: Subject, sparse_folders: tuple[Path, Path]) -> None:
    wanted = sparse.run(sparse.engine.held_tensors())
    experts = next(tensor for tensor in wanted if "w13_weight" in tensor.name)
    sent = sparse.run(sparse.engine.checksums([experts.name]))
    sparse.hand_over(sparse_folders[1])
    other = sparse.run(sparse.engine.checksums([experts.name]))
    sparse.hand_over(sparse_folders[0])
    assert sent[experts.name] != other[experts.name]
    assert sparse.run(sparse.engine.checksums([experts.name])) == sent
