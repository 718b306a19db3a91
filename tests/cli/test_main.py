"""The command as a person types it: output, errors, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megappo.cli.main import main, parse


def run_megappo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megappo", *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_config_prints_the_resolved_configuration_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "experiment=quickstart", "seed=7"]) == 0
    printed = capsys.readouterr()
    resolved = yaml.safe_load(printed.out)
    assert resolved["seed"] == 7
    assert resolved["model"]["path"] == "runs/quickstart-sft/model"
    assert resolved["cluster"]["device"] == "cpu"
    assert printed.err == ""


def test_config_does_not_look_at_the_file_system(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "experiment=quickstart", "model.path=no/such/folder"]) == 0
    assert main(["train", "experiment=quickstart", "model.path=no/such/folder"]) == 2
    assert "model.path=no/such/folder is not a folder that exists" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_config_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "experiment=quickstart", "batching.samples_per_prompt=1"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("note: batching.samples_per_prompt=1")
    yaml.safe_load(printed.out)


@pytest.mark.parametrize("command", ["train", "sft", "config"])
def test_every_violation_is_one_line_on_standard_error_with_exit_code_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "experiment=quickstart", "actor.optim.lrr=1", "actor.parallelism.tensor=3"]) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert all(line.startswith("config error: ") for line in lines)
    assert "config error: actor.optim.lrr=1 is not a key of the configuration (did you mean actor.optim.lr?)" in lines
    assert "config error: actor.parallelism.tensor=3 must divide model.num_attention_heads=4 (use 1, 2 or 4)" in lines


def test_a_missing_starting_model_names_the_command_that_makes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=quickstart"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "megappo sft experiment=quickstart" in line


def test_the_module_runs_as_a_command_without_a_traceback(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    good = run_megappo("config", "experiment=quickstart", cwd=root)
    assert (good.returncode, good.stderr) == (0, "")
    bad = run_megappo("config", "experiment=quickstart", "trainer.total_steps=0", cwd=root)
    assert bad.returncode == 2
    assert bad.stderr == "config error: trainer.total_steps=0 must be positive (use 1 or more)\n"


def test_config_needs_neither_torch_nor_ray() -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys; from megappo.cli.main import main, parse; main(['config', 'experiment=quickstart']); "
        "print([name for name in ('torch', 'ray', 'mlflow', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert run.stderr == "[]\n"


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["inspect"], ["inspect", "nothing"]])
def test_unknown_commands_end_with_usage_and_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: megappo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--device", "H100", "experiment=mine", "seed=1"],
        ["experiment=mine", "--device", "h100", "seed=1"],
        ["experiment=mine", "seed=1", "--device=h100"],
    ],
)
def test_overrides_may_stand_before_and_after_options(words: list[str]) -> None:
    parsed = parse(["check", *words])
    assert (parsed.overrides, parsed.device) == (["experiment=mine", "seed=1"], "h100")


def test_the_model_of_an_evaluation_may_stand_after_options() -> None:
    assert parse(["evaluate", "--json", "runs/x/model", "seed=1"]).arguments == ["runs/x/model", "seed=1"]


def test_inspect_schedule_takes_its_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[4, 4, 4, 4]")
    assert main(["inspect", "schedule", str(path), "--dp", "2", "--max-tokens", "8", "--equal-counts"]) == 0
    printed = json.loads(capsys.readouterr().out)
    ranks = [[index for batch in rank["micro_batches"] for index in batch["indices"]] for rank in printed["ranks"]]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert sorted(ranks[0] + ranks[1]) == [0, 1, 2, 3]


def test_inspect_errors_are_messages_with_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    assert main(["inspect", "schedule", str(missing), "--dp", "2", "--max-tokens", "8"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(missing) in printed.err
