"""`megappo inspect weights`, from a config.json alone."""

import json
from pathlib import Path

import pytest

from megappo.cli.main import main

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    layout = ["actor.parallelism.tensor=2", "actor.parallelism.pipeline=2", "cluster.pools.main=4"]
    return ["inspect", "weights", "experiment=quickstart", f"model.path={tmp_path}", *layout]


def test_a_plan_is_printed_with_bytes_calls_memory_and_least_time(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    options = ["weight_sync.bucket_bytes=30000", "rollout.tensor=1", "--link-gb-s", "broadcast=2", "ipc=4", "--tensors"]
    assert main([*arguments, *options]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    # Per layer q and o 96 x 64, k and v 48 x 64, three of 96 x 64 and two norms of 64; embedding, head and a norm.
    layer = 2 * 96 * 64 + 2 * 48 * 64 + 3 * 96 * 64 + 2 * 64
    num_bytes = 4 * (2 * layer + 2 * 100 * 64 + 64)
    assert printed["bytes"] == num_bytes == sum(row["bytes"] for row in printed["table"])
    assert printed["tensors"] == len(printed["table"]) == 2 * 9 + 3
    assert [(source["stage"], source["sender"]) for source in printed["sources"]] == [(0, 0), (1, 2)]
    assert printed["calls"] == sum(source["calls"] for source in printed["sources"]) >= printed["fewest_calls"]
    routes = printed["routes"]
    assert routes["broadcast"]["least_s"] == pytest.approx(num_bytes / 2e9)
    # One engine rank holds all; of each stage a rank has half of what is cut, the first one the norms besides.
    assert routes["ipc"]["bytes_per_engine_rank"] == {"0": num_bytes}
    assert routes["ipc"]["least_s"] == pytest.approx(num_bytes / 4e9)
    assert routes["disk"]["least_s"] is None
    peaks = [*routes["broadcast"]["peak_extra_bytes"]["trainer"].values()]
    assert len(peaks) == 4 and max(peaks) <= printed["peak_limit_bytes"] == 2 * 30000
    assert "broadcast (configured)" in err


def test_the_model_that_sft_would_make_is_planned_before_it_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = [f"sft.output={tmp_path}", f"model.path={tmp_path}/model"]
    assert main(["inspect", "weights", "experiment=quickstart", *places]) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["rollout.tensor=3", "cluster.pools.main=4"], "rollout.tensor=3 must divide actor.parallelism.tensor=2 or be"),
        (["--link-gb-s", "broadcast"], "--link-gb-s=broadcast is not ROUTE=SPEED with one of broadcast, ipc, disk"),
        (["--link-gb-s", "ipc=0", "wire=3"], "--link-gb-s=wire=3 is not ROUTE=SPEED"),
    ],
)
def test_what_cannot_be_planned_is_a_message_with_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], extra: list[str], message: str
) -> None:
    assert main([*arguments, *extra]) == 2
    out, err = capsys.readouterr()
    assert message in err and out == ""
