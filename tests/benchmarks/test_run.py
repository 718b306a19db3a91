"""`python -m benchmarks.run`: every program in a process of its own, one report, the gate. Nothing asserts a time."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import benchmarks.run as runner
from benchmarks.environment import pin_to_one_core
from benchmarks.registry import PROGRAMS, Peer, Program
from benchmarks.run import main

GOOD = """
import json, os, sys
path = sys.argv[sys.argv.index("--output") + 1]
figures = {"speedup": float(os.environ["SPEEDUP"])}
case = {"question": "?", "sizes": {"n": 1}, "figures": figures, "goals": {"speedup": ">= 2"}, "bounds": {"speedup": 2},
        "better": {"speedup": "higher"}, "met": {"speedup": figures["speedup"] >= 2}}
report = {"program": "good", "environment": {"threads": os.environ["OMP_NUM_THREADS"]}, "cases": {"k": case}}
open(path, "w").write(json.dumps(report))
print("measured", sys.argv[3:])
"""
BAD = "import sys; print('working'); sys.exit('out of paper')"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small programs in place of the benchmarks: one is measured, one fails, one lacks its peer."""
    folder = tmp_path / "path"
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "__init__.py").touch()
    (folder / "small" / "good.py").write_text(GOOD)
    (folder / "small" / "bad.py").write_text(BAD)
    peer = Peer(name="rival", folder=".rival", module="rival", place="rival", target="bench-rival", on_path=True)

    class Small(Program):
        @property
        def module(self) -> str:
            return f"small.{self.name}"

    found = {
        "good": Small(name="good", question="?"),
        "bad": Small(name="bad", question="?"),
        "lonely": Small(name="lonely", question="?", peer=peer),
    }
    monkeypatch.setattr(runner, "PROGRAMS", found)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("SPEEDUP", "3")
    return tmp_path / "out"


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_one_that_fails_or_lacks_its_peer_is_reported_and_the_others_go_on(programs: Path) -> None:
    assert main(["all", "--output", str(programs)]) == 1
    found = summary(programs)["programs"]
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        "good": "measured",
        "bad": "failed",
        "lonely": "no peer",
    }
    assert found["good"]["goals"] == "1 of 1 met"
    assert "exit code 1" in found["bad"]["message"] and "out of paper" in found["bad"]["message"]
    assert "make bench-rival" in found["lonely"]["message"]
    assert (programs / "bad.log").read_text().splitlines() == ["working", "out of paper"]
    text = (programs / "report.md").read_text()
    assert "| speedup | 3 | >= 2 | met |  |" in text and "make bench-rival" in text
    assert {"machine", "load", "revision", "pinning"} <= summary(programs)["environment"].keys()


def test_the_gate_ends_with_1_for_a_missed_goal_and_for_a_figure_that_fell(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baselines = tmp_path / "baselines"
    baselines.mkdir()
    case = {"sizes": {"n": 1}, "figures": {"speedup": 6.0}}
    (baselines / "good.json").write_text(json.dumps({"cases": {"k": case}}))
    plain = ["good", "--output", str(programs)]
    gated = [*plain, "--fail-below", "--baselines", str(baselines)]
    assert main(plain) == 0
    assert main(gated) == 1
    assert "worse than its baseline: k: speedup was 6, is 3" in capsys.readouterr().out
    assert main([*gated, "--tolerance", "0.6"]) == 0
    monkeypatch.setenv("SPEEDUP", "1.5")
    assert main(plain) == 0, "without the gate a missed goal is told of"
    assert main([*gated, "--tolerance", "9"]) == 1
    assert "goal missed: k: speedup is 1.5, goal >= 2" in capsys.readouterr().out


def test_what_stands_behind_two_dashes_goes_to_the_program(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["good", "--quick", "--output", str(programs), "--", "--case", "gae"]) == 0
    assert "measured ['--quick', '--case', 'gae']" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["all", "--quick", "--fail-below"], "--fail-below judges nothing of --quick"),
        (["all", "--", "--case", "gae"], "name it instead of all"),
        (["balance", "--tolerance", "-1"], "--tolerance is -1.0, must not be negative"),
        (["balance", "--tolerance", "nan"], "--tolerance is nan, must not be negative"),
        (["balance", "--timeout", "0"], "--timeout is 0.0, must be above 0"),
        (["balance", "--timeout", "inf"], "--timeout is inf, must be above 0 and at most"),
        (["balance", "--baselines", "none"], "none is no folder: --baselines"),
        (["balance", "--output", "/dev/null/x"], "--output /dev/null/x cannot be made"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_baseline_that_cannot_be_read_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "balance.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        main(["balance", "--baselines", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "balance.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out" / "balance.log").exists()


def test_every_program_of_the_registry_is_a_module_beside_it() -> None:
    folder = Path(runner.__file__).parent
    assert all((folder / f"{name}.py").is_file() for name in PROGRAMS)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no call for it on this system")
def test_a_process_is_pinned_to_its_last_core_and_says_so() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert pin_to_one_core() == f"core {max(before)} of {len(before)}"
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)
