"""Times the phases of a step and says what the times amount to."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.markdown import describe_report
from benchmarks.training.launch import Actor
from benchmarks.training.workload import TrainingWork, doubled
from megappo.balance.layout import RankLayout
from megappo.controller.throughput import ModelThroughput
from megappo.observability.flops import pass_size
from megappo.observability.metrics import Metrics, values

LOG_PROBS, UPDATE = "log_probs", "actor_update"
COLUMNS = [
    "devices",
    "log-probs tokens/s/device",
    "log-probs MFU",
    "update tokens/s/device",
    "update MFU",
    "update HFU",
    "bubble",
    "hand-over s",
    "peak GiB",
]
"""Figures of a layout, those of the table."""
_BETTER = {
    "log-probs tokens/s/device": "higher",
    "update tokens/s/device": "higher",
    "hand-over s": "lower",
    "peak GiB": "lower",
}


def measure(
    actor: Actor, work: TrainingWork, throughput: ModelThroughput, *, warmup: int, steps: int
) -> dict[str, Any]:  # Any: a JSON object
    """Time log-probs and update; with pipeline stages also updates of twice the micro-batches.

    `fixed_share_measured` is the share of an update that does not grow with its micro-batches: the bubble, the
    reduction of the gradient and the optimizer step. With T(m) = fixed + m t it is 1 - (T(2 m) - T(m)) / T(m), of the
    fastest steps; null where other work on the machine made it no share.
    """
    experience, layout = work.experience, actor.layout
    size = pass_size(experience.lengths, predictions=int(experience.loss_mask.sum()))
    epochs = work.requests[0].epochs
    forward = time_steps(lambda: actor.log_probs(work), warmup=warmup, steps=steps)
    exported = time_steps(actor.export_weights, warmup=warmup, steps=steps)
    update = time_steps(lambda: actor.update(work), warmup=warmup, steps=steps)
    share = experience.num_tokens / layout.world_size
    scored = throughput.forward("log_probs", size, passes=1, seconds=statistics.median(forward))
    trained = throughput.training("actor_update", size, epochs=epochs, seconds=statistics.median(update))
    report: dict[str, Any] = {
        "flops": {"forward": throughput.flops.forward(size), "backward": throughput.flops.backward(size)},
        "log_probs": _phase("log_probs", forward, scored, tokens_per_device=share),
        "actor_update": _phase("actor_update", update, trained, tokens_per_device=epochs * share),
        "export_weights": {"seconds": exported},
        "bubble_share": bubble_share(layout, work.micro_batches),
    }
    if layout.pipeline > 1:
        longer = doubled(work)
        twice = time_steps(lambda: actor.update(longer), warmup=warmup, steps=steps)
        fixed = 1 - (min(twice) - min(update)) / min(update)
        report["fixed_share_measured"] = fixed if 0 <= fixed <= 1 else None
    return report


def time_steps(step: Callable[[], None], *, warmup: int, steps: int) -> list[float]:
    """Return the wall seconds of each measured step."""
    seconds: list[float] = []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:]


def bubble_share(layout: RankLayout, micro_batches: float) -> float:
    """Return the share of a pass in which a stage waits, for m equal micro-batches on p stages of v chunks:
    (p - 1) / (v m + p - 1) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, over the whole pass)."""
    waiting = layout.pipeline - 1
    return waiting / (layout.virtual_pipeline * micro_batches + waiting)


def _phase(phase: str, seconds: list[float], rates: Metrics, *, tokens_per_device: float) -> dict[str, Any]:
    """Describe one phase; utilisation is absent where the peak is not known."""
    median, found = statistics.median(seconds), values(rates)
    report = {
        "seconds": seconds,
        "tokens_per_s_per_device": tokens_per_device / median,
        "tflops_per_device": found[f"perf/tflops_per_device/{phase}"],
    }
    for name in ("mfu", "hfu"):
        if f"perf/{name}/{phase}" in found:
            report[name] = found[f"perf/{name}/{phase}"]
    return report


def describe(report: dict[str, Any]) -> list[str]:
    """Return the lines that are printed of a report."""
    shown = {name: value for name, value in report["layout"].items() if value is True or value not in (1, None, False)}
    layout = ", ".join(name if value is True else f"{name} {value}" for name, value in shown.items())
    lines = [
        f"{report['model']} in {report['dtype']} on {report['devices']} x {report['device'] or 'different devices'} "
        f"({report['launcher']}): {layout or 'one rank'}",
        f"{report['sequences']} sequences, {report['tokens']:,} tokens, "
        f"{report['micro_batches_per_optimizer_step']:g} micro-batches per rank and optimizer step",
        f"{'phase':<14}{'median s':>10}{'tokens/s/device':>17}{'TFLOP/s/device':>16}{'MFU':>8}{'HFU':>8}",
    ]
    for phase in ("log_probs", "actor_update"):
        found = report[phase]
        shares = "".join(f"{found[name]:>8.1%}" if name in found else f"{'-':>8}" for name in ("mfu", "hfu"))
        lines.append(
            f"{phase:<14}{statistics.median(found['seconds']):>10.3f}{found['tokens_per_s_per_device']:>17,.0f}"
            f"{found['tflops_per_device']:>16.4g}{shares}"
        )
    if report["device_peak_tflops"] is None:
        lines.append("MFU: absent, the peak of this device is not known")
    lines.append(f"peak memory {report['peak_memory_bytes'] / 2**30:.2f} GiB on the fullest rank")
    bubble = f"pipeline bubble {report['bubble_share']:.1%} by formula"
    if report.get("fixed_share_measured") is not None:
        bubble += f"; {report['fixed_share_measured']:.1%} measured, gradient reduction and optimizer step included"
    exported = statistics.median(report["export_weights"]["seconds"])
    lines.append(f"hand-over, the trainer's half (all weights into buckets): {exported:.3f} s")
    return [*lines, bubble]


def as_case(report: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Return what was found of a layout as a case of a report: sizes, figures, which way is better, and all of it."""
    sizes = ("model", "device", "devices", "dtype", "lengths", "sequences", "tokens", "overrides", "launcher")
    log_probs, update = report[LOG_PROBS], report[UPDATE]
    figures = {
        "devices": report["devices"],
        "log-probs tokens/s/device": log_probs["tokens_per_s_per_device"],
        "log-probs MFU": log_probs.get("mfu"),
        "update tokens/s/device": update["tokens_per_s_per_device"],
        "update MFU": update.get("mfu"),
        "update HFU": update.get("hfu"),
        "bubble": report["bubble_share"],
        "hand-over s": statistics.median(report["export_weights"]["seconds"]),
        "peak GiB": report["peak_memory_bytes"] / 2**30,
    }
    return {
        "question": "training speed in this layout",
        "sizes": {name: report[name] for name in sizes},
        "figures": figures,
        "better": _BETTER,
        "goals": {},
        "met": None,
        "details": report,
    }


def describe_table(report: dict[str, Any]) -> list[str]:
    """Return the lines of the table of all layouts."""
    return describe_report(report)
