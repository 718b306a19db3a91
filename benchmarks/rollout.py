"""How fast do the engines sample? Tokens/s, time to the first token, and how long the tail is, for engine settings.

Drives engines through the port and the dispatcher of a run, with random weights and prompts of random tokens. Response
lengths are geometric (`benchmarks/generation/workload.py`), some prompts may be a long tail. Every combination of
--engine, --engines, --concurrency and --samples is measured; engines start once per combination of the first three:

  python -m benchmarks.rollout --quick
  python -m benchmarks.rollout --engines 1,2 --concurrency 16,64 --samples 8 --tail-share 0.1
  python -m benchmarks.rollout --model llama3_8b --engine sglang --engines 8 --concurrency 256 --prompts 512 \\
      --samples 8 --prompt-tokens 512 --longest-prompt 2048 --response-tokens 2048 --longest-response 16384 \\
      model=bfloat16 cluster=gpu placement=colocated cluster.pools.main=8

Everything else is configuration, as for `megappo train`, and is checked before anything starts. --sweep measures all
combinations with some more overrides, and again with others: --sweep rollout.tensor=1 --sweep rollout.tensor=2.
Exit codes: 0 done, 1 failed, 2 refused.
"""

import argparse
import asyncio
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.arguments import require
from benchmarks.environment import describe_environment
from benchmarks.generation.drive import EngineFleet, Observed
from benchmarks.generation.models import write_random_model
from benchmarks.generation.timeline import measure_tail
from benchmarks.generation.workload import Generation, Lengths, make_generation
from benchmarks.harness import require_one_thread
from benchmarks.markdown import describe_report
from benchmarks.training.model_presets import PRESETS, model_config
from benchmarks.training.workload import LengthDistribution
from megappo.config.cluster import DeviceKind
from megappo.config.file_rules import model_folders_fit
from megappo.config.rules import check_config
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.device.backend import resolve_backend
from megappo.errors import ConfigError, MegappoError, Violation

