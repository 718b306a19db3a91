"""What every benchmark shares: contenders measured in turns by CPU time, goals, the command line.

CPU seconds are those of this process and of all processes below it. A wall clock on a shared machine moves by a factor
of nine under load; the ratio of two CPU times taken in turns does not, so figures are ratios of medians and no test
asserts them.
"""

import argparse
import gc
import importlib.util
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""The first must be 1 (the libraries fall back to it), the others 1 or not set."""


@dataclass(kw_only=True, frozen=True)
class Contender:
    """One way of doing the work of a case."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], None] | None = None
    """Called before each measured round, outside the clock (for work that uses up its input)."""
    repeats: int = 1
    """Runs in a row per round, for work far below a millisecond; seconds are those of one run."""


@dataclass(kw_only=True, frozen=True)
class Ratio:
    """Figure: median seconds of one contender over those of another."""

    name: str
    numerator: str
    denominator: str


@dataclass(kw_only=True, frozen=True)
class Goal:
    """Bounds of one figure of a case, either or both."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, value: float) -> bool:
        """Whether the value is within the bounds; NaN never is."""
        above = self.at_least is None or value >= self.at_least
        below = self.at_most is None or value <= self.at_most
        return above and below and value == value

    @property
    def better(self) -> str | None:
        """Which way the figure gets better: `higher` or `lower`; None with two bounds, between which all is equal."""
        if (self.at_least is None) == (self.at_most is None):
            return None
        return "higher" if self.at_most is None else "lower"

    @property
    def bound(self) -> float:
        """The bound, where there is one alone."""
        bound = self.at_least if self.at_most is None else self.at_most
        assert bound is not None
        return bound

    @property
    def text(self) -> str:
        """The bounds in words."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(kw_only=True, frozen=True)
class Case:
    """One question: contenders on the same input, the figures to report, the goals they are held against."""

    key: str
    question: str
    sizes: Mapping[str, object]
    """All that says what was measured, seeds included; figures compare with a baseline of equal sizes only."""
    contenders: Sequence[Contender]
    ratios: Sequence[Ratio] = ()
    goals: Sequence[Goal] = ()
    quantities: Callable[[Mapping[str, object]], Mapping[str, float]] | None = None
    """Figures that are not times (errors, imbalance, memory), from what each contender returned in the warm-up."""


@dataclass(kw_only=True, frozen=True)
class CaseResult:
    """What came out of one case."""

    case: Case
    rounds: int
    seconds: Mapping[str, list[float]]
    """CPU seconds per contender, one per round."""
    quantities: Mapping[str, float] = field(default_factory=dict[str, float])

    def median(self, contender: str) -> float:
        """Median CPU seconds of one run."""
        return statistics.median(self.seconds[contender])

    @property
    def figures(self) -> dict[str, float]:
        """Ratios of medians, then the quantities."""
        ratios = {
            ratio.name: _divide(self.median(ratio.numerator), self.median(ratio.denominator))
            for ratio in self.case.ratios
        }
        return {**ratios, **self.quantities}

    def verdicts(self) -> dict[str, bool]:
        """Whether the goal of each figure that has one is met."""
        figures = self.figures
        return {goal.figure: goal.met_by(figures[goal.figure]) for goal in self.case.goals}


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


class CpuClock:
    """CPU seconds between `start` and `stop`, of this process and of all processes below it.

    The processes below it are looked up outside of the measured span; one that ends unawaited by its parent is missed.
    """

    def __init__(self) -> None:
        self._children = 0.0
        self._own = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._children = _children_cpu_s()
        self._own = time.process_time()

    def stop(self) -> float:
        """Return the seconds since `start`."""
        own = time.process_time() - self._own
        return own + _children_cpu_s() - self._children


def _children_cpu_s() -> float:
    """CPU seconds of all descendants: those that ended and were waited for, and those that run."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(case: Case, rounds: int) -> CaseResult:
    """Run each contender once as a warm-up, then all of them in turns, A B A B, `rounds` times."""
    require_one_thread()
    results = {contender.name: _prepared(contender)() for contender in case.contenders}
    quantities = case.quantities(results) if case.quantities is not None else {}
    results.clear()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in case.contenders}
    for _ in range(rounds):
        for contender in case.contenders:
            seconds[contender.name].append(_time_once(contender))
    return CaseResult(case=case, rounds=rounds, seconds=seconds, quantities=quantities)


def _prepared(contender: Contender) -> Callable[[], object]:
    if contender.prepare is not None:
        contender.prepare()
    return contender.run


def _time_once(contender: Contender) -> float:
    """CPU seconds of one run, garbage collection kept out."""
    run, clock = _prepared(contender), CpuClock()
    gc.collect()
    gc.disable()
    try:
        clock.start()
        for _ in range(contender.repeats):
            run()
        return clock.stop() / contender.repeats
    finally:
        gc.enable()


def require_one_thread() -> None:
    """Exit with the remedy unless every numerical library is held to one thread."""
    wrong = [name for name in THREAD_VARIABLES[1:] if os.environ.get(name, "1") != "1"]
    if os.environ.get(THREAD_VARIABLES[0]) != "1" or wrong:
        others = f" and {', '.join(wrong)} to 1 or not at all" if wrong else ""
        raise SystemExit(f"benchmarks run on one thread: set {THREAD_VARIABLES[0]}=1 before Python starts{others}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        raise SystemExit(f"benchmarks run on one thread: torch was set to {torch.get_num_threads()}")


def require_module(name: str, remedy: str) -> None:
    """Exit with the remedy when a peer's module cannot be found."""
    if importlib.util.find_spec(name) is None:
        raise SystemExit(f"there is nothing to compare with: module {name} is not installed. {remedy}")


def run_program(
    program: str,
    makers: Mapping[str, Callable[[bool], Case]],
    *,
    packages: Sequence[str],
    pinned: bool = False,
) -> None:
    """Command line of a benchmark: measure the chosen cases, print the report, write it as JSON.

    Args:
        program: its name, which is also that of its baseline.
        makers: case key -> function that makes the case, at full size or (True) small; made one at a time, so that
            only one case's input is held.
        packages: distributions whose versions the report names.
        pinned: keep it on one core: for programs whose work is that of one process.
    """
    from benchmarks.environment import NOT_PINNED, pin_to_one_core
    from benchmarks.report import Report, print_case, print_summary

    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}")
    parser.add_argument("--case", action="append", choices=list(makers), help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs per contender (default 5)")
    parser.add_argument("--quick", action="store_true", help="small inputs, which no goal is held against")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks") / f"{program}.json", help="JSON report")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, must be at least 1")
    require_one_thread()
    pinning = pin_to_one_core() if pinned else NOT_PINNED
    report = Report(program=program, packages=packages, judged=not arguments.quick, pinning=pinning)
    for key in arguments.case or makers:
        result = measure(makers[key](arguments.quick), arguments.rounds)
        report.add(result)
        print_case(report, result)
    print_summary(report)
    report.write(arguments.output)
