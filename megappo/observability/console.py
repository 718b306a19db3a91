"""What a person sees of a run: start-up phases, progress, and a closing report.

On a terminal: a spinner while something starts, then two live lines under a progress bar. Elsewhere (a file, CI): one
plain line per phase and per step, no control characters.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_PHASES = (
    ("generate", ("generate",)),
    ("score", ("score",)),
    ("log-probs", ("log_probs",)),
    ("values", ("values",)),
    ("experience", ("experience",)),
    ("update", ("update_critic", "update_actor")),
    ("hand-over", ("weight_sync",)),
)
"""Label on the console -> phases of the timer that add up to it."""

_KL_NAMES = ("kl/in_reward/mean", "kl/in_loss/mean", "actor/approx_kl")
"""What is shown as KL: the first that is there (to the reference policy, else to the policy before the update)."""

_CELL_WIDTH = 48


@dataclass(kw_only=True, slots=True, frozen=True)
class AnswerRow:
    """One prompt with the model's answer and its score, before and after training."""

    prompt: str
    before: str
    before_score: float
    after: str
    after_score: float


class RunConsole:
    """Prints the course of one run. Use as a context manager, so that the terminal is given back on any exit."""

    def __init__(self, *, file: TextIO | None = None, terminal: bool | None = None) -> None:
        # Off a terminal, lines are as long as they are: a file has no width.
        self._console = Console(file=file, force_terminal=terminal, highlight=False)
        self._live: Live | None = None
        self._start = time.monotonic()

    def __enter__(self) -> "RunConsole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def phase(self, text: str) -> None:
        """Say what begins now; it lasts until the next phase or step."""
        self._end_live()
        self._print(f"[{self.elapsed_s:6.1f} s] {text}")
        if self._console.is_terminal:
            self._show(Spinner("dots", text=Text(text)))

    def note(self, text: str) -> None:
        """Say something that does not end the current phase; safe to call from other threads."""
        self._print(f"[{self.elapsed_s:6.1f} s] {text}")

    def step(self, step: int, total_steps: int, values: Mapping[str, float]) -> None:
        """Show a finished step."""
        numbers, split = describe_step(values), describe_split(values)
        if not self._console.is_terminal:
            self._print(f"step {step}/{total_steps}  {numbers}  {split}")
            return
        head = Table.grid(padding=(0, 1))
        remaining = self.remaining_s(step, total_steps, values)
        head.add_row(
            f"step {step}/{total_steps}",
            ProgressBar(total=total_steps, completed=step, width=30),
            f"about {_duration(remaining)} left" if step < total_steps else "done",
        )
        self._show(Group(head, Text(numbers), Text(split, style="dim")))

    @staticmethod
    def remaining_s(step: int, total_steps: int, values: Mapping[str, float]) -> float:
        """Return the seconds that the steps left will take at the pace of this one."""
        return (total_steps - step) * values.get("timing/step_s", 0.0)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print two columns under a title."""
        self._end_live()
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._console.print()
        self._console.print(table)

    def answers(self, rows: Sequence[AnswerRow]) -> None:
        """Print answers before and after training, side by side."""
        self._end_live()
        table = Table(title="Answers before and after", title_justify="left")
        for heading in ("prompt", "before", "score", "after", "score"):
            table.add_column(heading)
        for row in rows:
            table.add_row(
                Text(printable(row.prompt)),
                Text(printable(row.before)),
                f"{row.before_score:.2f}",
                Text(printable(row.after)),
                f"{row.after_score:.2f}",
            )
        self._console.print()
        self._console.print(table)

    def lines(self, title: str, lines: Sequence[str]) -> None:
        """Print a title and lines that can be copied: never wrapped, never cut."""
        self._end_live()
        self._console.print()
        self._print(title)
        for line in lines:
            self._print(f"  {line}")

    def _print(self, text: str) -> None:
        # Text, so that brackets in prompts and paths are not taken for markup; soft_wrap leaves long lines whole.
        self._console.print(Text(text), soft_wrap=True)

    def _show(self, content: Spinner | Group) -> None:
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        self._live.update(content)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def describe_step(values: Mapping[str, float]) -> str:
    """Return reward, KL, entropy, response length and throughput in one line; what is absent is left out."""
    parts: list[str] = []
    if (reward := values.get("reward/mean")) is not None:
        parts.append(f"reward {reward:.3f}")
    kl = next((values[name] for name in _KL_NAMES if name in values), None)
    if kl is not None:
        parts.append(f"KL {kl:.2g}")
    if (entropy := values.get("actor/entropy/mean")) is not None:
        parts.append(f"entropy {entropy:.3f}")
    if (length := values.get("rollout/response_tokens/mean")) is not None:
        parts.append(f"length {length:.1f}")
    if (speed := values.get("perf/tokens_per_s")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    return "  ".join(parts)


def describe_split(values: Mapping[str, float]) -> str:
    """Return where the time of a step went: `1.25 s = generate 0.70 + ...`."""
    parts: list[str] = []
    for label, phases in _PHASES:
        names = [f"timing/{phase}_s" for phase in phases]
        if any(name in values for name in names):
            parts.append(f"{label} {sum(values.get(name, 0.0) for name in names):.2f}")
    total = values.get("timing/step_s")
    if total is None:
        return ""
    return f"{total:.2f} s = {' + '.join(parts)}"


def printable(text: str) -> str:
    """Return sampled text for one table cell: control characters escaped, cut to a bearable length."""
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return escaped if len(escaped) <= _CELL_WIDTH else f"{escaped[: _CELL_WIDTH - 3]}..."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
