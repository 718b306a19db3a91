"""Sampling of the next step in a thread of its own, beside the training of this one."""

from concurrent.futures import Future
from dataclasses import replace
from threading import Thread

from megappo.controller.sampling import StepRollouts, StepSampler
from megappo.observability.timing import PhaseTimer
from megappo.observability.waiting import Wait


class SamplingAhead:
    """Samples one step at a time, ahead of the loop, which alone calls its methods.

    The thread is a daemon: when the loop ends early, it must not keep the process. It ends with the engines.
    """

    def __init__(self, sampler: StepSampler, *, begun: StepRollouts | None = None) -> None:
        """`begun`: the rollouts of the first step, if they were sampled in an earlier run."""
        self._sampler = sampler
        self._running: Future[StepRollouts] | None = None
        if begun is not None:
            self._running = Future[StepRollouts]()
            self._running.set_result(begun)

    def begin(self, step: int) -> None:
        """Begin to sample what `step` trains on; the rollouts of the step before have been taken."""
        assert self._running is None, "rollouts that nobody took"
        running = self._running = Future[StepRollouts]()
        Thread(target=_sample, args=(self._sampler, step, running), name=f"sample-{step}", daemon=True).start()

    def check(self) -> None:
        """Raise what sampling failed with, if it did; never waits."""
        if self._running is not None and self._running.done():
            self._running.result()

    def wait(self, timer: PhaseTimer) -> StepRollouts | None:
        """Return the rollouts that were begun, which stay to be taken, once no engine works for the loop any more; None
        where none were. Raises what sampling raised."""
        if self._running is None:
            return None
        sampling = Wait(phase="wait for rollouts", outstanding=lambda: ["the thread that samples"], limit_s=None)
        with timer.phase("wait_for_rollouts"), sampling:
            return self._running.result()

    def take(self, step: int, timer: PhaseTimer) -> StepRollouts:
        """Return the rollouts of `step`, sampled now unless they were begun; their metrics hold the time that took.
        Raises what sampling raised."""
        if self._running is None:
            self.begin(step)
        rollouts = self.wait(timer)
        assert rollouts is not None
        self._running = None
        return rollouts


def _sample(sampler: StepSampler, step: int, running: Future[StepRollouts]) -> None:
    """Body of the thread: all that can go wrong is raised in the loop."""
    timer = PhaseTimer()
    try:
        rollouts = sampler.sample(step, timer)
        running.set_result(replace(rollouts, metrics=rollouts.metrics | timer.metrics()))
    except BaseException as error:
        running.set_exception(error)
