"""The rollout pool over scripted engines in real processes: what comes back, once and whole, whatever engines do."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megappo.cluster import recovery
from megappo.config.cluster import ClusterConfig
from megappo.config.rollout import RecoveryConfig, RolloutConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, FinishedGroup
from megappo.errors import EngineError, RequestError, WorkerError
from megappo.observability.metrics import values
from megappo.rollout.usage import UsageMeter
from tests.cluster.conftest import SAMPLING, Engines, Start


def expected(wanted: Sequence[Draw]) -> dict[int, list[int]]:
    """Responses by sequence id."""
    return {
        sequence_id: [(draw.prompt.tokens[0] + position) % 50 for position in range(min(draw.prompt.tokens[1], 20))]
        for draw in wanted
        for sequence_id in draw.sequence_ids
    }


def ids_of(groups: Sequence[FinishedGroup]) -> list[int]:
    return [info.sequence_id for group in groups for info in group.sequences]


def check_all_once(engines: Engines, wanted: Sequence[Draw], groups: Sequence[FinishedGroup]) -> None:
    """Every sequence was told of once, and packs once, with the tokens that its prompt asks for."""
    ids = ids_of(groups)
    assert sorted(ids) == sorted(expected(wanted))
    assert engines.tokens_of(ids) == expected(wanted)


def generate_with_fault(engines: Engines, wanted: Sequence[Draw], engine: int, fault: str) -> list[FinishedGroup]:
    """Generate; once the first group is back the engine gets a fault."""
    groups: list[FinishedGroup] = []
    for group in engines.pool.generate(wanted, SAMPLING, seed=0):
        if not groups:
            engines.fault(engine, fault)
        groups.append(group)
    return groups


def check_recovery(engines: Engines, fault: str) -> None:
    """Let engine 0 fail while it generates; everything is answered, it comes back, and both facts are told."""
    count = len(engines.pool.in_service())
    engines.hand_over(engines.version + 1)
    # An engine that is well is blamed for several failures only, for which there must be prompts left.
    before, wanted = engines.pid(0), engines.draws([20] * (60 if fault == "errors" else 12))
    groups = generate_with_fault(engines, wanted, 0, fault)
    check_all_once(engines, wanted, groups)
    deadline = time.monotonic() + 60
    while engines.pid(0) == before:
        assert time.monotonic() < deadline, engines.lines
        time.sleep(0.1)
    engines.wait_for_all(count)
    more = engines.draws([5] * 8)
    again = list(engines.pool.generate(more, SAMPLING, seed=0))
    check_all_once(engines, more, again)
    # Whoever answered held the weights of the last hand-over.
    assert {info.policy_version for group in groups + again for info in group.sequences} == {engines.version}
    metrics = values(engines.pool.take_metrics())
    assert metrics["perf/engine_restarts"] == 1 and metrics["perf/rollout_retries"] >= 1
    assert metrics["timing/engine_recovery_s/max"] > 0
    failed, back = engines.lines
    assert failed.startswith("rollout engine 0 (pid") and "; restart " in failed and "\n" not in failed
    assert "takes prompts again" in back


FAULTS = [
    "die",
    "hang",
    pytest.param("deaf", marks=pytest.mark.slow),
    pytest.param("errors", marks=pytest.mark.slow),
]


def test_all_groups_come_back_once_with_the_use_of_the_engines(pair: Engines) -> None:
    wanted = pair.draws([12] * 24)
    check_all_once(pair, wanted, list(pair.pool.generate(wanted, SAMPLING, seed=0)))
    metrics = values(pair.pool.take_metrics())
    assert metrics["perf/goodput_tokens_per_s"] > 0
    assert metrics["perf/engines"] == 2
    assert 0 <= metrics["perf/engine_idle_share/0"] < 1 and 0 <= metrics["perf/engine_idle_share/1"] < 1
    assert metrics["perf/rollout_retries"] == metrics["perf/engine_restarts"] == 0
    assert pair.lines == []


def test_what_is_stopped_early_goes_on_where_it_was_and_nothing_is_lost(pair: Engines) -> None:
    pair.hand_over(pair.version + 1)
    wanted = pair.draws([2, 2, 20, 20])
    first = list(pair.pool.generate(wanted, SAMPLING, seed=0, wanted=2))
    done = {group.sequences[0].group_id for group in first}
    assert {wanted[0].group_id, wanted[1].group_id} <= done and len(first) < 4
    pair.hand_over(pair.version + 1)
    rest = [draw for draw in wanted if draw.group_id not in done]
    second = list(pair.pool.generate(rest, SAMPLING, seed=1))
    # The tokens go on counting where they stopped, within the same budget, begun by the older weights.
    check_all_once(pair, wanted, first + second)
    assert {info.policy_version for group in second for info in group.sequences} == {pair.version - 1}


def test_what_was_read_goes_on_in_another_pool_as_if_it_had_been_sampled_there(pair: Engines) -> None:
    pair.hand_over(pair.version + 1)
    wanted = pair.draws([2, 2, 20, 20])
    first = list(pair.pool.generate(wanted, SAMPLING, seed=0, wanted=2))
    done = ids_of(first)
    held = pair.pool.read([sequence_id for draw in wanted for sequence_id in draw.sequence_ids])
    assert sorted(held.complete.sequence_ids.tolist()) == sorted(done)
    pair.pool.pack([], forget=[sequence_id for draw in wanted for sequence_id in draw.sequence_ids])
    assert pair.pool.read(done).complete.num_sequences == 0, "as in a pool that is new"
    pair.pool.adopt(held)
    again = pair.pool.read([sequence_id for draw in wanted for sequence_id in draw.sequence_ids])
    for mine, theirs in ((again.complete, held.complete), (again.begun, held.begun)):
        for name in type(theirs).__dataclass_fields__:
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    pair.hand_over(pair.version + 1)
    rest = [draw for draw in wanted if draw.group_id not in {group.sequences[0].group_id for group in first}]
    second = list(pair.pool.generate(rest, SAMPLING, seed=1))
    check_all_once(pair, wanted, first + second)
    begun = set(held.begun.sequence_ids.tolist())
    versions = {info.policy_version for group in second for info in group.sequences if info.sequence_id in begun}
    assert begun and versions == {pair.version - 1}


def test_two_threads_generate_at_once_and_each_gets_its_own(pair: Engines) -> None:
    train, validation = pair.draws([15] * 12), pair.draws([5] * 12)
    found: dict[str, list[FinishedGroup]] = {}

    def generate(name: str, wanted: list[Draw], limit: int | None) -> None:
        found[name] = list(pair.pool.generate(wanted, SAMPLING, seed=0, wanted=limit))

    threads = [
        threading.Thread(target=generate, args=("train", train, None)),
        threading.Thread(target=generate, args=("validation", validation, 6)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check_all_once(pair, train, found["train"])
    assert len(found["validation"]) >= 6
    assert set(ids_of(found["validation"])) <= set(expected(validation))


def test_a_refused_prompt_ends_the_call_and_blames_no_engine(pair: Engines) -> None:
    with pytest.raises(RequestError, match="a prompt begins with 99"):
        list(pair.pool.generate([*pair.draws([5] * 4), *pair.draws([5], start=99)], SAMPLING, seed=0))
    wanted = pair.draws([5] * 4)
    check_all_once(pair, wanted, list(pair.pool.generate(wanted, SAMPLING, seed=0)))
    metrics = values(pair.pool.take_metrics())
    assert metrics["perf/engine_restarts"] == metrics["perf/rollout_retries"] == 0
    assert pair.lines == []


def test_a_prompt_that_fails_everywhere_ends_the_call_by_its_row_and_restarts_no_engine(pair: Engines) -> None:
    poison = pair.draws([5], start=98)
    row = poison[0].prompt.row
    with pytest.raises(EngineError, match=rf"^data row {row} cannot be answered: 3 calls in a row failed at engines"):
        list(pair.pool.generate([*pair.draws([5] * 4), *poison], SAMPLING, seed=0))
    wanted = pair.draws([5] * 4)
    check_all_once(pair, wanted, list(pair.pool.generate(wanted, SAMPLING, seed=0)))
    metrics = values(pair.pool.take_metrics())
    assert metrics["perf/engine_restarts"] == 0 and metrics["perf/rollout_retries"] >= 3


def test_a_call_that_fails_while_its_job_stops_does_not_keep_it_open(pair: Engines) -> None:
    stream = pair.pool.generate(pair.draws([2, 20, 20, 20]), SAMPLING, seed=0)
    next(stream)
    for engine in range(2):
        pair.fault(engine, "errors")
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(60)
    for engine in range(2):
        pair.fault(engine, "")
    assert not closing.is_alive()


def test_a_failure_of_the_trainer_is_not_blamed_on_the_engine_that_it_should_restore(pair: Engines) -> None:
    def fail(engine: int, still_wanted: Callable[[], bool]) -> bool:
        raise WorkerError(f"actor rank 0 failed in the hand-over to {engine}")

    pair.pool.restore_with(fail)
    pair.pool.quarantine(0, "tired", life=pair.pool.life(0))
    pair.wait_for_all(2)
    with pytest.raises(WorkerError, match="actor rank 0 failed in the hand-over to 0"):
        list(pair.pool.generate(pair.draws([20] * 8), SAMPLING, seed=0))
    pair.pool.restore_with(pair.restore)
    wanted = pair.draws([5] * 8)
    check_all_once(pair, wanted, list(pair.pool.generate(wanted, SAMPLING, seed=0)))
    assert values(pair.pool.take_metrics())["perf/engine_restarts"] == 1


@pytest.mark.slow
def test_the_others_go_on_while_a_restarted_engine_waits_for_its_weights(pair: Engines) -> None:
    free = threading.Event()  # as the trainer is, between its steps

    def restore(engine: int, still_wanted: Callable[[], bool]) -> bool:
        free.wait(60)
        return pair.restore(engine, still_wanted)

    def generate(wanted: list[Draw], fault: str) -> None:
        found = generate_with_fault(pair, wanted, 0, fault) if fault else pair.pool.generate(wanted, SAMPLING, seed=0)
        groups.extend(found)

    pair.pool.restore_with(restore)
    wanted, groups = pair.draws([20] * 12), list[FinishedGroup]()
    for part, fault in ((wanted[:8], "die"), (wanted[8:], "")):
        thread = threading.Thread(target=generate, args=(part, fault), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "it waited for the engine"
        pair.wait_for_all(2)
    pair.pool.restore_with(pair.restore)
    free.set()
    check_all_once(pair, wanted, groups)
    assert "takes prompts again" not in "".join(pair.lines)
    list(pair.pool.generate(pair.draws([20] * 8), SAMPLING, seed=0))
    assert "takes prompts again" in pair.lines[-1]


@pytest.mark.slow
def test_what_one_process_of_an_engine_did_is_not_ascribed_to_the_next(pair: Engines) -> None:
    life = pair.pool.life(0)
    pair.pool.quarantine(0, "tired", life=life)
    pair.wait_for_all(2)
    pair.pool.quarantine(0, "tired", life=life)
    pair.pool.admit({0: life})  # it got the weights, and it is gone
    assert pair.pool.lives()[0] == life + 1
    (line,) = pair.lines
    assert "tired; restart" in line


def test_a_reader_that_stops_reading_leaves_the_engines_free(pair: Engines) -> None:
    wanted = pair.draws([2, 20, 20, 20])
    stream = pair.pool.generate(wanted, SAMPLING, seed=0)
    first = next(stream)
    stream.close()
    rest = [draw for draw in wanted if draw.group_id != first.sequences[0].group_id]
    check_all_once(pair, wanted, [first, *pair.pool.generate(rest, SAMPLING, seed=0)])


@pytest.mark.parametrize("fault", FAULTS)
def test_prompts_of_a_failed_engine_go_on_at_the_other_and_it_comes_back(pair: Engines, fault: str) -> None:
    check_recovery(pair, fault)


def test_prompts_move_away_from_an_engine_that_turned_slow(pair: Engines) -> None:
    wanted = pair.draws([20] * 24)
    groups = generate_with_fault(pair, wanted, 1, "slow")
    pair.fault(1, "")
    check_all_once(pair, wanted, groups)
    metrics = values(pair.pool.take_metrics())
    assert metrics["perf/groups_moved"] >= 1 and metrics["perf/engine_restarts"] == 0


def test_what_is_finished_outlives_the_engine_that_sampled_it(pair: Engines) -> None:
    wanted = pair.draws([10] * 8)
    groups = list(pair.pool.generate(wanted, SAMPLING, seed=0))
    os.kill(pair.pid(0), signal.SIGKILL)
    check_all_once(pair, wanted, groups)


def test_engines_sleep_and_wake_in_the_order_of_a_step(pair: Engines) -> None:
    pair.pool.sleep()
    pair.pool.wake_weights()
    pair.hand_over(pair.version + 1)
    pair.pool.wake_cache()
    logs = sorted(pair.folder.glob("engine-1*.log"), key=lambda path: path.stat().st_mtime)
    assert logs[-1].read_text().split()[-3:] == ["sleep", "wake_weights", "wake_cache"]


def memory_calls(engines: Engines, restart: int) -> list[str]:
    """What the only engine was told about its memory after so many restarts."""
    suffix = f"-restart-{restart}" if restart else ""
    lines = (engines.folder / f"engine-0{suffix}.log").read_text().splitlines()
    return [line for line in lines if not line.startswith("scripted engine")]


@pytest.mark.slow
def test_engines_on_shared_devices_that_die_asleep_or_start_meanwhile_are_told_only_what_they_can_do(
    engines: Start,
) -> None:
    here = engines(200.0, restarts_wait=True)
    here.pool.sleep()
    os.kill(here.pid(0), signal.SIGKILL)
    here.pool.wake_weights()  # finds it dead
    here.pool.revive()
    here.hand_over(2)
    here.pool.wake_cache()
    assert memory_calls(here, 0) == ["sleep"] and memory_calls(here, 1) == []

    here.pool.quarantine(0, "tired", life=here.pool.life(0))
    deadline = time.monotonic() + 60
    while not (here.folder / "rollout-0-restart-2.log").exists():
        assert time.monotonic() < deadline, here.lines
        time.sleep(0.02)
    here.pool.sleep()  # while it starts
    here.pool.wake_weights()
    here.hand_over(3)
    here.pool.wake_cache()
    assert memory_calls(here, 2) == ["sleep", "wake_weights", "wake_cache"]


def test_the_wait_for_an_engine_ends_when_all_restarts_should_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_ANSWER_S", 0.1)
    limits = RecoveryConfig(max_restarts=2, backoff_s=0.1, max_backoff_s=0.1)
    config = RunConfig(
        rollout=RolloutConfig(start_timeout_s=0.05, recovery=limits), cluster=ClusterConfig(start_timeout_s=0.05)
    )

    async def wait() -> None:
        made = recovery.EngineRecovery(config, [], meter=UsageMeter(), note=print, spawn=lambda work: work.close())
        await made.wait_in_service()

    # Two restarts of 0.1 s wait, two deadlines of 0.05 s and 0.1 s for the answer; and 0.1 s more.
    with pytest.raises(EngineError, match=r"came back within 0\.7 s, what .*max_restarts=2 .*start_timeout_s=0\.05"):
        asyncio.run(wait())


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=pytest.mark.slow) for fault in ("die", "hang", "errors")])
def test_prompts_of_the_only_engine_wait_for_its_restart(engines: Start, fault: str) -> None:
    check_recovery(engines(100.0), fault)


def test_an_engine_that_works_batch_by_batch_gets_its_share_at_once_and_a_faster_one_more(engines: Start) -> None:
    here = engines(1000.0, 200.0, at_once=None)
    for seed in range(2):
        wanted = here.draws([12] * 24)
        check_all_once(here, wanted, list(here.pool.generate(wanted, SAMPLING, seed=seed)))
    calls = [(here.folder / f"engine-{engine}.log").read_text().count("groups") for engine in range(2)]
    assert calls == [2, 2]


@pytest.mark.slow
def test_an_engine_that_fails_too_often_is_given_up_and_the_last_one_ends_the_run(engines: Start) -> None:
    here = engines(50.0, recovery=RecoveryConfig(max_restarts=1, backoff_s=0.1))
    killed: set[int] = set()

    def kill_every_process() -> None:
        while len(killed) < 2:
            if (pid := here.pid(0)) not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.05)

    threading.Thread(target=kill_every_process, daemon=True).start()
    with pytest.raises(EngineError, match=r"no rollout engine is left: rollout engine 0 .*its process died"):
        list(here.pool.generate(here.draws([20] * 20), SAMPLING, seed=0))
    assert "given up after 1 restarts" in here.lines[-1]
    with pytest.raises(EngineError, match="no rollout engine is left"):
        here.pool.revive()


def test_without_restarts_the_first_failure_ends_the_call_with_the_last_log_lines(engines: Start) -> None:
    here = engines(50.0, recovery=RecoveryConfig(max_restarts=0))
    here.fault(0, "die")
    with pytest.raises(EngineError, match=r"(?s)rollout engine 0 \(pid \d+ on .*last lines of .*scripted engine"):
        list(here.pool.generate(here.draws([20] * 4), SAMPLING, seed=0))
