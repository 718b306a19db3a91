"""The hand-over of weights to all engines, repeated after failures, and to one engine that was started anew."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megappo.cluster.groups import ActorGroup
from megappo.cluster.hand_over import AttemptFailed, HandOver
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.runtime import gather
from megappo.cluster.weight_calls import EngineCall, Failure, settle
from megappo.config.rollout import VerifyMode
from megappo.config.run import RunConfig
from megappo.device.backend import Backend
from megappo.observability.logging import get_logger
from megappo.observability.metrics import Metrics, maximum, total
from megappo.observability.waiting import Wait
from megappo.weight_sync.disk import versions_folder
from megappo.weight_sync.source import comparable, uncompared
from megappo.weights.checksums import HeldTensor, choose_held

logger = get_logger(__name__)

_SAMPLED_TENSORS = 4
"""Tensors compared at a hand-over with weight_sync.verify=sampled."""


class RayWeightSync:
    """Pushes the actor's weights to all engines (port: WeightSync). May be called from several threads."""

    def __init__(
        self, config: RunConfig, *, actor: ActorGroup, rollout: RolloutPool, backend: Backend, run_folder: Path
    ) -> None:
        """Plan the hand-over. `run_folder` takes the files of a transport that writes some, if none is configured."""
        settings = config.weight_sync
        self._settings = settings
        self._health_timeout_s = config.rollout.recovery.hang_timeout_s
        self._actor = actor
        self._rollout = rollout
        folder = versions_folder(settings.folder, run_name=config.run.name, run_folder=run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._hand_over = HandOver(config, actor=actor, rollout=rollout, backend=backend, folder=folder)
        # Engines of a run are alike.
        call = rollout.call(rollout.in_service()[0], "held_tensors")
        held: list[HeldTensor] = gather(
            [call], phase="weight hand-over", timeout_s=settings.timeout_s, key="weight_sync.timeout_s"
        )[0]
        sent = self._hand_over.sent_names()
        self._held = comparable(held, sent)
        self.uncompared = [] if settings.verify is VerifyMode.none else uncompared(self._held, sent)
        """Tensors that no checksum guards."""
        self._lock = threading.Lock()
        self._holder = ""
        """What the lock was last taken for."""
        self._version = -1
        self._sent: dict[str, str] = {}
        """Checksums compared at the last push."""
        self._updates_at_push = 0

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Wait for the trainer, and keep it. Whoever has it is in waits of its own, each with a limit."""
        with Wait(phase=f"trainer, for {what}", outstanding=lambda: [self._holder], limit_s=None):
            self._lock.acquire()
        self._holder = what
        try:
            yield
        finally:
            self._lock.release()

    def push(self, version: int) -> Metrics:
        """Hand over all weights as `version`; every engine in service then answers with it.

        A failed attempt is repeated `weight_sync.retries` times, comparing all tensors; an engine that then still
        fails, or whose process is gone, is taken out of service, and the others get theirs.

        Raises:
            EngineError: no engine is left.
            WorkerError: the trainer's side failed.
        """
        with self._alone("weight hand-over"):
            start = time.perf_counter()
            self._version, self._updates_at_push = version, self._actor.num_updates
            failed = self._try_until_done(version)
            seconds = time.perf_counter() - start
        return {
            "weights/version": maximum(version),
            "weights/bytes": total(self._hand_over.num_bytes),
            "perf/weight_sync_verified_tensors": total(len(self._sent)),
            "perf/weight_sync_failed_attempts": total(failed),
            "perf/weight_sync_bytes_per_s": total(self._hand_over.num_bytes / seconds),
        }

    def _try_until_done(self, version: int) -> int:
        """Try with all engines in service until it succeeds, and admit them. Returns the number of failed attempts."""
        failed = with_these = 0
        tried: dict[int, int] = {}
        while True:
            if not (lives := self._rollout.lives()):
                self._rollout.revive()
                continue
            if lives != tried:  # what others could not do says nothing of these
                tried, with_these = lives, 0
            try:
                self._sent = self._hand_over.attempt(lives, version, self._wanted(version, after_failure=failed > 0))
            except AttemptFailed as attempt:
                failed, with_these = failed + 1, with_these + 1
                logger.warning("attempt %d at weight hand-over %d failed: %s", failed, version, attempt)
                self._judge(attempt, last=with_these > self._settings.retries)
            else:
                self._rollout.admit(lives)
                return failed

    def _judge(self, attempt: AttemptFailed, *, last: bool) -> None:
        """Take the engines out of service that are to blame and do not answer any more, or are to blame once too often.
        Raises the error where it is the trainer's."""
        blamed = [failure for failure in attempt.causes if failure.engine is not None]
        if (last and not blamed) or any(failure.severity == 0 for failure in attempt.causes if failure.engine is None):
            raise attempt.causes[0].error
        # An engine that is gone must not be waited for once more: the trainer would wait in the group, too. Where some
        # answer, those that do not kept them waiting.
        silent = self._silent(blamed)
        for failure in silent or (blamed if last else []):
            assert failure.engine is not None
            self._rollout.quarantine(failure.engine, str(failure.error), life=failure.life)

    def _silent(self, blamed: list[Failure]) -> list[Failure]:
        """Return the failures of engines that do not answer now."""
        calls = [
            EngineCall(engine=failure.engine, life=failure.life, call=self._rollout.call(failure.engine, "health"))
            for failure in blamed
            if failure.engine is not None
        ]
        _, unwell = settle([], calls, phase="health check", timeout_s=self._health_timeout_s)
        silent = {failure.engine for failure in unwell}
        return [failure for failure in blamed if failure.engine in silent]

    def _wanted(self, version: int, *, after_failure: bool) -> list[HeldTensor]:
        """Return the tensors to compare: after a failure all of them, since engines were left with some of each."""
        if self._settings.verify is VerifyMode.full or after_failure:
            return self._held
        return choose_held(self._held, version, _SAMPLED_TENSORS if self._settings.verify is VerifyMode.sampled else 0)

    @contextmanager
    def training(self) -> Iterator[None]:
        """While it is open, the trainer computes: a hand-over to a restarted engine waits, since the calls of the two
        would reach the ranks in different orders, and half-trained weights are no version."""
        with self._alone("training"):
            yield

    def restore(self, engine: int, still_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Give one engine the weights of the last push, or the newer ones of the trainer where none are stored.

        Args:
            still_wanted: asked once the trainer is free, which may take as long as a step.

        Returns:
            Whether it has them; False where they were not wanted any more.

        Raises:
            EngineError: the engine failed.
            WorkerError: the trainer's side failed.
        """
        with self._alone(f"weights of engine {engine}"):
            if not still_wanted():
                return False
            lives = {engine: self._rollout.life(engine)}
            # A loop that samples beside training comes here after the update and before its push.
            version = self._version + int(self._actor.num_updates != self._updates_at_push)
            try:
                if not self._hand_over.load_kept(lives, self._version, self._sent):
                    self._hand_over.attempt(lives, version, self._wanted(version, after_failure=False))
            except AttemptFailed as attempt:
                raise attempt.causes[0].error from None
            return True
