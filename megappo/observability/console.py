"""What a person sees of a run: start-up phases, progress, and a closing report.

On a terminal: a spinner while something starts, then a progress bar over two live lines. Elsewhere (a file, CI): one
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

from megappo.observability.step_line import describe_split, describe_step

_CELL_WIDTH = 48


@dataclass(kw_only=True, slots=True, frozen=True)
class AnswerRow:
    """One prompt with the model's answers to it, and their scores, before and after training."""

    prompt: str
    before: str
    before_score: float
    after: str
    after_score: float


class RunConsole:
    """Prints the course of one run. Use as a context manager, so that the terminal is given back on any exit.

    Args:
        file: where to print; default standard output.
        terminal: whether that is a terminal; default: find out.
    """

    def __init__(self, *, file: TextIO | None = None, terminal: bool | None = None) -> None:
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
    def is_terminal(self) -> bool:
        """Whether a person watches, so that lines may move."""
        return self._console.is_terminal

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def phase(self, text: str) -> None:
        """Say what begins now; it lasts until the next phase or step."""
        self._end_live()
        self.note(text)
        if self.is_terminal:
            self._show(Spinner("dots", text=Text(text, style="dim")))

    def note(self, text: str) -> None:
        """Say something that does not end the current phase; safe to call from other threads."""
        self._print(f"[{self.elapsed_s:6.1f} s] {text}")

    def step(self, step: int, total_steps: int, values: Mapping[str, float]) -> None:
        """Show a finished step of the PPO loop."""
        self.progress(
            step,
            total_steps,
            describe_step(values),
            detail=describe_split(values),
            step_s=values.get("timing/step_s", 0.0),
        )

    def progress(self, step: int, total_steps: int, text: str, *, detail: str = "", step_s: float = 0.0) -> None:
        """Show a finished step of anything: a bar with `text` and `detail` below it, or one plain line.

        Args:
            step_s: seconds of this step, from which the time left is guessed; 0: no guess.
        """
        if not self.is_terminal:
            self._print("  ".join(part for part in (f"step {step}/{total_steps}", text, detail) if part))
            return
        left = f"about {duration((total_steps - step) * step_s)} left" if step_s and step < total_steps else ""
        head = Table.grid(padding=(0, 1))
        head.add_row(f"step {step}/{total_steps}", ProgressBar(total=total_steps, completed=step, width=40), left)
        self._show(Group(head, Text(text), Text(detail, style="dim")))

    def counted(self, text: str, done: int, total: int) -> None:
        """Show how far something is that has no lines of its own; only a terminal does."""
        if self.is_terminal:
            line = Table.grid(padding=(0, 1))
            line.add_row(Text(text), ProgressBar(total=total, completed=done, width=40), Text(f"{done}/{total}"))
            self._show(Group(line))

    def grid(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table of several columns under a title."""
        table = Table()
        for heading in headings:
            table.add_column(heading)
        for row in rows:
            table.add_row(*(Text(value) for value in row))
        self._titled(title, table)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print two columns under a title."""
        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._titled(title, table)

    def answers(self, rows: Sequence[AnswerRow]) -> None:
        """Print answers before and after training, side by side; nothing when there are none."""
        if not rows:
            return
        table = Table()
        for heading in ("prompt", "before", "score", "after", "score"):
            table.add_column(heading)
        for row in rows:
            before, after = f"{row.before_score:.2f}", f"{row.after_score:.2f}"
            table.add_row(_cell(row.prompt), _cell(row.before), before, _cell(row.after), after)
        self._titled("Answers before and after", table)

    def lines(self, title: str, lines: Sequence[str]) -> None:
        """Print a title and lines that can be copied: never wrapped, never cut."""
        self._titled(title, None)
        for line in lines:
            self._print(f"  {line}")

    def _titled(self, title: str, table: Table | None) -> None:
        self._end_live()
        self._console.print()
        self._console.print(Text(title, style="bold"))
        if table is not None:
            self._console.print(table)

    def _print(self, text: str) -> None:
        # Text, so that brackets are not taken for markup; soft_wrap leaves long lines whole.
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


def _cell(text: str) -> Text:
    """Return text of unknown origin for one table cell: control characters escaped, a long one cut in the middle."""
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text.strip())
    if len(escaped) > _CELL_WIDTH:
        half = (_CELL_WIDTH - 3) // 2
        escaped = f"{escaped[:half]}...{escaped[-half:]}"
    return Text(escaped)


def duration(seconds: float) -> str:
    """Return a length of time in words: `45 s`, `3 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
