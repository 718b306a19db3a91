"""Node 0 and what can be wrong with the others, in one process: real nodes of which all but node 0 are threads that
say what a node says. Ray and the controller come in the slow tests."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from megappo.errors import INTERRUPTED
from megappo.launch.children import Child
from megappo.launch.facts import NodeFacts, late_clocks, version_table
from megappo.launch.files import disagreements, proof_of, read_secret, secret_file, view_of
from megappo.launch.head import Head
from megappo.launch.meeting import Meeting
from megappo.launch.order import LaunchOrder, Limits
from megappo.launch.place import Place
from megappo.launch.signals import PASSED_ON, SignalCounts, still_to_pass_on

FACTS = NodeFacts(
    rank=0,
    host="a",
    address="127.0.0.1",
    executable="/usr/bin/python3",
    versions={"python": "3.11.4", "torch": "2.13.0"},
    num_gpus=0,
    num_cpus=2,
)
LIMITS = Limits(join_s=20.0, ray_s=1.0, files_s=20.0, silence_s=20.0, end_s=20.0)


@pytest.fixture
def signals() -> Iterator[SignalCounts]:
    numbers = (*PASSED_ON, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield SignalCounts()
    for number, handler in before.items():
        signal.signal(number, handler)


class Nodes:
    """Node 0, and node 1 as a script."""

    def __init__(self, signals: SignalCounts, run_dir: Path) -> None:
        self._signals, self._run_dir, self._store = signals, run_dir, HashStore()
        self.said: list[str] = []

    def meeting(self, rank: int, limits: Limits) -> Meeting:
        place = Place(rank=rank, num_nodes=2, head="a", port=1, source="a test", hosts=("a", "b"))
        return Meeting(self._store, place=place, signals=self._signals, silence_s=limits.silence_s)

    def launch(self, *overrides: str, limits: Limits = LIMITS, other: Callable[[Meeting], None] | None = None) -> int:
        words = ["train", "experiment=quickstart", f"run.dir={self._run_dir}", "model.path=no-model", *overrides]
        order = LaunchOrder.of(words, limits=limits, cpus_per_node=1)
        thread = threading.Thread(target=other or (lambda _: None), args=[self.meeting(1, limits)])
        thread.start()
        meeting = self.meeting(0, limits)
        head = Head(order, meeting=meeting, facts=FACTS, signals=self._signals, base={}, say=self.said.append)
        code = head.run()
        thread.join()
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def nodes(signals: SignalCounts, tmp_path: Path) -> Nodes:
    return Nodes(signals, tmp_path / "runs")


def join(meeting: Meeting, **changed: object) -> None:
    """Be node 1 up to what it says of itself."""
    facts = replace(FACTS, rank=1, host="b", **changed)
    meeting.say("facts", facts.as_json() | {"cpus": 1})


def wait_for_end(meeting: Meeting) -> int:
    while (end := meeting.hear("end")) is None:
        meeting.tick()
    meeting.say("ended", end)
    return end


def test_nodes_with_other_versions_are_shown_in_a_table(nodes: Nodes) -> None:
    ends: list[int] = []

    def other(meeting: Meeting) -> None:
        join(meeting, versions={"python": "3.12.1", "torch": "2.13.0"})
        ends.append(wait_for_end(meeting))

    assert nodes.launch(other=other) == 2
    assert ends == [2]
    assert "node 0 (a)  3.11.4" in nodes.output and "node 1 (b)  3.12.1" in nodes.output
    assert "torch" not in nodes.output, "what is the same is not shown"


def test_a_node_that_sees_other_files_is_named(nodes: Nodes) -> None:
    def other(meeting: Meeting) -> None:
        join(meeting)
        while (request := meeting.hear("request")) is None:
            meeting.tick()
        meeting.say("view", {"proof": "missing", "paths": dict.fromkeys(request["paths"], "file of 7 bytes")})
        wait_for_end(meeting)

    assert nodes.launch("cluster.pools.main=2", other=other) == 2
    assert "node 1 (b) does not see what node 0 writes into run.dir=" in nodes.output
    assert "node 0 sees missing, node 1 (b) file of 7 bytes" in nodes.output


def test_a_node_that_never_joins_is_named_with_the_deadline(nodes: Nodes) -> None:
    assert nodes.launch(limits=replace(LIMITS, join_s=0.5, end_s=0.5)) == 2
    assert "node 1 (b) has not joined within 0 s" in nodes.output


def test_a_node_that_joins_and_dies_is_named(nodes: Nodes) -> None:
    def other(meeting: Meeting) -> None:
        meeting.tick()
        join(meeting)

    assert nodes.launch(limits=replace(LIMITS, silence_s=1.5), other=other) == 1
    assert "node 1 (b) joined and is gone: nothing heard from it for 2 s" in nodes.output


def test_a_configuration_that_is_wrong_ends_all_nodes_with_2(nodes: Nodes) -> None:
    ends: list[int] = []
    assert nodes.launch("nonsense=1", other=lambda meeting: ends.append(wait_for_end(meeting))) == 2
    assert ends == [2]
    assert "nonsense" in nodes.output


def test_pools_larger_than_all_nodes_are_refused(nodes: Nodes) -> None:
    def other(meeting: Meeting) -> None:
        join(meeting)
        wait_for_end(meeting)

    assert nodes.launch("cluster.pools.main=6", other=other) == 2
    assert "asks for 6 CPUs, and the nodes have 1 + 1 = 2" in nodes.output


def test_a_signal_before_the_controller_runs_ends_all_nodes(nodes: Nodes, signals: SignalCounts) -> None:
    ends: list[int] = []
    signals.counts["SIGTERM"] += 1
    assert nodes.launch(other=lambda meeting: ends.append(wait_for_end(meeting))) == INTERRUPTED
    assert ends == [INTERRUPTED]


@pytest.mark.parametrize(
    ("of_nodes", "passed", "expected"),
    [
        ([{"SIGTERM": 1}, {"SIGTERM": 1}, {}], {}, ["SIGTERM"]),
        ([{"SIGTERM": 1}, {"SIGTERM": 1}], {"SIGTERM": 1}, []),
        ([{}, {"SIGTERM": 2}], {"SIGTERM": 1}, ["SIGTERM"]),
        ([{"SIGINT": 1}, {"SIGUSR1": 1}], {}, ["SIGINT", "SIGUSR1"]),
    ],
)
def test_a_signal_is_passed_on_as_often_as_the_node_got_it_that_got_it_most(
    of_nodes: list[dict[str, int]], passed: dict[str, int], expected: list[str]
) -> None:
    assert [number.name for number in still_to_pass_on(of_nodes, passed)] == expected


def test_signals_are_counted_and_do_not_end_the_process(signals: SignalCounts) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        signal.raise_signal(number)
    assert signals.counts == {"SIGTERM": 2, "SIGUSR2": 1}
    assert signals.asked_to_end


def test_a_secret_is_for_its_owner_and_gone_afterwards(tmp_path: Path) -> None:
    with secret_file(tmp_path / "runs", "key") as path:
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_secret(path) == "key" and "key" not in proof_of("key")
    assert read_secret(path) is None and list((tmp_path / "runs").iterdir()) == []


def test_model_folders_are_compared_by_names_and_sizes(tmp_path: Path) -> None:
    for name, size in (("one", 3), ("two", 3), ("three", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * size)
    one, two, three, none = (view_of(str(tmp_path / name)) for name in ("one", "two", "three", "none"))
    assert one == two != three and none == "missing"
    views = [{"proof": "p", "paths": {"m": one}}, {"proof": "p", "paths": {"m": three}}]
    told = disagreements([FACTS, replace(FACTS, rank=1, host="b")], views, run_dir="runs", proof="p")
    assert told == f"m: node 0 sees {one}, node 1 (b) {three} (share or copy it)"


def test_many_nodes_with_the_same_versions_share_a_row() -> None:
    others = [replace(FACTS, rank=rank, host=f"n{rank}") for rank in range(1, 6)]
    odd = replace(FACTS, rank=6, host="n6", versions={"python": "3.11.4", "torch": "2.12.0"})
    assert version_table([FACTS, *others]) == []
    assert version_table([FACTS, *others, odd]) == [
        "                                    torch",
        "node 0 (a), node 1 (n1) and 4 more  2.13.0",
        "node 6 (n6)                         2.12.0",
    ]


def test_a_clock_far_off_is_told_of() -> None:
    other = replace(FACTS, rank=1, host="b")
    assert late_clocks([FACTS, other], {1: 3.0}) == []
    (line,) = late_clocks([FACTS, other], {1: -37.0})
    assert "node 1 (b) is 37 s behind" in line


def test_a_child_ends_by_its_signal_and_takes_its_own_children_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child(["bash", "-c", "echo first; sleep 600 & wait"], environment={"PATH": "/usr/bin:/bin"}, log=log)
    while not child.has_printed("first"):
        assert child.poll() is None
    child.send(signal.SIGKILL)
    while child.poll() is None:
        pass
    assert child.poll() == 137 and child.last_lines() == "\n  | first"
    child.end(grace_s=0.1)
