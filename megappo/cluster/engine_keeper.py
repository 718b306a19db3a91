"""One rollout engine as the driver sees it: its process, its state, its restarts. Another process after every failure:
what hangs or is half-way through a hand-over is never used again."""

import time
from enum import Enum
from pathlib import Path
from typing import Any

import ray

from megappo.cluster.placement import Slot
from megappo.cluster.rollout_host import HostSpec, RolloutHost
from megappo.cluster.runtime import Call, describe_failure
from megappo.config.cluster import DeviceKind
from megappo.config.run import RunConfig
from megappo.errors import MegappoError

_FORGIVEN_S = 3600.0
"""Restarts longer ago do not count against `max_restarts`."""


class EngineState(Enum):
    """What an engine may be used for."""

    starting = "starting"
    """Not for anything yet."""
    fresh = "fresh"
    """It answers, and waits for the weights of the last hand-over."""
    fetching = "fetching"
    """It is being given them, apart from the other engines."""
    serving = "serving"
    """It takes prompts."""
    down = "down"
    """It failed and is to be started anew."""
    lost = "lost"
    """It failed too often."""


IN_SERVICE = (EngineState.fresh, EngineState.fetching, EngineState.serving)
"""States in which an engine takes part in a hand-over."""


class EngineKeeper:
    """Starts, names and kills the processes of one engine; who decides about its state is `cluster.recovery`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        index: int,
        slot: Slot,
        visible_devices: list[str],
        device: DeviceKind,
        log_dir: Path,
    ) -> None:
        self.index = index
        self.state = EngineState.starting
        self.life = 0
        """Number of its process: what an earlier one answers is not heard."""
        self.at_once: int | None = None
        """As `RolloutEngine.at_once`."""
        self.place = ""
        self.well_at: float | None = None
        """When, by `time.monotonic`, its process last said that it is well."""
        self._config = config
        self._slot = slot
        self._visible_devices = visible_devices
        self._device = device
        self._log_dir = log_dir
        self._restarts: list[float] = []
        """Times of the last restarts."""
        self.launch()

    def launch(self) -> None:
        """Begin a new process, with log files of its own."""
        suffix = f"-restart-{self.life}" if self.life else ""
        engine_log = self._log_dir / f"engine-{self.index}{suffix}.log"
        spec = HostSpec(
            index=self.index,
            log_path=self._log_dir / f"rollout-{self.index}{suffix}.log",
            engine_log_path=engine_log,
            device=self._device,
            visible_devices=self._visible_devices,
        )
        self.state = EngineState.starting
        self.well_at = None
        self.log_paths: tuple[Path, ...] = (engine_log, spec.log_path)
        # Any: Ray's handle hides the methods of RolloutHost.
        self.host: Any = ray.remote(RolloutHost).options(**self._slot.options()).remote(spec, self._config)

    @property
    def name(self) -> str:
        """Number and place, for messages."""
        return f"rollout engine {self.index} ({self.place or 'starting'})"

    @property
    def in_service(self) -> bool:
        """Whether it takes part in a hand-over."""
        return self.state in IN_SERVICE

    def call(self, method: str, *args: Any, **kwargs: Any) -> Call:
        """Start a method of its host."""
        ref = getattr(self.host, method).remote(*args, **kwargs)
        return Call(ref=ref, worker=self.name, log_paths=self.log_paths)

    def failure(self, error: Exception, phase: str) -> MegappoError:
        """Return the error that names the engine, the phase and the cause."""
        return describe_failure(error, call=Call(ref=None, worker=self.name, log_paths=self.log_paths), phase=phase)

    def kill(self) -> None:
        """End its process at once; an engine in a process of its own ends with it, even one that is stopped."""
        self.life += 1
        self.state = EngineState.down
        ray.kill(self.host)

    def count_restart(self) -> int | None:
        """Note that it is about to be restarted. Returns the number of restarts within an hour, this one included; None
        where it may not be restarted once more."""
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < _FORGIVEN_S]
        if len(self._restarts) >= self._config.rollout.recovery.max_restarts:
            return None
        self._restarts.append(now)
        return len(self._restarts)
