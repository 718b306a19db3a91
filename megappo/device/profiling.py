"""What torch and CUDA can tell of the phases of a process: profiles of torch.profiler, and NVTX ranges for Nsight."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megappo.config.profile import ProfileConfig
from megappo.device.backend import Backend
from megappo.observability.logging import get_logger
from megappo.observability.phases import Phase, add_listener

logger = get_logger(__name__)


class PhaseProfiler:
    """Profiles phases of chosen steps, each into a file of its own (port `PhaseListener`).

    A profile is of the thread that is in the phase, and of autograd's; phases within it are ranges of it. Of phases
    that overlap the first is profiled: torch has one profiler per process.
    """

    def __init__(
        self, config: ProfileConfig, *, names: Sequence[str], folder: Path, process: str, backend: Backend
    ) -> None:
        """`names` of the phases that are profiled, `process` as in the names of the files, such as `actor-0`."""
        self._config = config
        self._names = frozenset(names)
        self._folder = folder
        self._process = process
        self._activities = [ProfilerActivity.CPU]
        if backend.kind == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._step: int | None = None
        self._profile: profile | None = None
        self._profiled: Phase | None = None
        self._prefix = ""
        """Beginning of the name of its file."""
        self._ranges: dict[int, record_function] = {}
        add_listener(self)

    def begin_step(self, step: int) -> None:
        """From now on it is this step."""
        self._step = step if step in self._config.steps else None

    def end_step(self) -> None:
        """The step is over."""
        self._step = None

    def began(self, phase: Phase) -> None:
        """Begin a profile, or a range of the one under way."""
        if self._profile is None:
            if self._step is None or phase.name not in self._names:
                return
            if (started := self._start()) is not None:
                self._profile, self._profiled = started, phase
                self._prefix = f"step_{self._step:06d}-{phase.name}"
        elif self._profiled is not None and phase.thread == self._profiled.thread:
            self._ranges[id(phase)] = part = record_function(phase.name)
            part.__enter__()

    def ended(self, phase: Phase, end_ns: int) -> None:
        """End the range, or the profile."""
        if (part := self._ranges.pop(id(phase), None)) is not None:
            part.__exit__(None, None, None)
        elif phase is self._profiled and self._profile is not None:
            finished, self._profile, self._profiled = self._profile, None, None
            self._write(finished, phase.name)

    def _start(self) -> profile | None:
        """Begin a profile; None: it cannot be had, which must not end the run."""
        started = profile(
            activities=self._activities,
            record_shapes=self._config.shapes,
            profile_memory=self._config.memory,
            with_stack=self._config.stack,
        )
        try:
            started.start()
        except RuntimeError as error:
            logger.warning("no profile was begun: %s", error)
            return None
        return started

    def _write(self, finished: profile, name: str) -> None:
        try:
            finished.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(self._free_name()))
        except (OSError, RuntimeError) as error:  # likewise
            logger.warning("the profile of %s was not written: %s", name, error)

    def _free_name(self) -> Path:
        """Return where to write; a phase that comes several times in a step has a number behind its name."""
        number, suffix = 1, ""
        while (path := self._folder / f"{self._prefix}{suffix}-{self._process}.json.gz").exists():
            number += 1
            suffix = f"-{number}"
        return path


class NvtxRanges:
    """Every phase as an NVTX range, which Nsight Systems shows beside the kernels (port `PhaseListener`)."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def began(self, phase: Phase) -> None:
        """Open a range."""
        self._open.add(id(phase))
        torch.cuda.nvtx.range_push(" ".join([phase.name, *(f"{key} {value}" for key, value in phase.details.items())]))

    def ended(self, phase: Phase, end_ns: int) -> None:
        """Close it; a phase that was under way before has none."""
        if id(phase) in self._open:
            self._open.discard(id(phase))
            torch.cuda.nvtx.range_pop()


def mark_phases(backend: Backend) -> None:
    """Make NVTX ranges of the phases of a process whose phases nest; nothing on a CPU. Without a profiler that listens
    a range costs less than a microsecond."""
    if backend.kind == "cuda":
        add_listener(NvtxRanges())


def profiler_of(  # None where nothing of this process is profiled
    config: ProfileConfig, *, chosen: bool, folder: Path, process: str, backend: Backend
) -> PhaseProfiler | None:
    """Return what profiles the phases of a process, if it is one of those chosen and any step is profiled."""
    if not chosen or not config.steps:
        return None
    names = [phase.value for phase in config.phases]
    return PhaseProfiler(config, names=names, folder=folder, process=process, backend=backend)
