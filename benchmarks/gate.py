"""What a report is held against: its own goals, and the figures of a baseline that was measured at equal sizes."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]  # Any: JSON


def missed_goals(report: Json) -> list[str]:
    """Return the figures that miss their goal, in words. A report of small inputs has none."""
    return [
        f"{key}: {figure} is {shown(case['figures'][figure])}, goal {case['goals'][figure]}"
        for key, case in report["cases"].items()
        for figure, met in (case.get("met") or {}).items()
        if not met
    ]


def fallen_figures(report: Json, baseline: Json, *, tolerance: float) -> list[str]:
    """Return the figures that got worse by more than the tolerance, in words.

    Only figures that say which way is better count, and only those of cases of equal sizes.
    """
    found: list[str] = []
    for key, case in report["cases"].items():
        before: Json = baseline.get("cases", {}).get(key, {})
        if before.get("sizes") != case["sizes"]:
            continue
        for figure, better in case.get("better", {}).items():
            old, new = before.get("figures", {}).get(figure), case["figures"].get(figure)
            if old is None or new is None:
                continue
            if worse_by(old, new, better=better, bound=case.get("bounds", {}).get(figure)) > tolerance:
                found.append(f"{key}: {figure} was {shown(old)}, is {shown(new)}")
    return found


def worse_by(old: float, new: float, *, better: str, bound: float | None) -> float:
    """Return by which share a figure got worse (negative: better), of its old value or of its bound, whichever is
    larger: an error far below its bound may double."""
    scale = max(abs(old), abs(bound or 0.0))
    change = old - new if better == "higher" else new - old
    if change != change:  # NaN
        return float("inf")
    return change / scale if scale else (0.0 if change <= 0 else float("inf"))


def shown(value: float) -> str:
    """Return a figure as people read it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
