"""`megappo rm` on real Ray and Megatron, and a run whose answers the result scores, on a pool of its own."""

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megappo.config.model import RandomModelConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.models.random_model import make_random_model
from megappo.observability.metric_catalogue import MEASURED, undocumented
from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run

pytestmark = pytest.mark.slow

TRAIN, HELD_OUT = 1500, 200


def sorted_digits(generator: random.Random) -> dict[str, str]:
    """A pair: five digits in order are preferred to the same digits in another order."""
    digits = [str(generator.randrange(10)) for _ in range(5)]
    chosen = "".join(sorted(digits))
    while "".join(digits) == chosen:
        digits = [str(generator.randrange(10)) for _ in range(5)]
        chosen = "".join(sorted(digits))
        generator.shuffle(digits)
    return {"chosen": chosen, "rejected": "".join(digits)}


@pytest.fixture(scope="module")
def overrides(workspace: Path) -> list[str]:
    """Data, a starting model with random weights, and the settings of the training."""
    generator = random.Random(0)
    for name, count in (("train", TRAIN), ("held-out", HELD_OUT)):
        lines = [json.dumps(sorted_digits(generator)) + "\n" for _ in range(count)]
        (workspace / f"{name}.jsonl").write_text("".join(lines))
    shape = RandomModelConfig(
        hidden_size=64,
        ffn_hidden_size=128,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    start = workspace / "digits"
    make_random_model(shape, tokenizer=character_tokenizer("0123456789"), seed=0, output=str(start))
    return [
        f"reward_model.path={start}",
        "reward_model.parallelism.tensor=2",
        "data.train.path=train.jsonl",
        "data.validation.path=held-out.jsonl",
        "cluster.pools.main=2",
        "rm.max_steps=60",
        "rm.batch_size=32",
        "rm.optim.lr=2e-3",
        "rm.test_freq=30",
        "rm.save_freq=20",
        "rm.tracked=false",
    ]


@pytest.fixture(scope="module")
def trained(launch: Launch, overrides: list[str]) -> Run:
    """The finished training."""
    run = launch("rm", "rm", *overrides, "rm.output=runs/rm")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    return run


def lines_of(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what is measured by the clock."""
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def test_accuracy_on_held_out_pairs_rises(trained: Run) -> None:
    lines = lines_of(trained)
    accuracies = {
        line["step"]: line["reward_model/val_accuracy"] for line in lines if "reward_model/val_accuracy" in line
    }
    # The score head starts at zero: all scores are equal, which is no right judgement.
    assert list(accuracies) == [0, 30, 60] and accuracies[0] == 0.0
    assert accuracies[60] > 0.9
    for step, accuracy in accuracies.items():
        assert re.search(rf"held-out loss after step {step}: \d\.\d+, accuracy {accuracy:.4f}", trained.output)
    assert trained.summary()["held_out_accuracy_last"] == accuracies[60]
    assert not undocumented(sorted({name for line in lines for name in line if name != "step"}))


def test_transformers_judges_the_held_out_pairs_as_the_workers_do(trained: Run, workspace: Path) -> None:
    folder = trained.directory / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [json.loads(line) for line in (workspace / "held-out.jsonl").read_text().splitlines()]
    texts = [pair[side] + tokenizer.eos_token for side in ("chosen", "rejected") for pair in pairs]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    differences = scores[:HELD_OUT] - scores[HELD_OUT:]
    last = lines_of(trained)[-1]
    assert (differences > 0).double().mean().item() == pytest.approx(last["reward_model/val_accuracy"])
    assert differences.double().mean().item() == pytest.approx(last["reward_model/val_difference/mean"], abs=1e-4)


def test_killed_and_resumed_gives_bitwise_the_same(launch: Launch, overrides: list[str], trained: Run) -> None:
    settings = [*overrides, "rm.output=runs/rm-killed"]
    # At the second checkpoint, after step 40.
    first = launch("rm", "rm-killed", *settings, killed=["save: after the pointer moved", "2"])
    assert first.wait(START_TIMEOUT_S) == -signal.SIGKILL, first.output
    assert len(first.metrics()) == 40
    second = launch("rm", "rm-killed", *settings, "resume=auto")
    assert second.wait(START_TIMEOUT_S) == 0, second.output
    assert lines_of(second) == lines_of(trained)
    weights = "model/model.safetensors"
    assert (second.directory / weights).read_bytes() == (trained.directory / weights).read_bytes()


def test_a_run_is_scored_by_it_beside_another_term(launch: Launch, sft_run: Run, trained: Run, workspace: Path) -> None:
    terms = "{order: {name: reward_model, weight: 0.5}, words: {name: reasoning_gym, params: {task: spell_backward}}}"
    run = launch(
        "train",
        "scored",
        "experiment=quickstart",
        "rollout=hf",
        "placement=split",
        f"reward_model.path={trained.directory / 'model'}",
        "reward_model.parallelism.tensor=1",
        "reward_model.offload.params=true",
        "cluster.pools={training: 2, engines: 1, scorers: 2}",
        "cluster.reward=scorers",
        "reward.name=exact_match",
        "reward.params={}",
        f"reward.terms={terms}",
        "batching.prompts_per_step=4",
        "trainer.total_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "tracking.trackers=[]",
    )
    assert run.wait(2 * START_TIMEOUT_S) == 0, run.output
    assert "the reward model has a tokenizer of its own: texts are tokenised anew for it" in run.output
    for line in run.metrics():
        parts = 0.5 * line["reward/order/mean"] + line["reward/words/mean"]
        assert line["reward/mean"] == pytest.approx(parts, abs=1e-5)
        assert line["reward/order/mean"] != 0
