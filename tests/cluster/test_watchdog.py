"""Real processes that hang, and what the watchdog of the run says of them. Reports are read as a user would."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megappo.cluster.groups import TrainingGroup
from megappo.cluster.placement import Placement
from megappo.cluster.reward_pool import RewardPool
from megappo.cluster.runtime import gather
from megappo.cluster.watchdog import Lines, Watchdog
from megappo.config.cluster import ClusterConfig
from megappo.config.reward import RewardConfig
from megappo.config.run import RunConfig
from megappo.config.watchdog import OnHang, WatchdogConfig
from megappo.errors import MegappoError, WorkerError
from megappo.observability.board import read_board
from megappo.observability.waiting import Wait
from megappo.rewards import Sample
from tests.cluster.conftest import SAMPLING, Start
from tests.cluster.finished_groups import finished_group
from tests.cluster.meeting_worker import MeetingWorker


class Told(list[str]):
    """What a user was told."""

    def until(self, text: str) -> str:
        """Wait for a line with a text; returns it."""
        deadline = time.monotonic() + 120.0
        while not (found := [line for line in self if text in line]):
            assert time.monotonic() < deadline, (text, list(self))
            time.sleep(0.1)
        return found[0]


Watch = Callable[..., Told]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Watch over the processes whose logs are in a folder, for one test."""
    started: list[Watchdog] = []

    def start(config: WatchdogConfig, folder: Path, **parts: Lines) -> Told:
        told = Told()
        started.append(Watchdog(config, log_dir=folder, note=told.append))
        for part, lines in parts.items():
            started[-1].tell(part, lines)
        started[-1].start()
        return told

    yield start
    for watchdog in started:
        watchdog.stop()


def start_ranks(folder: Path, *, limit_s: float) -> tuple[TrainingGroup, Placement]:
    """Two ranks that meet in collectives; a call to them may take `limit_s`."""
    cluster = ClusterConfig(pools={folder.name: 2}, actor=folder.name, call_timeout_s=limit_s)
    config = RunConfig(cluster=cluster)
    placement = Placement(cluster, roles={"actor": folder.name}, gpu=False)
    slots = placement.slots("actor", 2)
    group = TrainingGroup(
        MeetingWorker, config, role="actor", parallelism=config.actor.parallelism, slots=slots, log_dir=folder
    )
    gather(group.start(), phase="start", timeout_s=200.0)
    return group, placement


def wait_until_inside(board: Path, *, number: int) -> None:
    """Wait until a process has been in a collective for a second."""
    deadline = time.monotonic() + 120.0
    while (reading := read_board(board)) is None or not any(
        found.count == number and found.inside and found.seconds > 1.0 for found in reading.positions
    ):
        assert time.monotonic() < deadline, reading
        time.sleep(0.1)


def test_a_rank_that_does_not_enter_a_collective_is_named_in_the_report_and_in_the_error(
    ray_here: None, watch: Watch, tmp_path: Path
) -> None:
    told = watch(WatchdogConfig(warn_s=1.0), tmp_path)
    group, placement = start_ranks(tmp_path, limit_s=300.0)
    try:
        assert group.run("meet", 3, 9, 9) == [32.0, 32.0]
        calls = group.calls("meet", 5, 1, 2)
        wait_until_inside(tmp_path / "actor-0.status", number=6)
        with pytest.raises(WorkerError) as raised:
            gather(calls, phase="meet", timeout_s=4.0, key="cluster.call_timeout_s")
        # 3 of the first call and 2 of this one; the group itself is made without any.
        blamed = "actor rank 1 (pid "
        where = "which has not entered number 6 (all_reduce) of group default_pg 0, in which rank 0 waits for "
        message = str(raised.value)
        assert "no answer in meet within 4 s (cluster.call_timeout_s); probably to blame: " + blamed in message
        assert where in message
        assert "it is in forward, micro_batch 2 for " in message
        assert blamed in told.until("meet is without news")
        path = message.split("stacks of all processes are in ")[1].split()[0]
        report = Path(path).read_text()
        assert "meet has waited 4 s, its limit (cluster.call_timeout_s)" in report
        assert where in report
        waiting, sleeping = (report.split(f"== actor rank {rank} ")[1].split("\n== ")[0] for rank in (0, 1))
        assert "all_reduce" in waiting
        assert "all_reduce" not in sleeping
    finally:
        group.stop()
        placement.remove()


