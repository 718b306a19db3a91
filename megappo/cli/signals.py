"""What signals mean for a run, and the exit codes that tell a script how it ended.

- SIGINT (Ctrl-C): the run ends at once; exit code 130.
- SIGTERM: the loop ends at its next safe point with a checkpoint, within `checkpoint.on_signal_s`; exit code 130.
- SIGUSR1 (the warning of a job scheduler such as Slurm, `--signal=B:USR1@120`), and `checkpoint.save_before_deadline`:
  the same; exit code 85 when there is a checkpoint to go on from: the script may start the same command again with
  `resume=auto`.
A signal before the first step, a second one, or one in a run that makes no checkpoints ends the run at once. The same
one again within 5 s is the first: Slurm sends a signal to all processes of a job, and those that have started the run
pass it on.
"""

import signal
import time
from types import FrameType

from megappo.controller.stopping import StopRequest

GO_ON = 85
"""Exit code: ended before its last step because its time was up, and can go on (ERESTART of Linux)."""

SIGTERM = signal.SIGTERM.name
"""The reason to end that a scheduler which wants the rest later does not give."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_S = 5.0


class StopSignals:
    """Turns signals into a request to the loop, or into KeyboardInterrupt. Used from the main thread.

    Args:
        request: what the loop reads.
        grace_s: seconds from a signal to the end of the run, whatever it has saved by then; 0: the end comes at once.
    """

    def __init__(self, request: StopRequest, *, grace_s: float) -> None:
        self._request = request
        self._grace_s = grace_s
        self._loop_runs = False
        self._last: tuple[int, float] = (0, 0.0)
        """The last signal, and when it came first."""
        self.asked_by_scheduler = False
        """Whether SIGUSR1 came."""
        for number in _SIGNALS:
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._give_up)

    def begin_loop(self) -> None:
        """From now on there are safe points."""
        self._loop_runs = True

    def end_loop(self) -> None:
        """There are none any more, and nothing to give up."""
        self._loop_runs = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == self._last[0] and now - self._last[1] < _SAME_S:
            return
        self._last = (number, now)
        self.asked_by_scheduler |= number == signal.SIGUSR1
        name = signal.Signals(number).name
        if not self._loop_runs or not self._grace_s or self._request.reason is not None:
            raise KeyboardInterrupt(name)
        self._request.ask(name)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _give_up(self, _number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"no safe point within checkpoint.on_signal_s={self._grace_s:g}")
