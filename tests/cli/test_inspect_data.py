"""`megappo inspect data`: hand-counted facts, the text, and the exit code."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.cli.main import main
from megappo.data.tokenizer import character_tokenizer


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command on a model folder with a tokenizer of the letters a to d; returns exit code and output."""
    character_tokenizer("abcd").save_pretrained(tmp_path / "model")

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["inspect", "data", f"model.path={tmp_path / 'model'}", "cluster=cpu", *arguments])
        return code, capsys.readouterr().out

    return run


def write(path: Path, prompts: list[str | None]) -> Path:
    lines = [json.dumps({"prompt": prompt, "answer": "1", "level": at}) + "\n" for at, prompt in enumerate(prompts)]
    path.write_text("".join(lines))
    return path


def test_facts_of_one_source(inspect, tmp_path: Path) -> None:
    # With '>' they have 2, 3, 3 and 5 tokens; the last one is too long.
    path = write(tmp_path / "rows.jsonl", ["a", "bc", "bc", "abcd", "abcda"])
    code, output = inspect(
        f"data.train.path={path}", "data.max_prompt_tokens=5", "batching.prompts_per_step=3", "--json"
    )
    facts = json.loads(output)
    (source,) = facts.pop("sources")
    assert code == 0
    assert facts == {
        "tokenizer": str(tmp_path / "model"),
        "shares": {},
        "prompts_per_step": 3,
        "steps_per_epoch": 2,
        "validation_prompts_in_training": 0,
        "on_shared": "keep",
        "refused": [],
    }
    example = "jsonl row 4: has 6 tokens, more than max_prompt_tokens=5: 'abcda>'"
    assert source == {
        "key": "data.train",
        "kind": "jsonl",
        "place": str(path),
        "rows": 5,
        "prompts": 4,
        "duplicates": 1,
        "left_out": {"too_long": {"rows": 1, "refused": False, "example": example}},
        "refused": [],
        "columns": {"answer": {"text": 4}, "extra.level": {"number": 4}},
        "by_source": {"jsonl": 4},
        "tokens": {
            "total": 13,
            "mean": 3.25,
            "min": 2,
            "max": 5,
            "median": 3.0,
            "p99": pytest.approx(4.94),
            "histogram": [
                {"from": 2, "to": 2, "prompts": 1},
                {"from": 3, "to": 3, "prompts": 2},
                {"from": 4, "to": 4, "prompts": 0},
                {"from": 5, "to": 5, "prompts": 1},
            ],
        },
        "samples": [
            {"row": 0, "source": "jsonl", "text": "a>", "tokens": [4, 3], "answer": "1", "extra": {"level": "0"}}
        ],
    }


def test_text_of_a_mixture_with_validation(inspect, tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", ["a", "b"]), write(tmp_path / "b.jsonl", ["c", None])
    code, output = inspect(
        f"data.train_sources={{one: {{path: '{first}', weight: 3}}, two: {{path: '{second}', on_bad_row: filter}}}}",
        f"data.validation.path={first}",
        "batching.prompts_per_step=1",
    )
    assert code == 0
    for line in (
        f"data.train_sources.one: jsonl {first}",
        "  rows      2 read, 1 prompts, 0 duplicates kept",
        "  null      1 rows, left out, for example",
        f"            {second}:2: column 'prompt' is null (prompt_column)",
        "  row 0 (2 tokens, source two)",
        "    | c>",
        "    token ids 6 3",
        "mixture    one 75.0%, two 25.0%",
        "epoch      3 steps of 1 prompts",
        "overlap    2 validation prompts are training prompts, too (data.on_shared=keep)",
    ):
        assert line in output.splitlines()


def test_what_a_run_would_refuse_is_told_and_ends_with_1(inspect, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["a", None])
    code, output = inspect(f"data.train.path={path}")
    assert code == 1
    assert "  null      1 rows, a run refuses this, for example" in output
    assert output.splitlines()[-1] == "REFUSED    data.train: null"
    code, output = inspect(f"data.train.path={path}", "data.train.on_bad_row=filter", "batching.prompts_per_step=2")
    assert code == 1
    assert "REFUSED    data: 1 prompts are fewer than one batch of 2" in output


def test_keys_that_are_wrong_end_with_2(inspect, tmp_path: Path) -> None:
    assert inspect(f"data.train.path={tmp_path / 'lost.jsonl'}")[0] == 2
    assert inspect("data.train.path=x", "data.train.skip=-1")[0] == 2
    assert inspect(f"data.train.path={write(tmp_path / 'rows.jsonl', ['a', 'b'])}", "--samples", "-1")[0] == 2


def test_a_chat_template_of_ones_own_is_shown_as_the_engine_gets_it(inspect, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["a"])
    template = tmp_path / "own.jinja"
    template.write_text("b{{ messages[0]['content'] }}c")
    code, output = inspect(f"data.train.path={path}", f"data.chat_template={template}", "batching.prompts_per_step=1")
    assert code == 0 and "    | bac" in output and "    token ids 5 4 6" in output
    template.write_text("{% if %}")
    assert inspect(f"data.train.path={path}", f"data.chat_template={template}")[0] == 2
