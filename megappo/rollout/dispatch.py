"""Which engine answers which prompt: a central queue, and only as much at an engine as it can run.

Invariants: a group is at one place (queue or one engine) until it is finished; an engine that runs sequences beside
each other never holds more than it runs at once and a little; all samples of a prompt go to one engine, and so do
other draws of it and what goes on later, unless that engine falls behind. Pure: the caller tells what happens, and
the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_SLACK = 1.25
"""What an engine may hold, over what it runs at once: its own queue must not run dry while a group travels."""
_PREFILL = 0.1
"""Work of a prompt token, over that of a response token: prompts are read in parallel."""
_AFFINITY = 1.2
"""How much later than at the best engine a group may be done for the sake of the engine that knows its prompt."""
_SETTLED_S = 2.0
"""Groups that an engine has had for less do not move: to abort them and read them elsewhere costs time, too."""
_NEW = 0.1
"""Weight of a new observation of speed in its running mean; of a length a tenth of it, since lengths differ more."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """One group to be sampled."""

    key: int
    batch: int
    """Groups of different batches (other sampling) never share a call."""
    prompt: int
    """Equal for equal prompts, which share an engine's prefix cache."""
    num_samples: int
    prompt_tokens: int
    max_new_tokens: int
    """Of one sample, what is begun included."""
    begun_tokens: int = 0
    """Response tokens of all samples that are there already."""
    home: int | None = None
    """The engine that began it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """What became of a group at its engine."""

    new_tokens: int
    """Response tokens sampled in this call, of all samples."""
    longest_new: int
    """The same of the sample that got most."""
    finished: bool


@dataclass(slots=True)
class _Held:
    work: Work
    estimate: float
    since: float


@dataclass(kw_only=True, slots=True)
class _Engine:
    """An engine and what it holds; `take` and `give` keep the sums, which every group that is dealt out asks of every
    engine."""

    at_once: int | None
    held: dict[int, _Held] = field(default_factory=dict[int, _Held])
    sequences: int = 0
    """Samples that it holds."""
    load: float = 0.0
    """Estimated tokens that it holds."""
    suspended: bool = False
    speed: float | None = None
    """Tokens per second of one sequence; None before the first is known."""

    def take(self, work: Work, estimate: float, now: float) -> None:
        """Hold a group."""
        self.held[work.key] = _Held(work=work, estimate=estimate, since=now)
        self.sequences += work.num_samples
        self.load += estimate

    def give(self, key: int) -> _Held | None:
        """Hold a group no longer; returns it, if it was held."""
        if (gone := self.held.pop(key, None)) is not None:
            self.sequences -= gone.work.num_samples
            # An empty engine has no load, whatever the sums have rounded off.
            self.load = self.load - gone.estimate if self.held else 0.0
        return gone

    def has_room(self, work: Work, running: float) -> bool:
        """Whether it may take a group, of whose samples the share `running` runs at a time. One group always fits into
        an empty engine."""
        if self.at_once is None or not self.held:
            return not self.held
        return running * (self.sequences + work.num_samples) <= self.at_once * _SLACK


class Dispatcher:
    """The queue, what every engine holds, and how fast each is."""

    def __init__(self, *, slow_factor: float) -> None:
        """See `RecoveryConfig.slow_factor`."""
        self._slow_factor = slow_factor
        self._engines: dict[int, _Engine] = {}
        self._queue: list[Work] = []
        self._response_tokens: float | None = None
        """Mean length of a response; None before the first."""
        self._running = 1.0
        """Mean length of a response over the longest of its group: the share of a group's samples that runs, on
        average, until the group is finished."""
        self._homes: dict[int, int] = {}

    def add_engine(self, engine: int, *, at_once: int | None) -> None:
        """Let an engine take groups; `at_once` as in `RolloutEngine.at_once`."""
        self._engines[engine] = _Engine(at_once=at_once)

    def remove_engine(self, engine: int) -> list[Work]:
        """Take an engine out; what it held is back at the head of the queue, and returned."""
        gone = self._engines.pop(engine, None)
        lost = [] if gone is None else [held.work for held in gone.held.values()]
        self._queue[:0] = lost
        self._homes = {prompt: home for prompt, home in self._homes.items() if home != engine}
        return lost

    def suspend(self, engine: int) -> int:
        """Give an engine nothing until `resume`; returns how many groups it holds."""
        self._engines[engine].suspended = True
        return len(self._engines[engine].held)

    def resume(self, engine: int) -> None:
        """Let a suspended engine take groups again, if it is still there."""
        if engine in self._engines:
            self._engines[engine].suspended = False

    def give_back(self, engine: int, keys: Sequence[int]) -> None:
        """Put groups that an engine did not do back at the head of the queue."""
        given = [self._engines[engine].give(key) for key in keys]
        self._queue[:0] = [held.work for held in given if held is not None]

    def holds(self, engine: int) -> bool:
        """Whether an engine has groups."""
        return engine in self._engines and bool(self._engines[engine].held)

    def held_by(self, engine: int) -> list[tuple[Work, float]]:
        """Return the groups that an engine has, and since when; from any thread."""
        known = self._engines.get(engine)
        return [] if known is None else [(held.work, held.since) for held in list(known.held.values())]

    def engines_with(self, batch: int) -> list[int]:
        """Return the engines that hold groups of a batch."""
        return [
            index
            for index, engine in self._engines.items()
            if any(held.work.batch == batch for held in engine.held.values())
        ]

    def add(self, work: Sequence[Work]) -> None:
        """Queue groups. What is begun comes first, most tokens first: it is the tail of what is long."""
        begun = sorted((item for item in work if item.begun_tokens), key=lambda item: -item.begun_tokens)
        self._queue[:0] = begun
        self._queue += [item for item in work if not item.begun_tokens]

    def cancel(self, batch: int) -> list[Work]:
        """Take what is queued of a batch out of the queue, and return it."""
        cancelled = [work for work in self._queue if work.batch == batch]
        self._queue = [work for work in self._queue if work.batch != batch]
        return cancelled

    def assign(self, now: float) -> list[tuple[int, list[Work]]]:
        """Deal out what engines may take now; returns (engine, groups of one call).

        A group goes where it would be done first, counting what waits before it; where that engine has no room, it
        waits for it unless another one is done as soon.
        """
        calls: list[tuple[int, list[Work]]] = []
        open_calls: dict[int, list[Work]] = {}
        """Calls of this round to engines that work batch by batch."""
        ahead = {index: engine.load for index, engine in self._engines.items()}
        left: list[Work] = []
        free: list[int] = []
        """Engines that may take a group like the last one: which those are changes only where one is taken."""
        asked: tuple[int, int] | None = None
        for position, work in enumerate(self._queue):
            if asked != (work.num_samples, work.batch):
                asked = (work.num_samples, work.batch)
                free = [index for index in self._engines if self._may_take(index, work, open_calls)]
            if not free:
                left += self._queue[position:]
                break
            estimate = self._estimate(work)
            chosen = self._choose(work, estimate, ahead)
            ahead[chosen] += estimate
            if chosen not in free:
                left.append(work)
                continue
            engine = self._engines[chosen]
            engine.take(work, estimate, now)
            self._homes[work.prompt] = chosen
            if engine.at_once is not None:
                calls.append((chosen, [work]))
            elif chosen in open_calls:
                open_calls[chosen].append(work)
            else:
                open_calls[chosen] = [work]
                calls.append((chosen, open_calls[chosen]))
            if not self._may_take(chosen, work, open_calls):
                free.remove(chosen)
        self._queue = left
        return calls

    def _may_take(self, index: int, work: Work, open_calls: dict[int, list[Work]]) -> bool:
        engine = self._engines[index]
        if engine.suspended:
            return False
        if index in open_calls:
            return open_calls[index][0].batch == work.batch
        return engine.has_room(work, self._running)

    def _choose(self, work: Work, estimate: float, ahead: dict[int, float]) -> int:
        typical = self._typical_speed()
        done = {
            index: (ahead[index] + estimate) / (engine.speed or typical)
            for index, engine in self._engines.items()
            if not engine.suspended
        }
        _, best = min(zip(done.values(), done))
        home = work.home if work.home in done else self._homes.get(work.prompt)
        return home if home in done and done[home] <= done[best] * _AFFINITY else best

    def _estimate(self, work: Work) -> float:
        """Return the work that a group is expected to be, in response tokens."""
        begun = work.begun_tokens / work.num_samples
        expected = work.max_new_tokens / 2 if self._response_tokens is None else self._response_tokens
        # What is longer than the mean already may be far from its end.
        left = min(max(expected - begun, expected / 2), work.max_new_tokens - begun)
        return work.num_samples * max(left, 1.0) + _PREFILL * (work.prompt_tokens + work.begun_tokens)

    def _speed(self, index: int) -> float:
        """Return an engine's speed; one that is not known yet counts as the mean of the others."""
        return self._engines[index].speed or self._typical_speed()

    def _typical_speed(self) -> float:
        known = [engine.speed for engine in self._engines.values() if engine.speed is not None]
        return sum(known) / len(known) if known else 1.0

    def returned(self, engine: int, key: int, progress: Progress, now: float) -> Work | None:
        """Note that an engine gave a group back, finished or aborted. Returns the group, None where it did not hold it
        (then it is queued or at another engine, and this is a duplicate)."""
        place = self._engines.get(engine)
        held = None if place is None else place.give(key)
        if place is None or held is None:
            return None
        if progress.longest_new and now > held.since:
            seen = progress.longest_new / (now - held.since)
            place.speed = seen if place.speed is None else place.speed + _NEW * (seen - place.speed)
        if progress.finished:
            mean = (held.work.begun_tokens + progress.new_tokens) / held.work.num_samples
            known = mean if self._response_tokens is None else self._response_tokens
            self._response_tokens = known + _NEW / 10 * (mean - known)
            if progress.longest_new:
                running = progress.new_tokens / (progress.longest_new * held.work.num_samples)
                self._running += _NEW * (running - self._running)
        return held.work

    def behind(self, now: float) -> list[int]:
        """Return the engines whose groups should move, since nothing waits and a much faster one has nothing to do."""
        usable = {index: engine for index, engine in self._engines.items() if not engine.suspended}
        idle = [self._speed(index) for index, engine in usable.items() if not engine.held]
        if self._queue or not idle:
            return []
        slow: list[int] = []
        for index, engine in usable.items():
            held_s = [now - held.since for held in engine.held.values()]
            if not held_s or max(held_s) < _SETTLED_S:
                continue
            # It is no faster than this: the longest sample it can have would be finished by now.
            bound = min(held.work.max_new_tokens for held in engine.held.values()) / max(held_s)
            speed = min(self._speed(index), bound)
            if speed < max(idle) / self._slow_factor:
                engine.speed = speed
                slow.append(index)
        return slow
