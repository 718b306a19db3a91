"""Runs benchmarks by name, each in a process of its own, and makes one report of all of them.

  python -m benchmarks.run algorithms
  python -m benchmarks.run all --quick
  python -m benchmarks.run all --fail-below --tolerance 0.3
  python -m benchmarks.run train_mfu -- --model tiny actor.parallelism.sequence=false

What stands behind `--` goes to the program. A program that fails, or that lacks its peer, is reported with the remedy,
and the others go on. DIR gets NAME.json and NAME.log of every program, report.json and report.md.

Exit codes: 0 everything was measured (and, with --fail-below, passed), 1 something was not, 2 refused.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, describe_environment
from benchmarks.gate import Json, fallen_figures, missed_goals
from benchmarks.markdown import describe_environment_lines, describe_report, table
from benchmarks.registry import PROGRAMS, Program
from benchmarks.report import BASELINES

ALL = "all"
_MESSAGE_LINES = 8


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What became of one program."""

    program: str
    status: str
    """measured, failed or no peer."""
    seconds: float = 0.0
    message: str = ""
    """Why it was not measured, and the remedy."""
    goals: str = ""
    missed: list[str] = field(default_factory=list[str])
    fallen: list[str] = field(default_factory=list[str])


def main(given: Sequence[str] | None = None) -> int:
    """Run what the command line names; returns the exit code."""
    arguments = parse(list(sys.argv[1:] if given is None else given))
    names = list(PROGRAMS) if arguments.name == ALL else [arguments.name]
    environment = describe_environment([], pinning="as each program's own report says")
    outcomes = [run_program(PROGRAMS[name], arguments) for name in names]
    text = write_report(arguments.output, environment, outcomes)
    print(f"\n{text}\nwritten to {arguments.output}/report.md")
    if any(outcome.status != "measured" for outcome in outcomes):
        return 1
    return int(arguments.fail_below and any(outcome.missed or outcome.fallen for outcome in outcomes))


def parse(given: list[str]) -> argparse.Namespace:
    """Read the command line; what stands behind `--` is `rest`."""
    own, rest = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", choices=[ALL, *PROGRAMS], help=f"{ALL}, {', '.join(PROGRAMS)}")
    parser.add_argument("--quick", action="store_true", help="small inputs, which no goal is held against")
    parser.add_argument("--fail-below", action="store_true", help="exit 1 when a goal is missed or a figure has fallen")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.25,
        help="by which share a figure may be worse than its baseline of equal sizes (default %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--baselines", type=Path, default=BASELINES, metavar="DIR", help="NAME.json to hold against")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="of each program (default 3600 s)")
    arguments = parser.parse_args(own)
    if arguments.fail_below and arguments.quick:
        parser.error("--fail-below judges nothing of --quick: its inputs are too small")
    if not arguments.tolerance >= 0:
        parser.error(f"--tolerance is {arguments.tolerance}, must not be negative")
    if not 0 < arguments.timeout <= threading.TIMEOUT_MAX:
        parser.error(f"--timeout is {arguments.timeout}, must be above 0 and at most {threading.TIMEOUT_MAX:g} s")
    if rest and arguments.name == ALL:
        parser.error("arguments behind -- go to one program: name it instead of all")
    arguments.output, arguments.baselines = arguments.output.resolve(), arguments.baselines.resolve()
    arguments.rest = rest
    try:
        arguments.known = read_baselines(arguments.baselines)
    except ValueError as error:
        parser.error(str(error))
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {arguments.output} cannot be made: {error.strerror}")
    return arguments


