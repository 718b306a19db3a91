"""How fast does the actor train? Tokens/s, TFLOP/s, MFU, peak memory, pipeline bubble and hand-over of one model in one
layout or several.

Runs the real log-probs pass and update of the actor on synthetic packed sequences, with random weights: a shape is
enough, nothing is downloaded or written but the report. The layout and everything else is configuration, as for
`megappo train`, and what breaks one of its rules is refused before anything starts:

  python -m benchmarks.train_mfu --model tiny
  torchrun --nproc-per-node 8 -m benchmarks.train_mfu --model llama3_8b model=bfloat16 \\
      actor.parallelism.tensor=4 actor.parallelism.sequence=true batching.micro_batch_tokens=16384
  python -m benchmarks.train_mfu --model llama3_8b --ray model=bfloat16 cluster.pools.main=8 actor.parallelism.tensor=4

--sweep measures a model in several layouts, one after the other, and puts them into one table; each --sweep is a set of
overrides beside those of all:

  torchrun --nproc-per-node 8 -m benchmarks.train_mfu --model llama3_8b model=bfloat16 \\
      --sweep "actor.parallelism.tensor=2" --sweep "actor.parallelism.tensor=4 actor.parallelism.sequence=true"

Under torchrun the number of devices is that of its processes, under Ray `cluster.pools.main`; what the layout leaves is
data parallelism. A step has batching.prompts_per_step * batching.samples_per_prompt sequences.

Exit codes: 0 done, 1 failed, 2 refused.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import require
from benchmarks.environment import describe_environment
from benchmarks.training.launch import Actor, LaunchedRank, RankActor, RayActor
from benchmarks.training.measurement import COLUMNS, as_case, describe, describe_table, measure
from benchmarks.training.model_presets import PRESETS, model_config, write_model_folder
from benchmarks.training.workload import LengthDistribution, make_work
from megappo.cluster.groups import layout_of
from megappo.config.file_rules import model_folders_fit
from megappo.config.rules import check_config
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.controller.throughput import make_throughput
from megappo.device.backend import resolve_backend
from megappo.errors import MegappoError

BASE = ("data=spell_backward", "cluster.device=auto", "batching.prompts_per_step=8", "batching.samples_per_prompt=4")
"""What a run needs and a measurement does not, and a small step."""
QUICK = {"mean_tokens": 48.0, "longest": 128, "warmup": 0, "steps": 1}
"""What --quick sets."""


def main(given: Sequence[str] | None = None) -> int:
    """Measure what the command line names; returns the exit code."""
    arguments = make_parser().parse_args(given)
    if arguments.quick:
        vars(arguments).update(QUICK)
    launched = LaunchedRank.of_environment()
    try:
        run(arguments, launched)
    except MegappoError as error:
        if launched.rank == 0:
            print(error, file=sys.stderr)
        return error.exit_code
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_mfu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="tiny", help=f"{', '.join(PRESETS)}, or a folder with a config.json (default tiny)"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        type=shlex.split,
        metavar='"key=value ..."',
        help="overrides of one more layout to measure (may be repeated)",
    )
    parser.add_argument("--quick", action="store_true", help="one step of short sequences, without a warm-up")
    parser.add_argument("--ray", action="store_true", help="start the ranks as Ray workers, from one process")
    parser.add_argument("--mean-tokens", type=float, default=512, help="mean length of a sequence (default 512)")
    parser.add_argument("--spread", type=float, default=0.6, help="log-normal sigma of the lengths, 0: equal (0.6)")
    parser.add_argument("--longest", type=int, default=2048, help="longest sequence in tokens (default 2048)")
    parser.add_argument("--prompt-share", type=float, default=0.25, help="share of prompt in a sequence (default 0.25)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those that count (default 1)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default 3)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks/train_mfu.json"), help="JSON report (default %(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration, as on the command line of `megappo train`"
    )
    return parser


def run(arguments: argparse.Namespace, launched: LaunchedRank) -> None:
    """Check all layouts, then measure one after the other; what is measured is written after each."""
    model = model_config(arguments.model)
    check_measurement(arguments, model)
    folder = write_model_folder(model, arguments.output.parent.resolve() / "train_mfu" / f"model-{launched.rank}")
    sets: list[list[str]] = arguments.sweep or [[]]
    configs = [make_config(arguments, folder, launched, chosen) for chosen in sets]
    environment = describe_environment(["torch", "megatron-core"]) | {"clock": "wall seconds"}
    report: dict[str, Any] = {"program": "train_mfu", "environment": environment, "columns": COLUMNS, "cases": {}}
    for index, (chosen, config) in enumerate(zip(sets, configs, strict=True)):
        # Another port for each world: a rank that is early must not meet what is left of the one before.
        here = replace(launched, port=launched.port and launched.port + index)
        row = measure_layout(arguments, here, config, model=model, folder=folder)
        row["overrides"] = [*arguments.overrides, *chosen]
        report["cases"][" ".join(chosen) or "as given"] = as_case(row)
        if launched.rank == 0:
            print("\n".join(["", *describe(row)]), flush=True)
            write(report, arguments.output)
    if launched.rank == 0:
        print("\n".join(["", *describe_table(report)] if len(sets) > 1 else []))
        print(f"written to {arguments.output}")


def write(report: dict[str, Any], path: Path) -> None:  # Any: JSON
    """Write the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure_layout(
    arguments: argparse.Namespace,
    launched: LaunchedRank,
    config: RunConfig,
    *,
    model: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:  # Any: a JSON object
    """Start the ranks of a layout, measure, end them; returns what was found (complete on every rank)."""
    lengths = LengthDistribution(
        mean=arguments.mean_tokens,
        spread=arguments.spread,
        longest=arguments.longest,
        prompt_share=arguments.prompt_share,
    )
    backend = resolve_backend(config.cluster.device)
    layout = layout_of(config.actor.parallelism, config.cluster.pools["main"])
    work = make_work(config, model, layout, lengths)
    if arguments.ray:
        start: Actor = RayActor(config, backend=backend, layout=layout, log_dir=folder.parent / "logs")
    else:
        start = RankActor(config, backend=backend, layout=layout, launched=launched)
    with start as actor:
        device = actor.device_name()
        throughput = make_throughput(
            config, role="actor", model=model, num_devices=layout.world_size, device_name=device
        )
        report = measure(actor, work, throughput, warmup=arguments.warmup, steps=arguments.steps)
        memory = max(actor.peak_memory_bytes())
    return {
        "model": arguments.model,
        "launcher": "Ray" if arguments.ray else "one process" if launched.world_size == 1 else "torchrun",
        "device": device,
        "device_peak_tflops": None if throughput.peak is None else throughput.peak / 1e12,
        "devices": layout.world_size,
        "layout": asdict(config.actor.parallelism) | {"data": layout.data},
        "dtype": config.model.dtype.value,
        "micro_batch_tokens": config.batching.micro_batch_tokens,
        "lengths": asdict(lengths),
        "sequences": work.experience.num_sequences,
        "tokens": work.experience.num_tokens,
        "micro_batches_per_optimizer_step": work.micro_batches,
        "optimizer_steps_per_update": len(work.requests[0].mini_batches) * config.batching.ppo_epochs,
        **report,
        "peak_memory_bytes": memory,
    }


def make_config(
    arguments: argparse.Namespace, folder: Path, launched: LaunchedRank, chosen: Sequence[str]
) -> RunConfig:
    """Compose and check the configuration of one layout. Raises ConfigError with every broken rule."""
    overrides = [*BASE, f"model.path='{folder}'", "model.random_weights=true"]
    # Under torchrun the world is there already, so it has the last word.
    world = [] if arguments.ray else [f"cluster.pools={{main: {launched.world_size}}}"]
    return load_run_config([*overrides, *arguments.overrides, *chosen, *world], rules=(check_config, model_folders_fit))


def check_measurement(arguments: argparse.Namespace, model: dict[str, Any]) -> None:
    """Refuse numbers that this program cannot use. Raises ConfigError."""
    positions = model.get("max_position_embeddings", arguments.longest)
    rules = (
        ("--longest", 2 <= arguments.longest <= positions, f"must be from 2 to the model's {positions} positions"),
        ("--mean-tokens", arguments.mean_tokens >= 2, "must be at least 2"),
        ("--spread", arguments.spread >= 0, "must not be negative"),
        ("--prompt-share", 0 <= arguments.prompt_share < 1, "must be at least 0 and less than 1"),
        ("--warmup", arguments.warmup >= 0, "must not be negative"),
        ("--steps", arguments.steps >= 1, "must be at least 1"),
    )
    require(arguments, rules)


if __name__ == "__main__":
    sys.exit(main())
