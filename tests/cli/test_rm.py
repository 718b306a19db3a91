"""`megappo rm`: what it refuses, it refuses before the folder of the run is touched."""

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.cli.main import main
from megappo.config.model import RandomModelConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.models.random_model import make_random_model

SHAPE = RandomModelConfig(
    hidden_size=32,
    ffn_hidden_size=32,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
PAIR = {"chosen": "01", "rejected": "10"}
HELD_OUT = ["data.validation.path=held-out.jsonl", "rm.test_freq=5"]
REFUSED: list[tuple[list[dict[str, Any]], list[str], str]] = [
    ([], [], "has no rows left"),
    ([PAIR], [], "1 rows are fewer than one batch of 2"),
    ([{"chosen": "01", "rejected": "01"}], [], "0 of 1 rows left (1 equal;"),
    ([PAIR, {"chosen": "0" * 40, "rejected": "1"}], HELD_OUT, "1 rows are fewer than one batch of 2"),
    ([PAIR, {"chosen": "01"}], [], "column 'rejected' is missing or null"),
    ([PAIR] * 2, HELD_OUT, "data source jsonl (held-out.jsonl) has no rows left"),
    ([PAIR] * 2, ["rm.test_freq=5"], "rm.test_freq=5 needs rows to measure the loss on"),
]


def test_what_is_refused_leaves_an_earlier_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    make_random_model(SHAPE, tokenizer=character_tokenizer("01"), seed=0, output="start")
    (tmp_path / "runs/rm").mkdir(parents=True)
    (tmp_path / "runs/rm/metrics.jsonl").write_text("{}")
    (tmp_path / "held-out.jsonl").write_text("")
    for rows, settings, message in REFUSED:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["rm", "reward_model.path=start", "data.train.path=train.jsonl", "rm.batch_size=2", *settings]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").rglob("*")] == ["rm", "metrics.jsonl"]
