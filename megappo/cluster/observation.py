"""Traces and profiles of steps, over all processes of a run (port `StepObservation`).

Off, it makes no call. In a step that is observed every process is called twice, which takes a few milliseconds. A
process that does not answer is left out: looking at a run never ends it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.exceptions import RayError

from megappo.checkpoint.names import step_name
from megappo.cluster.observed import Ask
from megappo.config.run import RunConfig
from megappo.observability.chrome_trace import ProcessSpans, make_chrome_trace
from megappo.observability.clocks import ClockReading, Offset, Probe, offset_of, read_clock
from megappo.observability.metrics import Metrics, mean
from megappo.observability.run_directory import RunDirectory, write_atomically
from megappo.observability.spans import Span, SpanRecorder, busy_share

_ANSWER_S = 10.0
"""Longest wait for the processes of a run, at the beginning and the end of a step that is observed."""
_PROBES = 8
"""Questions for the time of another machine."""


class ClusterObservation:
    """Looks at the steps that `trace` and `profile` name."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        processes: Callable[[], Mapping[str, Ask]],
        warn: Callable[[str], None],
    ) -> None:
        """`processes` names those that run now, such as `actor_0`."""
        self._config = config
        self._directory = directory
        self._processes = processes
        self._warn = warn
        self._asked: dict[str, Ask] = {}
        """Those that were told that the step began."""
        self._offsets: dict[str, Offset] = {}
        self._recorder: SpanRecorder | None = None
        self._start_ns = 0

    def begin(self, step: int) -> None:
        """Tell all processes that a step begins, if it is observed, and set their clocks against this one's."""
        traced, profiled = self._config.trace.covers(step), step in self._config.profile.steps
        self._asked = dict(self._processes()) if traced or profiled else {}
        if not self._asked:
            return
        readings: dict[str, ClockReading] = self._ask("begin_observation", step, traced=traced)
        self._asked = {name: ask for name, ask in self._asked.items() if name in readings}
        if traced:
            self._offsets = self._measure(readings)
            self._recorder, self._start_ns = SpanRecorder(), time.monotonic_ns()

    def end(self, step: int) -> Metrics:
        """Collect what was observed of a step, write its trace, and return how busy every process was."""
        if not self._asked:
            return {}
        now_ns = time.monotonic_ns()
        recorder, self._recorder = self._recorder, None
        own = [] if recorder is None else recorder.stop(now_ns)
        found: dict[str, list[Span]] = self._ask("end_observation")
        self._asked = {}
        if recorder is None:
            return {}
        processes = [ProcessSpans(name="controller", spans=own, offset=Offset(0, 0))]
        processes += [
            ProcessSpans(name=name, spans=spans, offset=self._offsets[name])
            for name, spans in found.items()
            if name in self._offsets
        ]
        self._write(step, processes, now_ns)
        return {
            f"perf/busy_share/{process.name}": mean(busy_share(process.on_driver_clock(), self._start_ns, now_ns), 1)
            for process in processes[1:]
        }

    def _ask(self, method: str, *args: object, **kwargs: object) -> dict:
        """Call a method of all processes; returns what came back in time."""
        calls = {name: ask(method, *args, **kwargs).ref for name, ask in self._asked.items()}
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
        answers: dict = {}
        for name, ref in calls.items():
            try:
                answers[name] = ray.get(ref, timeout=0) if ref in ready else None
            except RayError:
                continue
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _measure(self, readings: Mapping[str, ClockReading]) -> dict[str, Offset]:
        """Return the offset of every process's clock: by one process of each other machine."""
        here = read_clock().machine
        of_machine = {here: Offset(0, 0)}
        for name, reading in readings.items():
            if reading.machine not in of_machine and (probes := _probe(self._asked[name])):
                of_machine[reading.machine] = offset_of(probes)
        known = {name: reading.machine for name, reading in readings.items() if reading.machine in of_machine}
        return {name: of_machine[machine] for name, machine in known.items()}

    def _write(self, step: int, processes: Sequence[ProcessSpans], end_ns: int) -> None:
        path = self._directory.traces / f"{step_name(step)}.json"
        title = f"{self._config.run.name}, step {step}"
        trace = make_chrome_trace(processes, title=title, start_ns=self._start_ns, end_ns=end_ns)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(trace))
        except OSError as error:
            self._warn(f"{path} was not written: {error.strerror or error}; the run goes on")


def _probe(ask: Ask) -> list[Probe]:
    """Ask a process for the time, one question after the other, as long as it answers."""
    probes: list[Probe] = []
    for _ in range(_PROBES):
        asked_ns = time.monotonic_ns()
        try:
            reading: ClockReading = ray.get(ask("read_clock").ref, timeout=_ANSWER_S)
        except RayError:
            break
        probes.append(Probe(asked_ns, reading.now_ns, time.monotonic_ns()))
    return probes
