"""Reports as Markdown tables."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gate import shown

Json = Mapping[str, Any]  # Any: JSON


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    ruler = ["---" for _ in columns]
    return ["| " + " | ".join(cells) + " |" for cells in (columns, ruler, *rows)]


def describe_report(report: Json) -> list[str]:
    """Return the lines of one program's report: a table of rows where it compares settings, else one per case."""
    if "columns" in report:
        return [*table(["setting", *report["columns"]], _setting_rows(report)), ""]
    return [line for key, case in report["cases"].items() for line in _describe_case(key, case)]


def _setting_rows(report: Json) -> Iterable[Sequence[str]]:
    for key, case in report["cases"].items():
        figures = case["figures"]
        yield [key, *(shown(figures[name]) if figures.get(name) is not None else "-" for name in report["columns"])]


def _describe_case(key: str, case: Json) -> list[str]:
    sizes = ", ".join(f"{name} {value}" for name, value in case["sizes"].items() if name != "memory")
    lines = [f"**{key}**: {case['question']} ({sizes})", ""]
    seconds = {name: statistics.median(values) for name, values in case.get("cpu_seconds", {}).items()}
    if seconds:
        lines += [
            *table(["contender", "median CPU s"], ([name, f"{value:.4g}"] for name, value in seconds.items())),
            "",
        ]
    met, goals, moved = case.get("met") or {}, case["goals"], case.get("moved_against_baseline", {})
    rows = [
        [
            name,
            shown(value),
            goals.get(name, ""),
            "" if name not in met else "met" if met[name] else "**missed**",
            f"{moved[name]:+.0%}" if name in moved else "",
        ]
        for name, value in case["figures"].items()
    ]
    return [*lines, *table(["figure", "value", "goal", "verdict", "against baseline"], rows), ""]


def describe_environment_lines(environment: Mapping[str, str]) -> list[str]:
    """Return the lines that say where it was measured."""
    return [f"- {name}: {value}" for name, value in environment.items()]
