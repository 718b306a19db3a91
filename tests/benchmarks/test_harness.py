"""The logic of the benchmark harness: turns, medians, verdicts, baselines, memory. Nothing here asserts a time."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import Case, CaseResult, Contender, CpuClock, Goal, Ratio, measure, require_module
from benchmarks.memory import peak_extra_bytes
from benchmarks.report import Report

MIB = 2**20


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _case(**changes: object) -> Case:
    arguments: dict[str, object] = {
        "key": "k",
        "question": "which is faster?",
        "sizes": {"n": 3, "seed": 0},
        "contenders": [Contender(name="peer", run=lambda: 1), Contender(name="ours", run=lambda: 2)],
        "ratios": [Ratio(name="speedup", numerator="peer", denominator="ours")],
        "goals": [Goal(figure="speedup", at_least=10), Goal(figure="error", at_most=1e-5)],
    }
    return Case(**{**arguments, **changes})  # type: ignore[arg-type]


def test_contenders_warm_up_once_and_then_run_in_turns() -> None:
    calls: list[str] = []

    def recording(name: str) -> Contender:
        return Contender(name=name, run=lambda: calls.append(name), prepare=lambda: calls.append(f"prepare {name}"))

    case = _case(contenders=[recording("peer"), recording("ours")], goals=[])
    result = measure(case, rounds=2)
    assert calls == ["prepare peer", "peer", "prepare ours", "ours"] * 3
    assert {name: len(seconds) for name, seconds in result.seconds.items()} == {"peer": 2, "ours": 2}


def test_a_contender_with_repeats_runs_that_often_in_each_round() -> None:
    calls: list[int] = []
    contenders = [Contender(name="peer", run=lambda: 0), Contender(name="ours", run=lambda: calls.append(1), repeats=5)]
    measure(_case(contenders=contenders, goals=[]), rounds=3)
    assert len(calls) == 1 + 3 * 5


def test_quantities_see_what_the_contenders_returned() -> None:
    case = _case(quantities=lambda results: {"error": float(results["ours"]) - float(results["peer"])})  # type: ignore[arg-type]
    assert measure(case, rounds=1).quantities == {"error": 1.0}


def test_figures_are_ratios_of_medians_and_goals_are_bounds_on_them() -> None:
    seconds = {"peer": [30.0, 1.0, 20.0], "ours": [1.0, 2.0, 900.0]}
    result = CaseResult(case=_case(), rounds=3, seconds=seconds, quantities={"error": 1e-4})
    assert result.figures == {"speedup": 10.0, "error": 1e-4}
    assert result.verdicts() == {"speedup": True, "error": False}


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(figure="x", at_most=2), 2.0, True),
        (Goal(figure="x", at_most=2), 2.1, False),
        (Goal(figure="x", at_least=1, at_most=2), 0.9, False),
        (Goal(figure="x", at_least=1), float("nan"), False),
    ],
)
def test_goals_are_met_within_their_bounds_and_never_by_nan(goal: Goal, value: float, met: bool) -> None:
    assert goal.met_by(value) is met


def test_figures_are_held_against_a_baseline_of_the_same_sizes_only(tmp_path: Path) -> None:
    result = CaseResult(case=_case(), rounds=1, seconds={"peer": [6.0], "ours": [2.0]}, quantities={"error": 0.0})
    kept = {"sizes": {"n": 3, "seed": 0}, "figures": {"speedup": 2.0, "error": 0.0}}
    baselines = tmp_path / "baselines"
    baselines.mkdir()
    report = _report(baselines, kept)
    assert report.moved(result) == {"speedup": 0.5}
    assert _report(baselines, {**kept, "sizes": {"n": 4, "seed": 0}}).moved(result) == {}
    report.add(result)
    report.write(tmp_path / "out" / "report.json")
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["cases"]["k"]["figures"] == {"speedup": 3.0, "error": 0.0}
    assert written["cases"]["k"]["met"] == {"speedup": False, "error": True}
    assert {"machine", "revision", "numpy", "threads"} <= written["environment"].keys()


def _report(baselines: Path, case: dict[str, object]) -> Report:
    (baselines / "p.json").write_text(json.dumps({"cases": {"k": case}}))
    return Report(program="p", packages=["numpy"], judged=True, baselines=baselines)


def test_the_clock_counts_processes_below_this_one() -> None:
    # The child ends when it has used this much itself, however long that takes; its clock ticks every 10 ms.
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    clock = CpuClock()
    clock.start()
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert clock.stop() >= 0.19


def test_more_than_one_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(SystemExit, match="set OMP_NUM_THREADS=1"):
        measure(_case(), rounds=1)


def test_a_missing_peer_is_said_with_the_remedy() -> None:
    with pytest.raises(SystemExit, match=r"no_such_peer is not installed\. Run make peer"):
        require_module("no_such_peer", "Run make peer")


# The work is made in a fresh process, which does not know this module.
def test_peak_memory_counts_what_the_work_touches_beyond_its_input() -> None:
    held = np.ones(16 * MIB, dtype=np.uint8)
    extra = peak_extra_bytes(partial(partial, np.repeat, held, 3))
    assert 48 * MIB <= extra <= 60 * MIB


def test_a_memory_measurement_that_fails_is_reported() -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        peak_extra_bytes(partial(int, "broken"))  # type: ignore[arg-type]