def read_baselines(folder: Path) -> dict[str, Json]:
    """Return the reports in a folder by program. Raises ValueError: it is no folder, or one cannot be read."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: --baselines names one with a NAME.json for each program")
    found: dict[str, Json] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    return found


def run_program(program: Program, arguments: argparse.Namespace) -> Outcome:
    """Run one program and hold its report against goals and baseline."""
    print(f"\n=== {program.name}: {program.question}", flush=True)
    if program.peer is not None and not program.peer.is_installed():
        message = f"{program.peer.name} is not installed: {program.peer.remedy}"
        print(message)
        return Outcome(program=program.name, status="no peer", message=message)
    path = arguments.output / f"{program.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", program.module, "--output", str(path), *program.arguments]
    command += ["--quick"] * arguments.quick + arguments.rest
    start = time.monotonic()
    code, last = run_logged(command, program, path.with_suffix(".log"), timeout_s=arguments.timeout)
    seconds = time.monotonic() - start
    if code != 0 or not path.exists():
        why = f"ended after {arguments.timeout:g} s" if code is None else f"exit code {code}"
        message = "\n".join([f"{why}; again: {shlex.join(command)}", *last])
        print(f"{program.name}: {message}")
        return Outcome(program=program.name, status="failed", seconds=seconds, message=message)
    report = json.loads(path.read_text(encoding="utf-8"))
    verdicts = [met for case in report["cases"].values() for met in (case.get("met") or {}).values()]
    return Outcome(
        program=program.name,
        status="measured",
        seconds=seconds,
        goals=f"{sum(verdicts)} of {len(verdicts)} met" if verdicts else "none judged",
        missed=missed_goals(report),
        fallen=fallen_figures(report, arguments.known.get(program.name, {}), tolerance=arguments.tolerance),
    )


def run_logged(
    command: Sequence[str], program: Program, log: Path, *, timeout_s: float
) -> tuple[int | None, list[str]]:
    """Run a program in a session of its own, show what it prints and keep it in a file.

    Returns its exit code (None: it was ended at the time limit), and its last lines.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=program.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        end_group(process.pid)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                lines = [*lines[1 - _MESSAGE_LINES :], line.rstrip()]
        code = process.wait()
    finally:
        timer.cancel()
        end_group(process.pid)
    return None if late.is_set() else code, lines


def end_group(leader: int) -> None:
    """End the processes of a session that are left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def write_report(folder: Path, environment: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Write report.json and report.md; returns the summary."""
    summary = summarise(outcomes)
    found: dict[str, Any] = {  # Any: JSON
        "date": datetime.date.today().isoformat(),
        "environment": environment,
        "programs": {outcome.program: asdict(outcome) for outcome in outcomes},
    }
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = ["# Benchmarks", "", found["date"], "", *describe_environment_lines(environment), "", *summary, ""]
    for outcome in outcomes:
        lines += [f"## {outcome.program}", ""]
        if outcome.status != "measured":
            lines += [f"{outcome.status}: {outcome.message}", ""]
            continue
        report = json.loads((folder / f"{outcome.program}.json").read_text(encoding="utf-8"))
        lines += describe_report(report)
        lines += [f"Measured with: {', '.join(f'{name} {value}' for name, value in _own(report, environment))}", ""]
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    return "\n".join(summary)


def _own(report: dict[str, Any], environment: dict[str, str]) -> list[tuple[str, str]]:
    """What a program's environment says beside that of all of them."""
    return [(name, value) for name, value in report["environment"].items() if environment.get(name) != value]


def summarise(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of all programs, then everything that is not as it should be."""
    rows = [[outcome.program, outcome.status, f"{outcome.seconds:.0f}", outcome.goals] for outcome in outcomes]
    lines = table(["program", "status", "wall s", "goals"], rows)
    for outcome in outcomes:
        lines += [f"- {outcome.program}: goal missed: {text}" for text in outcome.missed]
        lines += [f"- {outcome.program}: worse than its baseline: {text}" for text in outcome.fallen]
        if outcome.status != "measured":
            first = outcome.message.splitlines()
            lines.append(f"- {outcome.program}: {outcome.status}: {first[0]}")
            lines += [f"    {line}" for line in first[1:]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
