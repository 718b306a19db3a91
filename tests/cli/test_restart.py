"""Which failures of a run are followed by another start, from where, and how often."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from megappo.cli.restart import RESTARTS, Supervisor, run_with_restarts
from megappo.config.restart import RestartConfig
from megappo.config.restart_rules import checkpoints_of, some_command_makes_checkpoints
from megappo.config.run import RunConfig
from megappo.config.trainer import RunSection, TrainerConfig

PROGRAM = Path(__file__).with_name("scripted_run.py")


def supervised(folder: Path, words: str, *, limit: int = 2, resume: str = "never", wait_s: float = 0.0) -> "Outcome":
    config = RunConfig(
        run=RunSection(dir=str(folder.parent), name=folder.name),
        restart=RestartConfig(max=limit, wait_s=wait_s),
        trainer=TrainerConfig(save_freq=1, resume=resume),
    )
    folder.mkdir(exist_ok=True)
    outcome = Outcome(folder)
    program = [sys.executable, str(PROGRAM)]
    overrides = [words, str(folder)]
    outcome.code = Supervisor(config, "train", overrides, say=outcome.said.append, program=program).run()
    return outcome


class Outcome:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = -1
        self.said: list[str] = []

    @property
    def starts(self) -> list[str]:
        return (self.folder / "starts").read_text().splitlines()


def test_a_run_that_is_done_is_started_once(tmp_path: Path) -> None:
    outcome = supervised(tmp_path / "run", "done")
    assert (outcome.code, outcome.starts, outcome.said) == (0, ["train 0"], [])


def test_a_killed_driver_and_a_dead_worker_are_followed_by_a_start_from_the_newest_checkpoint(tmp_path: Path) -> None:
    outcome = supervised(tmp_path / "run", "saves+dies,worker,done")
    assert outcome.code == 0
    assert outcome.starts == ["train 0", "train 1 trainer.resume=auto", "train 2 trainer.resume=auto"]
    assert outcome.said == [
        "the driver was killed by SIGKILL; restart 1 of at most 2 in a row, from the checkpoint of step 1, in 0 s",
        "failed: WorkerError; restart 2 of at most 2 in a row, from the checkpoint of step 1, in 0 s",
    ]


def test_a_run_without_a_checkpoint_begins_as_it_was_told_to(tmp_path: Path) -> None:
    outcome = supervised(tmp_path / "run", "worker,done")
    assert outcome.starts == ["train 0", "train 1"]
    assert "as it was begun" in outcome.said[0]


def test_checkpoints_of_an_earlier_run_are_not_gone_on_from(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step_000009").mkdir(parents=True)
    outcome = supervised(tmp_path / "run", "dies,saves+dies,done")
    assert outcome.starts == ["train 0", "train 1", "train 2 trainer.resume=auto"]


@pytest.mark.parametrize(("word", "code"), [("refused", 2), ("nan", 1)])
def test_what_would_fail_again_is_not_tried_again(tmp_path: Path, word: str, code: int) -> None:
    outcome = supervised(tmp_path / "run", f"{word},done")
    assert (outcome.code, outcome.starts) == (code, ["train 0"])


def test_the_summary_of_an_earlier_run_says_nothing_of_this_one(tmp_path: Path) -> None:
    supervised(tmp_path / "run", "worker", limit=0)
    (tmp_path / "run" / "starts").unlink()
    assert supervised(tmp_path / "run", "refused").starts == ["train 0"]


def test_a_run_that_makes_no_progress_ends_and_one_that_does_has_all_its_restarts_again(tmp_path: Path) -> None:
    stuck = supervised(tmp_path / "stuck", "worker,worker,worker,done")
    assert stuck.code == 1
    assert len(stuck.starts) == 3
    assert stuck.said[-1] == "failed: WorkerError; not started again: restart.max=2 without a checkpoint"
    going = supervised(tmp_path / "going", "worker,worker,saves+worker,worker,done")
    assert going.code == 0
    assert len(going.starts) == 5


@pytest.mark.parametrize("words", ["waits,done", "worker,done"])
def test_a_run_that_is_asked_to_end_is_not_started_again(tmp_path: Path, words: str) -> None:
    waits = tmp_path / "run" / ("waiting" if words.startswith("waits") else "summary.json")

    def ask() -> None:
        deadline = time.monotonic() + 30
        while not waits.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    before = signal.getsignal(signal.SIGTERM)
    outcome = supervised(tmp_path / "run", words, wait_s=20.0)
    asking.join()
    assert outcome.code == (130 if words.startswith("waits") else 1)
    assert outcome.starts == ["train 0"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_restarts_and_inside_of_one_the_command_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(restart=RestartConfig(max=3))
    assert run_with_restarts(RunConfig(), "train", []) is None
    monkeypatch.setenv(RESTARTS, "1")
    assert run_with_restarts(config, "train", []) is None


def test_restarts_need_checkpoints_of_the_command() -> None:
    without = RunConfig(restart=RestartConfig(max=1))
    (violation,) = some_command_makes_checkpoints(without)
    assert "trainer.save_freq=-1 makes no checkpoint" in str(violation)
    assert checkpoints_of("train")(without) == []  # said once
    trains = RunConfig(restart=RestartConfig(max=1), trainer=TrainerConfig(save_freq=5))
    assert some_command_makes_checkpoints(trains) == checkpoints_of("train")(trains) == []
    (violation,) = checkpoints_of("sft")(trains)
    assert "sft.save_freq=-1" in str(violation)
