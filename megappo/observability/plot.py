"""The reward curve of a run as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_WINDOW = 10
"""Steps in the running mean."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    """Points of one line."""

    steps: Sequence[int]
    values: Sequence[float]


def running_mean(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Return for each value the mean of the last `window` values up to it (of fewer at the start)."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def plot_reward_curve(path: Path, *, title: str, training: Curve, validation: Mapping[str, Curve]) -> None:
    """Write a PNG: mean reward of each step, its running mean, and validation rewards by label."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(training.steps, training.values, color="tab:blue", alpha=0.3, linewidth=1, label="mean of a step")
    axes.plot(
        training.steps,
        running_mean(training.values),
        color="tab:blue",
        linewidth=2,
        label=f"mean of the last {_WINDOW} steps",
    )
    for number, (label, curve) in enumerate(validation.items(), start=1):
        if curve.steps:  # color C0 is that of the training
            axes.plot(curve.steps, curve.values, color=f"C{number}", marker="o", markersize=4, label=label)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    aside = path.with_name(f"{path.name}.writing")
    figure.savefig(aside, dpi=120, format="png")
    aside.replace(path)
