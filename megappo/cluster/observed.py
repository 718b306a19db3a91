"""What every process of a run offers those that look at a step from outside: its phases, its clock, profiles."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.cluster.runtime import Call
from megappo.config.profile import ProfileConfig
from megappo.observability.clocks import ClockReading, read_clock
from megappo.observability.run_directory import PROFILES
from megappo.observability.spans import Span, SpanRecorder

if TYPE_CHECKING:  # torch waits until the process has its threads
    from megappo.device.backend import Backend
    from megappo.device.profiling import PhaseProfiler

Ask = Callable[..., Call]
"""Method of an observed process, and its arguments -> the call, under way."""


class ObservedProcess:
    """Base of the classes of Ray actors."""

    _recorder: SpanRecorder | None = None
    _profiler: "PhaseProfiler | None" = None
    """Of a process that profiles phases of its own."""

    def observe_phases(
        self, config: ProfileConfig, *, process: str, chosen: bool, log_path: Path, backend: "Backend"
    ) -> None:
        """Have the device's own tools see the phases of this process: NVTX ranges on CUDA, and, if it is one of those
        chosen, profiles. `process` is as in the names of files, `log_path` in the folder of the run's logs."""
        from megappo.device.profiling import mark_phases, profiler_of

        mark_phases(backend)
        folder = log_path.parent.parent / PROFILES
        self._profiler = profiler_of(config, chosen=chosen, folder=folder, process=process, backend=backend)

    def begin_observation(self, step: int, *, traced: bool) -> ClockReading:
        """A step begins that is traced or profiled; returns the time here."""
        if self._profiler is not None:
            self._profiler.begin_step(step)
        self._stop_recording()
        if traced:
            self._recorder = SpanRecorder()
        return read_clock()

    def end_observation(self) -> list[Span]:
        """The step has ended; returns what this process did since it began, if that is traced."""
        if self._profiler is not None:
            self._profiler.end_step()
        return self._stop_recording()

    def read_clock(self) -> ClockReading:
        """Return the time here."""
        return read_clock()

    def _stop_recording(self) -> list[Span]:
        recorder, self._recorder = self._recorder, None
        return [] if recorder is None else recorder.stop(time.monotonic_ns())
