"""What a step's sequences cost the controller: bytes that it holds, and their way through Ray to a training process.

Run by `make bench NAME=data_plane`, which installs verl 0.9.1 into .oracle; see benchmarks/README.md.
"""

import atexit
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks.harness import Case, Contender, Goal, Ratio, require_module, require_one_thread, run_program
from benchmarks.registry import VERL

if TYPE_CHECKING:
    from benchmarks.transfer.batches import Sizes

_CALLS = 100
"""Small round trips in a row, which take about a millisecond each."""
_WALL_ROUNDS = 5


def make_held(quick: bool) -> Case:
    """Bytes by valid response token at the end of a step. Nothing is timed."""
    from benchmarks.transfer.batches import StepBatches, metadata_bytes

    sizes = _sizes(512, quick)
    batches = StepBatches(sizes)

    def figures(_: Mapping[str, object]) -> dict[str, float]:
        held = metadata_bytes(batches.prompts, batches.responses)
        longer = metadata_bytes(batches.prompts, 2 * batches.responses)
        tokens = batches.response_tokens
        return {
            "verl, padded: bytes per token": batches.padded_bytes / tokens,
            "megappo, packed, on the training ranks: bytes per token": batches.packed_bytes / tokens,
            "megappo, on the controller: bytes per token": held / tokens,
            "megappo, on the controller: bytes per sequence": held / sizes.sequences,
            "packed, times fewer": batches.padded_bytes / batches.packed_bytes,
            "on the controller, times fewer": batches.padded_bytes / held,
            "on the controller, responses twice as long": longer / held,
        }

    return Case(
        key="held",
        question="bytes of a PPO step with critic and reference, by valid response token",
        sizes=sizes.describe(),
        contenders=[],
        goals=[
            Goal(figure="packed, times fewer", at_least=14),
            Goal(figure="on the controller, times fewer", at_least=14),
            Goal(figure="on the controller, responses twice as long", at_most=1.05),
        ],
        quantities=figures,
    )


def make_round_trip(quick: bool) -> Case:
    """From the driver to another process and back."""
    from benchmarks.transfer.batches import StepBatches
    from benchmarks.transfer.reader import RoundTrips

    sizes = _sizes(256, quick)
    batches = StepBatches(sizes)
    trips = RoundTrips(batches)
    atexit.register(trips.close)

    def figures(_: Mapping[str, object]) -> dict[str, float]:
        empty, by_reference = (_wall_s(run, _CALLS) for run in (trips.nothing, trips.by_reference))
        padded, packed = (_wall_s(run, 1) for run in (trips.padded, trips.packed))
        return {
            "empty call, wall ms": 1e3 * empty,
            "by reference, wall ms": 1e3 * by_reference,
            "packed data, wall ms": 1e3 * packed,
            "verl's padded data, wall ms": 1e3 * padded,
            "padded MB": batches.padded_bytes / 1e6,
            "packed MB": batches.packed_bytes / 1e6,
        }

    return Case(
        key="round_trip",
        question=f"round trip of {sizes.sequences} sequences from the driver through Ray",
        sizes=sizes.describe(),
        contenders=[
            Contender(name="verl's padded batch", run=trips.padded),
            Contender(name="packed batch", run=trips.packed, repeats=5),
            Contender(name="by reference", run=trips.by_reference, repeats=_CALLS),
            Contender(name="empty call", run=trips.nothing, repeats=_CALLS),
        ],
        ratios=[
            Ratio(name="by reference, in empty calls", numerator="by reference", denominator="empty call"),
            Ratio(name="speedup where data moves", numerator="verl's padded batch", denominator="packed batch"),
            Ratio(name="speedup by reference", numerator="verl's padded batch", denominator="by reference"),
        ],
        goals=[
            Goal(figure="by reference, in empty calls", at_most=3),
            Goal(figure="speedup where data moves", at_least=30),
        ],
        quantities=figures,
    )


def _sizes(sequences: int, quick: bool) -> "Sizes":
    from benchmarks.transfer.batches import Sizes

    return (
        Sizes(sequences=32, response=512, prompt=128)
        if quick
        else Sizes(sequences=sequences, response=8192, prompt=1024)
    )


def _wall_s(run: Callable[[], None], calls: int) -> float:
    """Return the wall seconds of one run, median over some rounds."""
    found: list[float] = []
    for _ in range(_WALL_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def main() -> None:
    """Measure the chosen cases."""
    require_one_thread()
    require_module(VERL.module, VERL.remedy)
    run_program(
        "data_plane", {"held": make_held, "round_trip": make_round_trip}, packages=["numpy", "torch", "ray", "verl"]
    )


if __name__ == "__main__":
    main()
