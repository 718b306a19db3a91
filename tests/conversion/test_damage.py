"""Whatever byte of a checkpoint is another: every command that reads it says which file, and leaves nothing behind."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.cli.main import main
from megappo.cli.resume import open_run
from megappo.config.store import restore_run_config
from megappo.errors import CheckpointError
from tests.conversion.test_run_checkpoints import MakeRun, Run, make_run

__all__ = ["make_run"]


@pytest.fixture(scope="module")
def run(make_run: MakeRun) -> Run:
    """A checkpoint of an actor and a critic."""
    return make_run(("actor", "critic"))


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": flipped,
    "garbage of the same size": lambda content: random.Random(1).randbytes(len(content)),
    "null": lambda content: b"null",
    "a list": lambda content: b"[1]".ljust(len(content)),
    "nothing": lambda content: b"",
    "nested too deep": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("of", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["every third pair", "every pair"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_file_of_a_checkpoint_that_is_changed_is_refused_by_name(
    change: str, of: int, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command; with `of` 3 each file meets every command under some of the changes only."""
    folder = Path(shutil.copytree(run.path, tmp_path / "x"))
    step, out = folder / "checkpoints" / "step_000040", tmp_path / "out"
    stored = (step / "config.yaml").read_text()
    config = restore_run_config(stored, [f"trainer.resume={step}", f"run.dir={tmp_path}", "run.name=new"])
    files = sorted(path for path in step.rglob("*") if path.is_file())
    for turn, file in enumerate(files, list(CHANGES).index(change)):
        content = file.read_bytes()
        file.write_bytes(CHANGES[change](content))
        name = file.relative_to(step).as_posix()
        of_critic = name.startswith("critic")
        commands = {
            "inspect": ["inspect", "checkpoint", step, "--full", "--json"],
            "inspect a model": ["inspect", "checkpoint", file.parent, "--full"] if file.parent != step else None,
            "verify": ["convert", "verify", "--checkpoint", step],
            "megatron-to-hf": ["convert", "megatron-to-hf", "--checkpoint", step, "--out", out],
            "reshard": ["convert", "reshard", "--checkpoint", step, "--out", out],
            "export": ["export", "--run", folder, "--step", 40, "--out", out],
        }
        if of_critic:
            for command in ("megatron-to-hf", "export"):
                commands[command] = [*(commands[command] or []), "--role", "critic"]
        for number, (command, words) in enumerate(commands.items(), turn):
            if words is None or number % of:
                continue
            code = main([str(word) for word in words])
            printed = capsys.readouterr()
            assert code == (1 if command in ("verify", "inspect", "inspect a model") else 2), (name, command, printed)
            assert file.name in printed.out + printed.err and "rank 0" not in printed.err, (name, command, printed)
            assert not out.exists()
        if not name.endswith(".distcp"):
            with pytest.raises(CheckpointError, match=file.name):
                open_run(config, stored, lambda note: None)
        file.write_bytes(content)


READ = ("model.json", ".metadata", "metadata.json", "config.json", "__0_0.distcp")


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "one bit"])
def test_every_file_of_a_converted_folder_that_is_changed_is_refused_by_name(
    change: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, hf = tmp_path / "weights", tmp_path / "out", str(run.start)
    assert main(["convert", "hf-to-megatron", "--hf", hf, "--out", str(folder)]) == 0
    for name in READ:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(CHANGES[change](content))
        commands = [
            ["megatron-to-hf", "--out", str(out)],
            ["reshard", "--out", str(out), "--weights-only"],
            ["verify", "--hf", hf],
        ]
        # It compares with the other one's config.json.
        for form, *words in commands[:2] if name == "config.json" else commands:
            assert main(["convert", form, "--checkpoint", str(folder), *words]) == 2
            # Tensors are what is damaged of a file of them.
            assert (name if name != "__0_0.distcp" else str(folder)) in capsys.readouterr().err, (name, form)
            assert not out.exists()
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("file", ["model.json", "config.json", "metadata.json"])
def test_no_value_of_another_type_is_an_error_of_our_own(
    file: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "weights", tmp_path / "out"
    assert main(["convert", "hf-to-megatron", "--hf", str(run.start), "--out", str(folder)]) == 0
    whole = json.loads((folder / file).read_text())
    for key in whole:
        for value in (None, "x", [], {}, -1):
            (folder / file).write_text(json.dumps(whole | {key: value}))
            options = ["--checkpoint", str(folder), "--out", str(out), "--dry-run"]
            # 0: a key that nothing of a model is made of
            assert main(["convert", "megatron-to-hf", *options]) in (0, 2), capsys.readouterr().err
            assert main(["inspect", "checkpoint", str(folder)]) in (0, 1)
