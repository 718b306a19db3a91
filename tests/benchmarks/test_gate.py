"""What a run of benchmarks makes of reports: missed goals, fallen figures, Markdown."""

from typing import Any

import pytest

from benchmarks.gate import fallen_figures, missed_goals, worse_by
from benchmarks.markdown import describe_report

SIZES = {"n": 3, "seed": 0}


def report(**figures: float) -> dict[str, Any]:
    """A report of one case; `speedup` has the goal of at least 10, `error` of at most 0.01."""
    goals = {"speedup": ">= 10", "error": "<= 0.01"}
    met = {"speedup": figures["speedup"] >= 10, "error": figures["error"] <= 0.01}
    case = {
        "question": "how fast?",
        "sizes": SIZES,
        "cpu_seconds": {"peer": [3.0, 1.0, 2.0]},
        "figures": figures,
        "goals": goals,
        "better": {"speedup": "higher", "error": "lower"},
        "bounds": {"speedup": 10.0, "error": 0.01},
        "met": met,
        "moved_against_baseline": {"speedup": 0.5},
    }
    return {"program": "p", "environment": {}, "cases": {"k": case}}


def test_goals_that_are_missed_are_named_with_value_and_goal() -> None:
    assert missed_goals(report(speedup=9.5, error=0.001, other=1.0)) == ["k: speedup is 9.5, goal >= 10"]
    unjudged = report(speedup=1.0, error=1.0)
    unjudged["cases"]["k"]["met"] = None
    assert missed_goals(unjudged) == []


def test_a_figure_falls_when_it_gets_worse_by_more_than_the_tolerance() -> None:
    before = report(speedup=20.0, error=0.0001)
    assert fallen_figures(report(speedup=15.5, error=0.0001), before, tolerance=0.25) == []
    assert fallen_figures(report(speedup=14.5, error=0.0001), before, tolerance=0.25) == ["k: speedup was 20, is 14.5"]
    assert fallen_figures(report(speedup=40.0, error=0.0001), before, tolerance=0.25) == []
    # Far below its bound an error may double; near it a quarter of the bound counts.
    assert fallen_figures(report(speedup=20.0, error=0.0003), before, tolerance=0.25) == []
    assert fallen_figures(report(speedup=20.0, error=0.0031), before, tolerance=0.25) == [
        "k: error was 0.0001, is 0.0031"
    ]


def test_only_cases_of_equal_sizes_are_compared() -> None:
    before = report(speedup=20.0, error=0.0)
    before["cases"]["k"]["sizes"] = SIZES | {"n": 4}
    assert fallen_figures(report(speedup=1.0, error=0.0), before, tolerance=0.25) == []
    assert fallen_figures(report(speedup=1.0, error=0.0), {}, tolerance=0.25) == []


@pytest.mark.parametrize(
    ("old", "new", "better", "bound", "share"),
    [
        (20.0, 15.0, "higher", 10.0, 0.25),
        (5.0, 4.0, "higher", 10.0, 0.1),
        (0.2, 0.3, "lower", 0.5, 0.2),
        (0.0, 0.0, "lower", 0.0, 0.0),
        (0.0, 1e-9, "lower", 0.0, float("inf")),
        (2.0, float("nan"), "higher", None, float("inf")),
        (100.0, 120.0, "higher", None, -0.2),
    ],
)
def test_worse_is_a_share_of_the_old_value_or_the_bound(
    old: float, new: float, better: str, bound: float | None, share: float
) -> None:
    assert worse_by(old, new, better=better, bound=bound) == pytest.approx(share)


def test_a_report_becomes_tables() -> None:
    lines = describe_report(report(speedup=9.5, error=0.001, other=123456.0))
    assert lines[0] == "**k**: how fast? (n 3, seed 0)"
    assert "| peer | 2 |" in lines
    assert "| speedup | 9.5 | >= 10 | **missed** | +50% |" in lines
    assert "| error | 0.001 | <= 0.01 | met |  |" in lines
    assert "| other | 123,456 |  |  |  |" in lines


def test_a_sweep_becomes_one_table() -> None:
    swept = {"columns": ["tokens/s", "MFU"], "cases": {"tensor 2": {"figures": {"tokens/s": 1234.5, "MFU": None}}}}
    assert describe_report(swept) == [
        "| setting | tokens/s | MFU |",
        "| --- | --- | --- |",
        "| tensor 2 | 1,234 | - |",
        "",
    ]
