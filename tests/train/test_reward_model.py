"""Reward models against transformers' sequence classification, and their loss on pairs written plainly.

Tolerances: fp32 sums in another order, 1e-5 of scores of order 1, and of the largest entry of a gradient.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from megappo.config.lora import LoraConfig
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.reward_jobs import (
    LENGTHS,
    MARGINS,
    make_pairs,
    refusals,
    score_and_step,
    scores_of,
    train_and_save,
)

IDS = make_pairs().sequence_ids.tolist()
ONE = ParallelismConfig()
# Pairs stay together; a micro-batch is empty, and the order is another one.
SPLIT = [[IDS[4:6], [], [IDS[7], IDS[0], IDS[6], IDS[1]], IDS[2:4]]]
LAYOUTS = {
    "one process": (ONE, SPLIT),
    "tensor and sequence": (ParallelismConfig(tensor=2, sequence=True), SPLIT),
    "pipeline": (ParallelismConfig(pipeline=2), SPLIT),
    "virtual pipeline": (ParallelismConfig(pipeline=2, virtual_pipeline=2), SPLIT),
    "context": (ParallelismConfig(context=2), SPLIT),
    "data": (ONE, [[IDS[2:4], [*IDS[6:8], *IDS[4:6]]], [[], IDS[:2]]]),
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 1,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=12, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **(SMALL | {"head_dim": 8}), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_loss_and_gradients_are_those_of_transformers(
    world: DistWorld, critic_folder: Path, layout: str
) -> None:
    parallelism, deal = LAYOUTS[layout]
    size = parallelism.model_size * len(deal)
    found = world.run(
        score_and_step, world_size=size, parallelism=parallelism, folder=str(critic_folder), layout=parallelism,
        deal=deal,
    )  # fmt: skip
    scores, loss, gradients = plain_step(critic_folder)
    given = [result for result in found if result.scores is not None]
    for name in ("scores", "frozen_scores"):
        of_text = {
            text: score for result in given for text, score in zip(result.sequence_ids, getattr(result, name).tolist())
        }
        assert [of_text[text] for text in IDS] == pytest.approx(scores, abs=1e-5)
    # The first and the third pair begin with the preferred text.
    differences = [scores[0] - scores[1], scores[3] - scores[2], scores[4] - scores[5], scores[7] - scores[6]]
    expected = {
        "reward_model/preference_loss": loss,
        "reward_model/loss/mean": loss,
        "reward_model/accuracy": sum(difference > 0 for difference in differences) / 4,
        "reward_model/difference/mean": sum(differences) / 4,
        "reward_model/chosen/mean": (scores[0] + scores[3] + scores[4] + scores[7]) / 4,
        "reward_model/rejected/mean": (scores[1] + scores[2] + scores[5] + scores[6]) / 4,
        "reward_model/grad_norm": sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5,
    }
    for name, value in expected.items():
        totals = [result.metrics[name] for result in given]
        assert sum(total for total, _ in totals) / sum(count for _, count in totals) == pytest.approx(value, abs=1e-5)
    exported = {name: tensor for result in found for name, tensor in result.gradients.items()}
    assert exported.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(exported[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_as_transformers_does(world: DistWorld, tmp_path: Path, family: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(FAMILIES[family], dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(tmp_path)
    (scores,) = world.run(scores_of, parallelism=ONE, folder=str(tmp_path), layout=ONE)
    assert scores.tolist() == pytest.approx(plain_scores(tmp_path), abs=1e-5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["all weights", "adapters"])
def test_transformers_loads_what_was_trained(
    world: DistWorld, policy_folder: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    layout = ParallelismConfig(tensor=2)
    output = tmp_path / "model"
    scores = world.run(
        train_and_save, parallelism=layout, folder=str(policy_folder), layout=layout, output=str(output), lora=lora
    )[0]
    assert np.ptp(scores) > 0.01
    assert scores.tolist() == pytest.approx(plain_scores(output), abs=1e-5)


def test_a_model_without_a_score_head_and_a_cut_pair_are_refused(
    world: DistWorld, policy_folder: Path, critic_folder: Path
) -> None:
    (messages,) = world.run(refusals, parallelism=ONE, policy=str(policy_folder), folder=str(critic_folder))
    assert "has no score.weight, the head that scores (give a sequence-classification model" in messages[0]
    assert "both texts of a pair are needed in one" in messages[1]


def plain_scores(folder: Path) -> list[float]:
    """Scores by transformers of all texts in one padded batch."""
    with torch.no_grad():
        return _scores(AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)).tolist()


@cache
def plain_step(folder: Path) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Scores, mean loss over the four pairs, gradients."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    scores = _scores(model)
    differences = torch.stack(
        [scores[0] - scores[1], scores[3] - scores[2], scores[4] - scores[5], scores[7] - scores[6]]
    )
    loss = torch.log1p(torch.exp(-(differences - torch.tensor(MARGINS)))).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return scores.tolist(), loss.item(), {name: grad for name, grad in gradients.items() if grad is not None}


def _scores(model: Any) -> torch.Tensor:
    pairs = make_pairs()
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        start = pairs.offsets[row]
        ids[row, :length] = torch.from_numpy(pairs.tokens[start : start + length].astype(np.int64))
        mask[row, :length] = 1
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]
