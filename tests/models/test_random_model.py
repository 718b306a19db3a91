from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megappo.config.model import RandomModelConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import CheckpointError, ConfigError
from megappo.models.random_model import make_random_model

TOKENIZER = character_tokenizer("abcdef")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def test_embedding_and_matrices_have_their_own_standard_deviations(tmp_path):
    made = make_random_model(RandomModelConfig(), tokenizer=TOKENIZER, seed=0, output=str(tmp_path / "model"))
    found = weights(made)
    # Means over at least 8,192 draws: three standard errors are below 3%.
    assert found["model.embed_tokens.weight"].std().item() == pytest.approx(1.0, rel=0.03)
    for name in ("lm_head.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        assert found[name].std().item() == pytest.approx(0.05, rel=0.03)
    assert found["model.layers.0.self_attn.q_proj.bias"].abs().max() == 0
    assert found["model.norm.weight"].unique().tolist() == [1.0]
    assert all(weight.dtype == torch.float32 for weight in found.values())


def test_the_folder_holds_tokenizer_and_end_token(tmp_path):
    made = make_random_model(RandomModelConfig(), tokenizer=TOKENIZER, seed=0, output=str(tmp_path / "deep" / "model"))
    model = AutoModelForCausalLM.from_pretrained(made)
    assert AutoTokenizer.from_pretrained(made).get_vocab() == TOKENIZER.get_vocab()
    assert GenerationConfig.from_pretrained(made).eos_token_id == model.config.eos_token_id == 1
    # Ten tokens (three special, '>', six letters), rounded up.
    assert (len(TOKENIZER), model.config.vocab_size) == (10, 64)
    assert [path.name for path in made.parent.iterdir()] == ["model"]


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (
        weights(make_random_model(RandomModelConfig(), tokenizer=TOKENIZER, seed=seed, output=str(tmp_path / name)))
        for name, seed in [("a", 3), ("b", 3), ("c", 4)]
    )
    assert torch.rand(1) == expected
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_tied_models_have_one_embedding(tmp_path):
    config = RandomModelConfig(tie_word_embeddings=True)
    found = weights(make_random_model(config, tokenizer=TOKENIZER, seed=0, output=str(tmp_path / "model")))
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_a_model_is_replaced_but_no_other_folder(tmp_path):
    target = tmp_path / "model"
    for seed in (0, 1):
        make_random_model(RandomModelConfig(num_layers=1), tokenizer=TOKENIZER, seed=seed, output=str(target))
    again = make_random_model(RandomModelConfig(num_layers=1), tokenizer=TOKENIZER, seed=1, output=str(tmp_path / "b"))
    assert torch.equal(weights(target)["lm_head.weight"], weights(again)["lm_head.weight"])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="no model folder"):
        make_random_model(RandomModelConfig(), tokenizer=TOKENIZER, seed=0, output=str(tmp_path / "notes"))
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_sizes_that_do_not_fit_are_refused_all_at_once(tmp_path):
    config = RandomModelConfig(hidden_size=130, num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(ConfigError, match=r"(?s)hidden_size=130.*use 136.*num_key_value_heads=3.*use 1, 2 or 4"):
        make_random_model(config, tokenizer=TOKENIZER, seed=0, output=str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()