PACKAGES = ("torch", "transformers", "sglang")
QUICK = {
    "prompts": 16,
    "samples": "4",
    "concurrency": "16",
    "response_tokens": 16.0,
    "longest_response": 64,
    "rounds": 1,
}
"""What --quick sets."""
COLUMNS = {
    "tokens/s": "tokens_per_s",
    "tokens/s/device": "tokens_per_s_per_device",
    "first token s, idle": "first_token_idle_s",
    "in load": "first_token_s",
    "p95": "first_token_p95_s",
    "busy": "utilisation",
    "below half": "below_half_share",
    "makespan / ideal": "makespan_over_ideal",
}
"""Figures of a setting, those of the table -> what they are called in its row."""
_BETTER = {"tokens/s": "higher", "tokens/s/device": "higher", "first token s, idle": "lower"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """Engines that are started once."""

    engine: str
    engines: int
    concurrency: int
    config: RunConfig
    overrides: Sequence[str]
    """Those of --sweep."""

    def label(self, samples: int) -> str:
        """Return what a row of the table is called."""
        at_once = f", {self.concurrency} at once" if self.engine == "sglang" else ""
        return " ".join([f"{self.engine} x {self.engines}{at_once}, {samples} samples", *self.overrides])


def main(given: Sequence[str] | None = None) -> int:
    """Measure what the command line names; returns the exit code."""
    arguments = make_parser().parse_args(given)
    if arguments.quick:
        vars(arguments).update(QUICK)
    try:
        report = asyncio.run(run(arguments))
    except MegappoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print_report(report)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, or a model folder with weights (default tiny)")
    add("--engine", default="sglang,hf", help="engines by name, comma-separated (default sglang,hf)")
    add("--engines", default="1", help="numbers of engines (default 1)")
    add("--concurrency", default="32", help="sequences that an sglang engine runs at the same time (default 32)")
    add("--samples", default="8", help="samples per prompt (default 8)")
    add("--prompts", type=int, default=32, help="prompts of one generation (default 32)")
    add("--rounds", type=int, default=3, help="measured generations; medians are shown (default 3)")
    add("--prompt-tokens", type=float, default=64, help="mean length of a prompt (default 64)")
    add("--prompt-spread", type=float, default=0.6, help="log-normal sigma of their lengths, 0: equal (default 0.6)")
    add("--longest-prompt", type=int, default=256, help="longest prompt (default 256)")
    add("--response-tokens", type=float, default=64, help="mean length of a response, 0: all the longest (default 64)")
    add("--longest-response", type=int, default=512, help="longest response (default 512)")
    add("--tail-share", type=float, default=0.0, help="share of prompts with longer responses (default 0)")
    add("--tail-factor", type=float, default=8.0, help="how many times longer those are (default 8)")
    add(
        "--sweep",
        action="append",
        default=[],
        type=shlex.split,
        metavar='"key=value ..."',
        help="overrides that all combinations are measured with (may be repeated)",
    )
    add("--quick", action="store_true", help="one small generation per engine")
    add("--output", type=Path, default=Path("runs/benchmarks/rollout.json"), help="JSON report (default %(default)s)")
    add("overrides", nargs="*", metavar="key=value", help="configuration, as on the command line of `megappo train`")
    return parser


async def run(arguments: argparse.Namespace) -> dict[str, Any]:  # Any: a JSON object
    """Check everything, then start and measure setting after setting; returns the report."""
    disable_progress_bar()
    model, lengths = model_config(arguments.model), lengths_of(arguments)
    check_measurement(arguments, model)
    device = DeviceKind(resolve_backend(DeviceKind.auto).kind)
    folder = arguments.output.parent.resolve() / "rollout"
    shape = folder / f"model-{arguments.model}" if arguments.model in PRESETS else Path(arguments.model).resolve()
    if arguments.model in PRESETS:
        write_random_model(model, shape, weights=False)
    settings = make_settings(arguments, shape, device)
    if device is DeviceKind.cpu:
        require_one_thread()
    if arguments.model in PRESETS:
        write_random_model(model, shape, weights=True, dtype=settings[0].config.model.dtype.value)
    cases: dict[str, Any] = {}
    for setting in settings:
        async with EngineFleet(setting.config, device, folder / "logs") as fleet:
            for samples in numbers(arguments, "samples"):
                work = make_generation(
                    lengths,
                    setting.config.rollout.sampling,
                    model,
                    prompts=arguments.prompts,
                    samples=samples,
                    seed=setting.config.seed,
                )
                row = await measure(fleet, work, setting, samples=samples, rounds=arguments.rounds)
                cases[setting.label(samples)] = as_case(row, arguments, device)
    return {
        "program": "rollout",
        "environment": describe_environment(PACKAGES) | {"clock": "wall seconds", "device": device.value},
        "model": arguments.model,
        "dtype": settings[0].config.model.dtype.value,
        "lengths": asdict(lengths),
        "prompts": arguments.prompts,
        "rounds": arguments.rounds,
        "overrides": list(arguments.overrides),
        "columns": list(COLUMNS),
        "cases": cases,
    }


def as_case(row: dict[str, Any], arguments: argparse.Namespace, device: DeviceKind) -> dict[str, Any]:  # Any: JSON
    """Return what was found of a setting as a case of a report: sizes, figures, which way is better, and all of it."""
    sizes = {name: row[name] for name in ("engine", "engines", "devices", "concurrency", "samples", "overrides")}
    return {
        "question": "sampling speed in this setting",
        "sizes": sizes
        | {"model": arguments.model, "device": device.value, "prompts": arguments.prompts}
        | {"lengths": asdict(lengths_of(arguments))},
        "figures": {name: row[key] for name, key in COLUMNS.items()},
        "better": _BETTER,
        "goals": {},
        "met": None,
        "details": row,
    }


async def measure(
    fleet: EngineFleet, work: Generation, setting: Setting, *, samples: int, rounds: int
) -> dict[str, Any]:  # Any: a JSON object
    """Sample the work once to warm up and `rounds` times for the figures; returns their medians and every round."""
    idle = await fleet.first_token_idle_s(work)
    await fleet.run(work, seed=0)
    found = [describe_round(await fleet.run(work, seed=1 + number), fleet, work) for number in range(rounds)]
    medians = {name: middle([one[name] for one in found]) for name in found[0]}
    return {
        "engine": setting.engine,
        "engines": setting.engines,
        "concurrency": setting.concurrency if setting.engine == "sglang" else None,
        "samples": samples,
        "devices": setting.engines * setting.config.rollout.tensor,
        "overrides": list(setting.overrides),
        "sequences": work.sequences,
        "slots": fleet.slots(work.sequences),
        "first_token_idle_s": statistics.median(idle),
        **medians,
        "tokens_per_s_per_device": (medians["tokens_per_s"] or 0.0) / setting.engines / setting.config.rollout.tensor,
        "rounds": found,
    }


def describe_round(observed: Observed, fleet: EngineFleet, work: Generation) -> dict[str, Any]:
    """Return the figures of one generation."""
    tail = measure_tail(observed.spans, fleet.slots(work.sequences))
    tokens = sum(sum(span.response_tokens) for span in observed.spans)
    probes = sorted(observed.first_token_s)
    return {
        "response_tokens": tokens,
        "longest_response": max(max(span.response_tokens) for span in observed.spans),
        "tokens_per_s": tokens / tail.makespan_s,
        "first_token_s": middle(probes),
        "first_token_p95_s": probes[min(len(probes) - 1, int(0.95 * len(probes)))] if probes else None,
        **asdict(tail),
    }


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median of what is there; None when nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def numbers(arguments: argparse.Namespace, name: str) -> list[int]:
    """Return the comma-separated numbers of an option. Raises ConfigError."""
    text: str = getattr(arguments, name)
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        rule, remedy = "must be positive integers", "write 1 or 1,2,4"
        raise ConfigError([Violation(key=f"--{name}", value=text, rule=rule, remedy=remedy)])
    return found


def lengths_of(arguments: argparse.Namespace) -> Lengths:
    """Return the lengths that the command line names."""
    return Lengths(
        prompts=LengthDistribution(
            mean=arguments.prompt_tokens,
            spread=arguments.prompt_spread,
            longest=arguments.longest_prompt,
            prompt_share=0,
        ),
        response_mean=arguments.response_tokens if arguments.model in PRESETS else 0,
        longest_response=arguments.longest_response,
        tail_share=arguments.tail_share,
        tail_factor=arguments.tail_factor,
    )


def make_settings(arguments: argparse.Namespace, folder: Path, device: DeviceKind) -> list[Setting]:
    """Compose and check the configuration of every setting. Raises ConfigError."""
    if device is DeviceKind.cuda and "hf" in arguments.engine.split(",") and max(numbers(arguments, "engines")) > 1:
        rule, remedy = "must be 1 with engine hf on GPUs, which would all be on the first", "use --engine sglang"
        raise ConfigError([Violation(key="--engines", value=arguments.engines, rule=rule, remedy=remedy)])
    settings: list[Setting] = []
    longest = arguments.longest_prompt + arguments.longest_response
    names = arguments.engine.split(",")
    sweep: list[list[str]] = arguments.sweep or [[]]
    counts = list(itertools.product(numbers(arguments, "engines"), numbers(arguments, "concurrency")))
    kinds = [(chosen, name) for chosen in sweep for name in names]
    for (chosen, name), (engines, concurrency) in itertools.product(kinds, counts):
        asked = (name, engines, chosen)
        if name == "hf" and any((one.engine, one.engines, one.overrides) == asked for one in settings):
            continue  # it has no such setting as the concurrency
        overrides = [
            "data=spell_backward",
            f"cluster.device={device.value}",
            f"cluster.pools={{main: {max(1, engines)}}}",
            f"model.path='{folder}'",
            f"rollout.engine={name}",
            f"rollout.num_engines={engines}",
            f"rollout.sglang.max_running_requests={concurrency}",
            f"data.max_prompt_tokens={arguments.longest_prompt}",
            f"rollout.sampling.max_new_tokens={arguments.longest_response}",
            f"rollout.validation.max_new_tokens={arguments.longest_response}",
        ]
        if device is DeviceKind.cpu:
            overrides.append(f"rollout.sglang.max_total_tokens={max(8192, concurrency * longest)}")
        config = load_run_config([*overrides, *arguments.overrides, *chosen], rules=(check_config, model_folders_fit))
        settings.append(Setting(engine=name, engines=engines, concurrency=concurrency, config=config, overrides=chosen))
    return settings


def check_measurement(arguments: argparse.Namespace, model: dict[str, Any]) -> None:
    """Refuse numbers that this program cannot use. Raises ConfigError."""
    positions = model.get("max_position_embeddings", arguments.longest_prompt + arguments.longest_response)
    longest = arguments.longest_prompt + arguments.longest_response
    vocabulary = model["vocab_size"]
    mean = arguments.response_tokens
    rules = (
        ("--prompts", arguments.prompts >= 1, "must be at least 1"),
        ("--rounds", arguments.rounds >= 1, "must be at least 1"),
        ("--prompt-tokens", arguments.prompt_tokens >= 2, "must be at least 2"),
        ("--prompt-spread", arguments.prompt_spread >= 0, "must not be negative"),
        ("--longest-prompt", arguments.longest_prompt >= 2, "must be at least 2"),
        ("--longest-response", arguments.longest_response >= 1, "must be at least 1"),
        ("--longest-response", longest <= positions, f"must fit, with the prompt, into the {positions} positions"),
        ("--response-tokens", mean == 0 or 1 <= mean <= vocabulary, f"must be 0, or from 1 to {vocabulary} tokens"),
        ("--tail-share", 0 <= arguments.tail_share <= 1, "must be from 0 to 1"),
        ("--tail-factor", arguments.tail_factor >= 1, "must be at least 1"),
    )
    require(arguments, rules)


def print_report(report: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{report['model']} in {report['dtype']}, {report['prompts']} prompts, medians of {report['rounds']}\n")
    print("\n".join(describe_report(report)))
    print(", ".join(f"{name}: {value}" for name, value in report["environment"].items()))


if __name__ == "__main__":
    sys.exit(main())
