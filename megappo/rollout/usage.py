"""How well the engines are used: tokens that are kept, and time without work. Pure: the caller tells the time."""

from collections.abc import Collection, Iterable

from megappo.observability.metrics import Metrics, maximum, mean, minimum, total

_RETRIES, _MOVED, _RESTARTS = "perf/rollout_retries", "perf/groups_moved", "perf/engine_restarts"


class UsageMeter:
    """Adds up, between two readings, the time in which anything is generated at all."""

    def __init__(self) -> None:
        self._at = 0.0
        self._generating = False
        self._busy: frozenset[int] = frozenset()
        self._engines: frozenset[int] = frozenset()
        self._reset()

    def _reset(self) -> None:
        self._wall_s = 0.0
        self._present_s: dict[int, float] = {}
        self._busy_s: dict[int, float] = {}
        self._tokens = 0
        self._counts: dict[str, int] = {_RETRIES: 0, _MOVED: 0, _RESTARTS: 0}
        self._recoveries_s: list[float] = []

    def observe(self, now: float, *, generating: bool, engines: Iterable[int], busy: Collection[int]) -> None:
        """Note how things stand from `now` on: whether there is anything to generate, which engines take prompts, and
        which of them have some."""
        seconds = now - self._at
        if self._generating:
            self._wall_s += seconds
            for engine in self._engines:
                self._present_s[engine] = self._present_s.get(engine, 0.0) + seconds
                if engine in self._busy:
                    self._busy_s[engine] = self._busy_s.get(engine, 0.0) + seconds
        self._at, self._generating = now, generating
        self._engines, self._busy = frozenset(engines), frozenset(busy)

    def keep(self, tokens: int) -> None:
        """Note response tokens that came back, of finished groups or of those that will go on."""
        self._tokens += tokens

    def count_retries(self, groups: int) -> None:
        """Note groups that are sent again after a failure."""
        self._counts[_RETRIES] += groups

    def count_moved(self, groups: int) -> None:
        """Note groups that move to a faster engine."""
        self._counts[_MOVED] += groups

    def count_restart(self) -> None:
        """Note that an engine is started anew."""
        self._counts[_RESTARTS] += 1

    def recovered(self, seconds: float) -> None:
        """Note the time from the discovery of a failure until the engine took prompts again."""
        self._recoveries_s.append(seconds)

    def take(self, now: float) -> Metrics:
        """Return the metrics since the last reading; none if nothing was generated and nothing happened."""
        self.observe(now, generating=self._generating, engines=self._engines, busy=self._busy)
        metrics: Metrics = {name: total(number) for name, number in self._counts.items()}
        if self._wall_s > 0:
            idle = {engine: s - self._busy_s.get(engine, 0.0) for engine, s in self._present_s.items()}
            metrics["perf/goodput_tokens_per_s"] = mean(self._tokens, self._wall_s)
            metrics["perf/engine_idle_share/mean"] = mean(sum(idle.values()), sum(self._present_s.values()))
            metrics["perf/engines"] = minimum(len(self._engines))
            for engine, seconds in idle.items():
                metrics[f"perf/engine_idle_share/{engine}"] = mean(seconds, self._present_s[engine])
        if self._recoveries_s:
            metrics["timing/engine_recovery_s/max"] = maximum(max(self._recoveries_s))
        self._reset()
        return metrics
