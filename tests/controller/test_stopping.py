"""A run that is asked to end saves at its next safe point, and what goes on later is bitwise the same run."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megappo.cli.signals import StopSignals
from megappo.config.cluster import ClusterConfig
from megappo.controller.stopping import StopRequest, TimeLimit
from tests.controller.resumed_runs import CONFIGS, Started, Whole, assert_same, resuming, start


def on_call(owner: Any, method: str, call: int, action: Callable[[], None]) -> None:
    """Do something in the given call of a method, counted from 1."""
    original, calls = getattr(owner, method), 0

    def calling(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(*args, **kwargs)

    setattr(owner, method, calling)


MOMENTS: dict[str, tuple[Callable[[Started], Any], str, int]] = {
    "while engines sample": (lambda run: run.controller.parts.rollout, "generate", 6),
    "in a pass": (lambda run: run.controller.parts.actor, "compute_log_probs", 5),
    "in the update": (lambda run: run.controller.parts.actor, "update", 3),
    "in a save": (lambda run: run.controller.parts.actor, "save", 2),
    "in the hand-over": (lambda run: run.controller.parts.weight_sync, "push", 4),
    "in the validation": (lambda run: run.observer, "on_validation", 2),
    "in the first step": (lambda run: run.controller.parts.rollout, "generate", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["critic and adaptive KL", "one step off, partial"])
def test_a_run_that_is_asked_to_end_goes_on_bitwise(name: str, moment: str, whole: Whole, tmp_path: Path) -> None:
    owner, method, call = MOMENTS[moment]
    stop = StopRequest()
    run = start(CONFIGS[name](), tmp_path / "run", stop=stop)
    on_call(owner(run), method, call, lambda: stop.ask("SIGTERM"))
    assert not run.finish(), "it ended early"
    assert f"SIGTERM: ending after step {run.controller.step}" in run.output.getvalue()
    told = run.observer.last_step
    assert run.controller.step - told in (0, 1), "the step under way is the last"
    resumed = start(resuming(CONFIGS[name]()), tmp_path / "run")
    assert resumed.finish()
    assert_same(resumed, whole(name))


def test_rollouts_that_are_sampled_when_the_run_ends_are_what_it_goes_on_with(whole: Whole, tmp_path: Path) -> None:
    name, stop = "dynamic sampling", StopRequest()
    run = start(CONFIGS[name](), tmp_path / "run", stop=stop)
    sampler = run.controller.parts.step_sampler
    on_call(sampler, "sample", 4, lambda: stop.ask("SIGUSR1"))
    assert not run.finish()
    assert run.controller.step == 3, "step 4 was sampled and not learned"
    resumed = start(resuming(CONFIGS[name]()), tmp_path / "run")
    sampled: list[int] = []
    sample = resumed.controller.parts.step_sampler.sample
    resumed.controller.parts.step_sampler.sample = lambda step, timer: (sampled.append(step), sample(step, timer))[1]  # type: ignore[method-assign]
    assert resumed.finish()
    assert sampled == [5, 6], "step 4 trains on what the first process sampled"
    assert_same(resumed, whole(name))


def test_engines_make_room_before_the_save_where_devices_are_shared(tmp_path: Path) -> None:
    for shared in (True, False):
        config, stop = CONFIGS["dynamic sampling"](), StopRequest()
        if not shared:
            config.cluster = ClusterConfig(pools={"main": 1, "engines": 1}, rollout="engines")
        run = start(config, tmp_path / str(shared), stop=stop)
        on_call(run.controller.parts.step_sampler, "sample", 4, lambda stop=stop: stop.ask("SIGTERM"))
        assert not run.finish()
        calls = run.controller.parts.rollout.calls  # type: ignore[attr-defined]
        assert (calls[-1] == "sleep") == shared


def test_a_run_ends_before_its_time_is_up(whole: Whole, tmp_path: Path) -> None:
    clock = [0.0]
    config = CONFIGS["critic and adaptive KL"]()
    limit = TimeLimit(1000.0, now=lambda: clock[0])
    run = start(config, tmp_path / "run", time_limit=limit)

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    # Starting takes 100 s and a step 200 s: at 300, 500 and 700 s; the next step would be done, but not saved.
    pass_time(100.0)
    actor = run.controller.parts.actor
    for call in range(1, 7):
        on_call(actor, "update", call, lambda: pass_time(200.0))
    run.controller.prepare()
    limit.note_save(150.0)
    assert not run.controller.fit()
    assert run.controller.step == 3 and clock[0] == 700.0
    assert "checkpoint.save_before_deadline: ending after step 3" in run.output.getvalue()
    resumed = start(resuming(config), tmp_path / "run")
    assert resumed.finish()
    assert_same(resumed, whole("critic and adaptive KL"))


@pytest.mark.parametrize(
    ("limit_s", "saves", "expected"),
    [(None, [], False), (100.0, [], False), (59.0, [], True), (61.0, [1.0], False), (40.0, [1.0], True)],
)
def test_the_longest_step_and_save_decide(limit_s: float | None, saves: list[float], expected: bool) -> None:
    clock = [0.0]
    limit = TimeLimit(limit_s, now=lambda: clock[0])
    clock[0] = 10.0
    limit.begin_steps()
    for seconds in (20.0, 5.0):
        clock[0] += seconds
        limit.end_step()
    for seconds in saves:
        limit.note_save(seconds)
    # 35 s so far, the longest step 20 s; an unknown save counts 20 s: 75 s, or 56 s.
    assert limit.is_up is expected


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the signal handlers back."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two instructions


def test_signals_ask_once_and_interrupt_the_second_time(handlers: None) -> None:
    stop = StopRequest()
    signals = StopSignals(stop, grace_s=30.0)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        send(signal.SIGTERM)  # before the loop runs there is nothing to save
    signals.begin_loop()
    send(signal.SIGUSR1)
    assert stop.reason == "SIGUSR1" and signals.asked_by_scheduler
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        send(signal.SIGTERM)
    signals.end_loop()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_signal_that_is_sent_and_passed_on_is_one(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    signals = StopSignals(stop, grace_s=30.0)
    signals.begin_loop()
    for _ in range(3):
        send(signal.SIGUSR1)
    assert stop.reason == "SIGUSR1"
    monkeypatch.setattr("megappo.cli.signals._SAME_S", 0.0)
    with pytest.raises(KeyboardInterrupt, match="SIGUSR1"):
        send(signal.SIGUSR1)


def test_a_run_without_checkpoints_ends_at_once(handlers: None) -> None:
    signals = StopSignals(StopRequest(), grace_s=0.0)
    signals.begin_loop()
    with pytest.raises(KeyboardInterrupt, match="SIGUSR1"):
        send(signal.SIGUSR1)


def test_a_hop_that_is_not_done_in_time_is_left_without_a_save(handlers: None, tmp_path: Path) -> None:
    stop = StopRequest()
    signals = StopSignals(stop, grace_s=0.05)
    run = start(CONFIGS["dynamic sampling"](), tmp_path / "run", stop=stop)

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    on_call(run.controller.parts.actor, "update", 4, hang)
    run.controller.prepare()
    signals.begin_loop()
    with pytest.raises(KeyboardInterrupt, match=r"no safe point within checkpoint.on_signal_s=0.05"):
        run.controller.fit()
    assert run.observer.checkpoint == tmp_path / "run" / "checkpoints" / "step_000002"
    assert run.observer.saved.endswith("step_000002")
