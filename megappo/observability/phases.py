"""What this process is doing right now, by name: the one place where work is named for reports of waits, traces of a
step, profilers and NVTX ranges.

    with phase("update", mini_batch=2):
        ...

Phases nest and overlap (threads, coroutines). Entering and leaving one takes a few microseconds, so a hook may stand
around each micro-batch; nothing is kept after a phase has ended unless a listener keeps it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Detail = str | int | float


@dataclass(slots=True, eq=False)
class Phase:
    """Work under way."""

    name: str
    thread: str
    """Name of the thread that entered it."""
    start_ns: int
    """When, by `time.monotonic_ns`, which all processes of a machine share."""
    details: Mapping[str, Detail]

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return (time.monotonic_ns() - self.start_ns) * 1e-9


class PhaseListener(Protocol):
    """Hears of every phase of this process, in the thread that is in it: of its beginning, and of its end also where it
    began before the listener came. Must be quick, and must not raise."""

    def began(self, phase: Phase) -> None: ...

    def ended(self, phase: Phase, end_ns: int) -> None: ...


_under_way: dict[int, Phase] = {}
"""By the number of its `phase` object, in the order in which they began."""
_listeners: tuple[PhaseListener, ...] = ()


class phase:
    """Name the work of the body. Raises nothing of its own.

    A class rather than a generator: half the time, and none of the frames in tracebacks.
    """

    __slots__ = ("_details", "_entered", "_name")

    def __init__(self, name: str, **details: Detail) -> None:
        self._name = name
        self._details = details

    def __enter__(self) -> Phase:
        entered = Phase(self._name, threading.current_thread().name, time.monotonic_ns(), self._details)
        self._entered = entered
        _under_way[id(entered)] = entered
        for listener in _listeners:
            listener.began(entered)
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_ns = time.monotonic_ns()
        _under_way.pop(id(self._entered), None)
        for listener in reversed(_listeners):
            listener.ended(self._entered, end_ns)


def in_phase(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, not a coroutine, whose calls are a phase."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(name):
                return function(*args, **kwargs)

        return call

    return decorate


def phases_under_way() -> list[Phase]:
    """Return what this process is doing, of all its threads, the outermost first. Safe from any thread and from a
    signal handler."""
    return list(_under_way.values())


def add_listener(listener: PhaseListener) -> None:
    """Tell a listener of all phases that begin from now on."""
    global _listeners
    _listeners = (*_listeners, listener)


def remove_listener(listener: PhaseListener) -> None:
    """Tell it of nothing more."""
    global _listeners
    _listeners = tuple(one for one in _listeners if one is not listener)
