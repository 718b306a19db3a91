"""`megappo inspect checkpoint`, on small checkpoints with models as the conversion tools write them."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.checkpoint.manifest import record_files
from megappo.checkpoint.store import CheckpointStore
from megappo.cli.main import main
from megappo.config.model import Dtype
from megappo.config.parallelism import ParallelismConfig
from megappo.config.store import load_run_config, resolved_yaml
from megappo.conversion.torch_dist import StoredItem, finish_stored, write_stored
from megappo.models.architecture import read_architecture
from megappo.models.description import ModelDescription

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
}
RUN = ["experiment=quickstart", "trainer.save_freq=2", "checkpoint.keep_last=1", "checkpoint.keep_best=reward/mean"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with checkpoints of the steps 2, 4 and 6, of which 2 is the best and 4 is damaged."""
    folder = tmp_path_factory.mktemp("runs")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    config = resolved_yaml(load_run_config([*RUN, f"model.path={model}"], rules=()))
    store = CheckpointStore(folder / "mine" / "checkpoints")
    for step in (2, 4, 6):
        written = store.begin(step)
        _write_actor(written / "actor", model)
        (written / "config.yaml").write_text(config)
        (written / "versions.json").write_text('{"python": "3.11"}')
        draws = [{"row": 3, "group_id": 5, "sequence_ids": [8, 9]}]
        position = {"sampler": {"drawn": 8 * step}, "open_draws": draws}
        (written / "loop.json").write_text(json.dumps({"weight_version": step, "position": position}))
        (written / "rollouts").mkdir()
        waiting = {"carried": {"sequences": [{}, {}]}, "next_step": {"train": {"sequences": [{}] * 4}}}
        (written / "rollouts" / "waiting.json").write_text(json.dumps(waiting))
        np.savez(written / "rollouts" / "begun.npz", sequence_ids=np.arange(3))
        ranks = list((written / "actor").iterdir())
        store.commit(step, record_files(written, ranks))
        store.record_score(step, "reward/mean", {2: 0.9, 4: 0.5, 6: 0.4}[step])
    os.truncate(store.directory / "step_000004" / "actor" / "common.pt", 3)
    (store.directory / "step_000008.writing").mkdir()
    yield folder / "mine"


def _write_actor(folder: Path, model: Path) -> None:
    folder.mkdir()
    sizes = {"embedding.weight": (100, 64), "optimizer.state.exp_avg.embedding.weight": (100, 64), "norm.weight": (64,)}
    items = [
        StoredItem(
            key=key,
            file="__0_0.distcp",
            offset=(0,) * len(shape),
            shape=shape,
            global_shape=shape,
            dtype=torch.float32,
        )
        for key, shape in sizes.items()
    ]
    items.append(StoredItem(key="random/shard_0_2", file="__0_0.distcp"))
    write_stored(folder, items, lambda item: io.BytesIO(b"x") if item.shape is None else torch.zeros(item.shape))
    finish_stored(folder, common={})
    description = ModelDescription.of(
        "actor",
        read_architecture(model),
        dtype=Dtype.float32,
        parallelism=ParallelismConfig(tensor=2),
        world_size=2,
        optimizer="adam",
    )
    (folder / "model.json").write_text(description.to_json())


def _inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", "checkpoint", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_is_a_table_of_its_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = _inspect(capsys, run)
    assert code == 0
    assert facts["kind"] == "checkpoints" and facts["latest"] == "step_000006"
    assert [(row["step"], row["whole"], row["kept"]) for row in facts["checkpoints"]] == [
        (2, True, ["best reward/mean"]),
        (4, False, []),
        (6, True, ["last", "latest"]),
    ]
    (problem,) = facts["checkpoints"][1]["problems"]
    assert problem.startswith("actor/common.pt has 3 bytes, ")
    assert facts["resume_auto"] == {"folder": str(run / "checkpoints" / "step_000006"), "notes": []}
    assert facts["others"] == ["step_000008.writing"]
    assert _inspect(capsys, run / "checkpoints") == (code, facts)


