"""Contenders that take turns: the protocol, whose CPU seconds count, and the workload. Nothing asserts a time."""

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.contenders.contender import ContenderProcess, Turn
from benchmarks.contenders.process_tree import DRIVER, RAY, ProcessTree
from benchmarks.contenders.workload import WORKLOADS, even_share
from benchmarks.end_to_end import rate

SCRIPT = """
import sys, time
from benchmarks.contenders.turns import Turns
turns = Turns()
print("a library says something")
turns.tell({"parameters": 7})
for step in range(2):
    turns.wait()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    if step == 1 and sys.argv[1] == "breaks":
        sys.exit("out of paper")
    turns.tell({"tokens": 10 + step})
turns.wait()
"""


def contender(tmp_path: Path, how: str) -> ContenderProcess:
    return ContenderProcess("small", [sys.executable, "-c", SCRIPT, how], tmp_path / "contender.log", timeout_s=60.0)


def test_a_contender_takes_turns_and_its_cpu_seconds_are_counted(tmp_path: Path) -> None:
    with contender(tmp_path, "works") as process:
        assert process.parameters == 7
        first, second = process.take_turn(), process.take_turn()
        pid = process._process.pid
    assert [turn.report["tokens"] for turn in (first, second)] == [10, 11]
    # The system counts by ticks of 10 ms, and on a busy machine it misses some.
    assert all(turn.cpu_s.keys() == {DRIVER} and turn.own_cpu_s >= 0.1 for turn in (first, second))
    assert process.peak_bytes[DRIVER] > 2**20
    assert not psutil.pid_exists(pid)
    assert "a library says something" in (tmp_path / "contender.log").read_text()


def test_a_contender_that_breaks_is_told_of_with_the_end_of_its_log(tmp_path: Path) -> None:
    with contender(tmp_path, "breaks") as process:
        process.take_turn()
        with pytest.raises(RuntimeError, match=r"small ended(.|\n)*out of paper"):
            process.take_turn()


def test_rays_own_processes_are_counted_apart() -> None:
    turns = [
        Turn(cpu_s={DRIVER: 0.5, "trainer": 1.0, "engine": 0.5, RAY: 2.0}, wall_s=3.0, report={"tokens": 100}),
        Turn(cpu_s={DRIVER: 0.5, "trainer": 3.0, "engine": 0.5, RAY: 1.0}, wall_s=3.0, report={"tokens": 100}),
    ]
    assert rate(turns) == pytest.approx((50 + 25) / 2)
    assert rate(turns, with_ray=True) == pytest.approx((25 + 20) / 2)


def test_a_process_below_a_worker_belongs_to_it_and_the_others_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        def __init__(self, pid: int, title: str, parent: "Node | None") -> None:
            self.pid, self.title, self.above = pid, title, parent

        def cmdline(self) -> list[str]:
            return [self.title]

        def parent(self) -> "Node | None":
            return self.above

    root = Node(1, "python", None)
    raylet = Node(2, "raylet", root)
    host = Node(3, "ray::RolloutHost.generate", raylet)
    server = Node(4, "sglang::scheduler", host)
    idle = Node(5, "ray::IDLE", raylet)
    actor = Node(6, "ray::ActorWorker.update", raylet)
    tree = ProcessTree(root)  # type: ignore[arg-type]  # what is asked of a process
    roles = [tree._role(node) for node in (raylet, host, server, idle, actor)]  # type: ignore[arg-type]
    assert roles == [RAY, "engine", "engine", RAY, "trainer"]
    host.title = "ray::IDLE"
    assert tree._role(host) == "engine", "its title changes with what it does"  # type: ignore[arg-type]


def test_the_workload_is_the_same_every_time_and_rewards_even_tokens() -> None:
    case = WORKLOADS["A"]
    prompts = case.prompts()
    assert prompts == case.prompts() and len(prompts) == 256
    assert {len(text.split()) for text in prompts} == {32}
    assert max(int(word[1:]) for text in prompts for word in text.split()) < case.words == case.end_token - 1
    assert even_share("w2 w31 w10 w7") == 0.5 and even_share("") == 0.0
