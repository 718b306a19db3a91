"""GRPO steps of a tiny model on a CPU, side by side with TRL's trainer: tokens per CPU second, memory, agreement.

Run by `make bench NAME=end_to_end`, which installs TRL 1.16 into .trl; see benchmarks/README.md.
"""

import argparse
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.contenders.contender import ContenderProcess, Turn, middle
from benchmarks.contenders.process_tree import DRIVER, RAY
from benchmarks.contenders.workload import MODEL, PROMPT_TOKENS, PROMPTS, SAMPLES, SEED, WORKLOADS, Workload
from benchmarks.environment import ROOT
from benchmarks.harness import Case, CaseResult, Goal, require_one_thread
from benchmarks.registry import TRL
from benchmarks.report import Report, print_case, print_summary

LEAST = {"A": 0.8, "B": 1.5}
"""Case -> tokens per CPU second, as a share of TRL's."""
OURS, PEER, BESIDE = "megappo, hf", "TRL", "megappo, SGLang"
_REST_S = 5.0
"""How long the contenders are left alone, to see what they take then."""


def main() -> None:
    """Measure the chosen cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end")
    parser.add_argument("--case", action="append", choices=list(WORKLOADS), help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps (default 5)")
    parser.add_argument("--quick", action="store_true", help="case A, one measured step, without SGLang; not judged")
    parser.add_argument("--no-sglang", action="store_true", help="leave out SGLang")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/end_to_end.json"), help="JSON report")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, must be at least 1")
    require_one_thread()
    # Ended by somebody else, it ends the contenders, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not TRL.is_installed():
        raise SystemExit(f"there is nothing to compare with: {TRL.remedy}")
    report = Report(
        program="end_to_end", packages=["torch", "transformers", "ray", "sglang"], judged=not arguments.quick
    )
    report.environment["peer"] = f"{TRL.name} in {TRL.folder}"
    rounds = 1 if arguments.quick else arguments.rounds
    for key in arguments.case or (["A"] if arguments.quick else list(WORKLOADS)):
        folder = arguments.output.parent.resolve() / "end_to_end" / key
        engines = ["hf"] if arguments.quick or arguments.no_sglang else ["hf", "sglang"]
        result = measure(WORKLOADS[key], folder, rounds=rounds, engines=engines)
        report.add(result)
        print_case(report, result)
    print_summary(report)
    report.write(arguments.output)


def measure(workload: Workload, folder: Path, *, rounds: int, engines: list[str]) -> CaseResult:
    """Let the contenders take turns, step by step; the first step of each is the warm-up."""
    from benchmarks.contenders.files import write_workload

    write_workload(workload, folder)
    names = {"hf": OURS, "sglang": BESIDE}
    steps = str(rounds + 1)
    commands = {
        PEER: [str(ROOT / TRL.folder / "bin" / "python"), "-m", "benchmarks.contenders.trl_grpo"],
        **{
            names[engine]: [sys.executable, "-W", "ignore", "-m", "benchmarks.contenders.megappo_grpo"]
            for engine in engines
        },
    }
    extra = {PEER: [], **{names[engine]: [engine] for engine in engines}}
    contenders: list[ContenderProcess] = []
    with ExitStack() as stack:
        for number, (name, command) in enumerate(commands.items()):
            line = [*command, workload.key, str(folder), steps, *extra[name]]
            contenders.append(stack.enter_context(ContenderProcess(name, line, folder / f"contender-{number}.log")))
        for number in range(rounds + 1):
            for contender in contenders:
                contender.take_turn()
            if number == 0:
                rest(contenders)  # now, since all of them wait for another turn
    return CaseResult(
        case=_case(workload),
        rounds=rounds,
        seconds={one.name: [turn.own_cpu_s for turn in one.turns[1:]] for one in contenders},
        quantities=figures({one.name: one for one in contenders}),
    )


def rest(contenders: list[ContenderProcess]) -> None:
    """Leave all of them alone for a while."""
    before = [contender.cpu_s() for contender in contenders]
    time.sleep(_REST_S)
    for contender, seconds in zip(contenders, before, strict=True):
        contender.note_rest(contender.cpu_s() - seconds, _REST_S)


def _case(workload: Workload) -> Case:
    length = f"exactly {workload.new_tokens}" if workload.fixed_length else f"up to {workload.new_tokens}, end token"
    return Case(
        key=workload.key,
        question="GRPO steps of a tiny Qwen2 model: valid tokens (prompts included) per CPU second",
        sizes={
            "workload": "cpu-grpo-v1",
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "prompt tokens": PROMPT_TOKENS,
            "new tokens": length,
            "vocabulary": workload.vocabulary,
            "hidden": MODEL["hidden_size"],
            "layers": MODEL["num_hidden_layers"],
            "dtype": "float32",
            "seed": SEED,
        },
        contenders=[],
        goals=[Goal(figure="tokens per CPU s, share of TRL's", at_least=LEAST[workload.key])],
    )


def figures(found: dict[str, ContenderProcess]) -> dict[str, float]:
    """Return the figures of a case, warm-up steps left out."""
    ours, peer = found[OURS], found[PEER]
    rates = {name: rate(contender.turns[1:]) for name, contender in found.items()}
    figures = {"tokens per CPU s, share of TRL's": rates[OURS] / rates[PEER]}
    figures |= {f"{name}: tokens per CPU s": value for name, value in rates.items()}
    figures["share of TRL's with Ray's processes counted"] = rate(ours.turns[1:], with_ray=True) / rates[PEER]
    for name, contender in found.items():
        turns = contender.turns[1:]
        figures |= {f"{name}: {part}, CPU s": seconds for part, seconds in split(contender).items()}
        figures[f"{name}: wall s"] = statistics.median(turn.wall_s for turn in turns)
        figures[f"{name}: tokens of a step"] = statistics.median(turn.report["tokens"] for turn in turns)
        own = sum(size for role, size in contender.peak_bytes.items() if role != RAY)
        figures[f"{name}: peak memory, MB"] = own / 1e6
        figures[f"{name}: CPU s per second at rest"] = contender.resting_cpu
        if contender is not peer:
            figures[f"{name}: peak memory of Ray's processes, MB"] = contender.peak_bytes.get(RAY, 0) / 1e6
            figures[f"{name}: largest log-prob difference of step 1"] = contender.turns[0].report["difference"]
    return figures


def rate(turns: list[Turn], *, with_ray: bool = False) -> float:
    """Return tokens per CPU second, median over turns."""
    return statistics.median(
        turn.report["tokens"] / (turn.whole_cpu_s if with_ray else turn.own_cpu_s) for turn in turns
    )


def split(contender: ContenderProcess) -> dict[str, float]:
    """Return the median CPU seconds of a step's parts: of the peer as its methods take them, else by process."""
    turns = contender.turns[1:]
    if "phases" in turns[0].report:
        phases = {
            phase: statistics.median(turn.report["phases"].get(phase, 0.0) for turn in turns)
            for phase in ("generate", "score")
        }
        return phases | {
            "train and the rest": statistics.median(turn.own_cpu_s for turn in turns) - sum(phases.values())
        }
    roles = {"engine": "generate", "scoring": "score", "trainer": "train", DRIVER: "driver", RAY: "Ray (not counted)"}
    return {part: middle(turns, role) for role, part in roles.items()}


if __name__ == "__main__":
    main()