def test_one_checkpoint_says_what_is_in_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = _inspect(capsys, run / "checkpoints" / "step_000006", "--full")
    assert code == 0 and facts["whole"]
    assert (facts["step"], facts["weight_version"], facts["data"]) == (6, 6, {"drawn": 48})
    assert facts["versions"] == {"python": "3.11"}
    actor = facts["roles"]["actor"]
    assert (actor["parameters"], actor["tensors"], actor["optimizer_tensors"]) == (100 * 64 + 64, 2, 1)
    assert (actor["dtype"], actor["optimizer"], actor["ranks"], actor["layout"]) == (
        "float32",
        "adam",
        2,
        {"tensor": 2},
    )
    assert actor["random_states"] == 1
    assert actor["architecture"]["num_layers"] == 2
    assert facts["rollouts"] == {
        "carried_sequences": 2,
        "next_step_sequences": 4,
        "unfinished_sequences": 3,
        "open_draws": 1,
    }


def test_the_tables_say_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "checkpoint", str(run)]) == 0
    text = capsys.readouterr().out
    for part in (
        "latest is step_000006",
        "best reward/mean",
        "damaged: actor/common.pt has 3 bytes",
        "resume=auto goes",
    ):
        assert part in text
    assert main(["inspect", "checkpoint", str(run / "checkpoints" / "step_000006")]) == 0
    text = capsys.readouterr().out
    for part in (
        "step 6, made",
        "6,464",
        "2 ranks (tensor 2)",
        "48 prompts drawn",
        "next step sequences 4",
        "python 3.11",
    ):
        assert part in text
    assert main(["inspect", "checkpoint", str(run / "checkpoints" / "step_000006" / "actor")]) == 0
    assert "6,464" in capsys.readouterr().out


def test_a_damaged_one_is_code_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = _inspect(capsys, run / "checkpoints" / "step_000004")
    assert code == 1 and not facts["whole"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("actor/model.json", "?"),
        ("actor/.metadata", "?"),
        ("actor/common.pt", "?"),
        ("loop.json", "[]"),
        ("versions.json", "[]"),
        ("config.yaml", "[]"),
        ("rollouts/begun.npz", "?"),
    ],
)
def test_content_that_cannot_be_used_is_damage_whatever_its_size(
    file: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / "step_000006" / file
    before = path.read_bytes()
    try:
        path.write_text(text.ljust(len(before)))
        code, facts = _inspect(capsys, run / "checkpoints" / "step_000006")
        assert code == 1 and not facts["whole"] and facts["problems"]
        assert main(["inspect", "checkpoint", str(run / "checkpoints" / "step_000006")]) == 1
        model = ["inspect", "checkpoint", str(path.parent), "--json"]
        if path.parent.name == "actor":
            capsys.readouterr()
            assert main(model) == 1 and path.name in json.loads(capsys.readouterr().out)["problem"]
        capsys.readouterr()
        code, facts = _inspect(capsys, run / "checkpoints" / "step_000006", "--config", *RUN)
        assert code == 1 and "resume" not in facts, "nothing is compared with it"
    finally:
        path.write_bytes(before)


def test_a_run_that_would_go_on_is_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = [*RUN, f"model.path={run.parent}/model"]
    code, facts = _inspect(capsys, run, "--config", *same)
    assert (code, facts["resume"]["possible"], facts["resume"]["differences"]) == (0, True, [])
    arguments = ["inspect", "checkpoint", str(run), "--config", *same, "seed=4", "trainer.total_steps=9"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "this configuration cannot go on from" in text
    assert "seed=4, was 0: the position in the data" in text
    assert "trainer.total_steps=9, was 170: the run goes on with the new value" in text


def test_another_model_is_refused_by_what_differs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 3}))
    code, facts = _inspect(capsys, run, "--config", *RUN, f"model.path={tmp_path}")
    refused = [found for found in facts["resume"]["differences"] if found["verdict"] == "refused"]
    assert code == 1
    assert [found["text"] for found in refused] == [
        "config.json of model.path: num_layers=3, was 2: the checkpoint holds another model"
    ]


@pytest.mark.parametrize("content", [[], ["latest"]])
def test_a_folder_without_checkpoints_is_told_of(
    content: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in content:
        (tmp_path / name).write_text("step_000004")
    assert main(["inspect", "checkpoint", str(tmp_path)]) == (1 if content else 2)
    out, err = capsys.readouterr()
    assert "holds no checkpoint" in err if not content else "names step_000004, which is not there" in out
