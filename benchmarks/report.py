"""The report of a benchmark: a table, a JSON file, and how each figure moved against the committed baseline."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import NOT_PINNED, describe_environment
from benchmarks.harness import CaseResult

BASELINES = Path(__file__).parent / "baselines"
_CONSOLE = Console(width=max(120, Console().width), highlight=False)


class Report:
    """The results of one run of a program, and the committed figures to hold them against."""

    def __init__(
        self,
        *,
        program: str,
        packages: Sequence[str],
        judged: bool,
        baselines: Path = BASELINES,
        pinning: str = NOT_PINNED,
    ) -> None:
        self.program = program
        self.judged = judged
        self.results: list[CaseResult] = []
        self.environment = describe_environment(packages, pinning=pinning)
        path = baselines / f"{program}.json"
        self._baseline: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def add(self, result: CaseResult) -> None:
        """Take in the result of one more case."""
        self.results.append(result)

    def moved(self, result: CaseResult) -> dict[str, float]:
        """Figure / its baseline - 1, for figures with a baseline that was measured at the same sizes and is not 0."""
        known: Mapping[str, Any] = self._baseline.get("cases", {}).get(result.case.key, {})
        if known.get("sizes") != _plain(result.case.sizes):
            return {}
        before: Mapping[str, float] = known.get("figures", {})
        return {name: value / before[name] - 1.0 for name, value in result.figures.items() if before.get(name)}

    def as_dict(self) -> dict[str, Any]:
        """The report as it is written."""
        cases = {result.case.key: self._case_as_dict(result) for result in self.results}
        return {"program": self.program, "environment": self.environment, "cases": cases}

    def _case_as_dict(self, result: CaseResult) -> dict[str, Any]:
        return {
            "question": result.case.question,
            "sizes": _plain(result.case.sizes),
            "rounds": result.rounds,
            "cpu_seconds": {name: [round(value, 7) for value in values] for name, values in result.seconds.items()},
            "median_cpu_seconds": {name: result.median(name) for name in result.seconds},
            "figures": result.figures,
            "goals": {goal.figure: goal.text for goal in result.case.goals},
            "better": {goal.figure: goal.better for goal in result.case.goals if goal.better},
            "bounds": {goal.figure: goal.bound for goal in result.case.goals if goal.better},
            "met": result.verdicts() if self.judged else None,
            "moved_against_baseline": self.moved(result),
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        _CONSOLE.print(f"written to {path}")


def _plain(sizes: Mapping[str, object]) -> Any:
    """The sizes as JSON gives them back."""
    return json.loads(json.dumps(sizes))


def print_case(report: Report, result: CaseResult) -> None:
    """Print the times and figures of one case."""
    sizes = ", ".join(f"{name} {value}" for name, value in result.case.sizes.items())
    _CONSOLE.print(f"\n[bold]{result.case.key}[/]: {result.case.question}\n{sizes}; rounds {result.rounds}")
    times = Table("contender", "median CPU s", "least", "most")
    for name, seconds in result.seconds.items():
        times.add_row(name, *(f"{value:.6f}" for value in (result.median(name), min(seconds), max(seconds))))
    figures = Table("figure", "value", "goal", "verdict", "against baseline")
    goals, verdicts, moved = {goal.figure: goal for goal in result.case.goals}, result.verdicts(), report.moved(result)
    for name, value in result.figures.items():
        verdict = ("met" if verdicts[name] else "[bold red]missed[/]") if name in verdicts else ""
        figures.add_row(
            name,
            f"{value:.6g}",
            goals[name].text if name in goals else "",
            verdict if report.judged or not verdict else "not judged",
            f"{moved[name]:+.1%}" if name in moved else "",
        )
    if result.seconds:
        _CONSOLE.print(times)
    _CONSOLE.print(figures)


def print_summary(report: Report) -> None:
    """Print where this was measured and how many goals are met."""
    verdicts = [met for result in report.results for met in result.verdicts().values()]
    _CONSOLE.print("\n" + ", ".join(f"{name}: {value}" for name, value in report.environment.items()))
    if report.judged:
        _CONSOLE.print(f"[bold]{sum(verdicts)} of {len(verdicts)} goals met[/]")
    else:
        _CONSOLE.print(f"small inputs: {len(verdicts)} goals not judged")
