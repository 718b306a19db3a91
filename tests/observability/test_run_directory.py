"""The folder of a run: what is in it, and that nothing is ever overwritten."""

import json
import os
from pathlib import Path

import psutil
import pytest

from megappo.config.trainer import RunSection
from megappo.errors import MegappoError
from megappo.observability.run_directory import open_run_directory, write_atomically, write_summary


def section(tmp_path: Path) -> RunSection:
    return RunSection(name="mine", dir=str(tmp_path / "runs"))


def test_a_new_run_gets_its_folders(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    assert directory.path == tmp_path / "runs" / "mine"
    assert directory.logs.is_dir() and directory.rollouts.is_dir()
    assert directory.moved_aside is None


def test_earlier_runs_are_moved_aside_one_after_the_other(tmp_path: Path) -> None:
    for number in range(3):
        directory = open_run_directory(section(tmp_path))
        write_summary(directory, {"run": number})
        if number:
            assert directory.moved_aside == tmp_path / "runs" / f"mine.{number}"
    names = {
        path.name: json.loads((path / "summary.json").read_text())["run"] for path in (tmp_path / "runs").iterdir()
    }
    assert names == {"mine.1": 0, "mine.2": 1, "mine": 2}


def test_an_empty_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert open_run_directory(section(tmp_path)).moved_aside is None


def test_resume_auto_goes_on_in_a_folder_with_checkpoints_only(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    write_summary(directory, {})
    assert open_run_directory(section(tmp_path), resume="auto").moved_aside is not None
    (directory.checkpoints / "step_000005").mkdir(parents=True)
    assert open_run_directory(section(tmp_path), resume="auto").moved_aside is None
    assert open_run_directory(section(tmp_path), resume="never").moved_aside is not None


def test_resuming_from_a_checkpoint_inside_the_folder_leaves_it_in_place(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    checkpoint = directory.checkpoints / "step_000005"
    checkpoint.mkdir(parents=True)
    assert open_run_directory(section(tmp_path), resume=str(checkpoint)).moved_aside is None
    other = tmp_path / "elsewhere" / "step_000005"
    assert open_run_directory(section(tmp_path), resume=str(other)).moved_aside is not None


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")  # a lone surrogate cannot be encoded
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [left.name for left in tmp_path.iterdir()] == ["summary.json"]


def test_a_half_written_checkpoint_alone_does_not_continue_a_run(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    (directory.checkpoints / "step_000005.writing").mkdir(parents=True)
    assert open_run_directory(section(tmp_path), resume="auto").moved_aside is not None


def test_the_folder_of_a_run_that_is_still_going_is_refused(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    owner, parent = directory.path / "owner.pid", psutil.Process(os.getppid())
    owner.write_text(f"{parent.pid} {parent.create_time()}")
    write_atomically(directory.summary, "{}")  # of the part before, which a run that goes on has not replaced yet
    with pytest.raises(MegappoError, match="belongs to a run that is still going"):
        open_run_directory(section(tmp_path))
    write_summary(directory, {"exit": "completed"})
    assert not owner.exists() and open_run_directory(section(tmp_path)).moved_aside is not None


@pytest.mark.parametrize("age", ["{started:.2f} 7", "", "garbled", "{older}", "0"])
def test_a_process_with_the_number_of_one_that_was_killed_is_not_its_run(age: str, tmp_path: Path) -> None:
    directory, parent = open_run_directory(section(tmp_path)), psutil.Process(os.getppid())
    text = age.format(started=parent.create_time(), older=parent.create_time() - 60)
    (directory.path / "owner.pid").write_text(f"{parent.pid} {text}")
    assert open_run_directory(section(tmp_path)).moved_aside is not None


def test_what_a_kill_left_beside_no_checkpoint_does_not_continue_a_run(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    for name in ("scores.json", "step_000005.deleting", "step_000005.set_aside"):
        (directory.checkpoints / name).mkdir(parents=True)
    assert open_run_directory(section(tmp_path), resume="auto").moved_aside is not None
    directory = open_run_directory(section(tmp_path))
    (directory.checkpoints / "step_000005.replaced").mkdir(parents=True)
    assert open_run_directory(section(tmp_path), resume="auto").moved_aside is None


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(MegappoError, match="cannot be used"):
        open_run_directory(section(tmp_path))


def test_a_run_that_resumes_drops_the_answers_of_later_steps(tmp_path: Path) -> None:
    directory = open_run_directory(section(tmp_path))
    for step in (1, 2, 3):
        (directory.rollouts / f"step_{step:06d}.jsonl").write_text("{}\n")
    directory.drop_steps_after(2)
    assert sorted(path.name for path in directory.rollouts.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    assert directory.holds(directory.checkpoints / "step_000001")
    assert not directory.holds(tmp_path / "runs" / "mine.1" / "checkpoints" / "step_000001")