def test_a_signal_has_a_report_written_at_once_and_nothing_ends(watch: Watch, tmp_path: Path) -> None:
    told = watch(WatchdogConfig(warn_s=None), tmp_path)
    with Wait(phase="generate", outstanding=lambda: ["rollout engine 0 (pid 5)"], limit_s=100.0):
        os.kill(os.getpid(), signal.SIGUSR2)
        line = told.until("asked for by SIGUSR2")
    assert str(tmp_path / "hang_1.txt") in line
    assert "    for rollout engine 0 (pid 5)" in (tmp_path / "hang_1.txt").read_text().splitlines()


def test_a_run_that_is_to_wait_goes_on_after_the_report(watch: Watch, tmp_path: Path) -> None:
    told = watch(WatchdogConfig(on_hang=OnHang.wait), tmp_path)
    with Wait(phase="update", outstanding=list, limit_s=5.0, since=time.monotonic() - 6.0) as wait:
        assert wait.left_s == 0.0
        assert wait.is_given_up().goes_on
        assert wait.left_s > 4.0
    assert "its limit; it waits on (watchdog.on_hang=wait)" in told.until("update has waited 5 s")


def test_a_report_that_fails_ends_nothing(watch: Watch, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    watch(WatchdogConfig(), folder)
    folder.rmdir()
    folder.write_text("no folder")
    with Wait(phase="update", outstanding=list, limit_s=0.0) as wait:
        assert not wait.is_given_up().goes_on


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_reported_before_it_is_killed_and_replaced(
    engines: Start, watch: Watch, tmp_path: Path
) -> None:
    made = engines(100.0, 100.0)
    told = watch(WatchdogConfig(), tmp_path, Engines=made.pool.describe)
    pid = made.pid(0)
    made.fault(0, "hang")
    finished = list(made.pool.generate(made.draws([15] * 8), SAMPLING, seed=0))
    assert len(finished) == 8
    line = told.until("health check has waited 2 s, its limit (rollout.recovery.hang_timeout_s)")
    assert f"probably to blame: rollout engine 0 (pid {pid})" in line
    assert not psutil.pid_exists(pid)
    report = (tmp_path / "hang_1.txt").read_text()
    engines_part = report.split("\n\nEngines\n")[1].split("\n\n")[0].splitlines()
    assert engines_part[0].startswith(f"  rollout engine 0 (pid {pid} on ")
    assert "serving, has groups " in engines_part[0]
    assert engines_part[1].startswith("  rollout engine 1 (pid ")
    assert f"== rollout engine 0 (pid {pid}): " in report
    assert any("restart 1 of" in line and "hang_1.txt" in line for line in made.lines)


@pytest.mark.slow
def test_a_reward_that_sleeps_is_named_with_its_sample_and_its_process(
    ray_here: None, watch: Watch, tmp_path: Path
) -> None:
    reward = RewardConfig(name="tests.rewards.port_rewards:by_word", timeout_s=8.0, workers=1)
    pool = RewardPool(RunConfig(reward=reward), slots=[], log_dir=tmp_path)
    try:
        gather(pool.start(), phase="start", timeout_s=200.0)
        told = watch(WatchdogConfig(warn_s=2.0), tmp_path, Rewards=pool.describe)
        scoring = pool.begin()
        sample = Sample(prompt="p", response="sleep 600", answer=None)
        scoring.submit(finished_group(7, [sample]))
        with pytest.raises(MegappoError, match=r"no answer within reward\.timeout_s=8, response 'sleep 600'"):
            scoring.collect()
        line = told.until("score is without news for ")
        assert "waits for reward worker 0 (has groups 7 for up to " in line
        assert "probably to blame: reward worker 0 (pid " in line
        assert "score, reward tests.rewards.port_rewards:by_word, response 'sleep 600', process " in line
        report = (tmp_path / "hang_1.txt").read_text()
        assert "by_word" in report.split("\n== child ")[1]
    finally:
        pool.stop()
