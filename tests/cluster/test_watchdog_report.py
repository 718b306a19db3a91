"""Who a report names as the one to blame, and what it says."""

import time
from collections.abc import Sequence

import pytest

from megappo.cluster.watchdog_report import Facts, WaitSeen, head_of, text_of
from megappo.observability.board import Activity, GroupPosition, Owner
from megappo.observability.phases import Phase
from megappo.observability.processes import Child, Seen
from megappo.observability.stacks import Stacks


def at(group: str, count: int, seconds: float, *, inside: bool = True) -> GroupPosition:
    return GroupPosition(
        group=group, count=count, operation="all_reduce", inside=inside, seconds=seconds, ranks=(0, 1, 2)
    )


def seen(
    name: str, role: str, rank: int, *positions: GroupPosition, state: str = "", doing: str = "", pid: int = 0
) -> Seen:
    return Seen(
        owner=Owner(name=name, role=role, rank=rank, pid=pid or 100 + rank, machine="host pid:[1]", started=1.0),
        title=f"ray::{role}.update",
        state=state,
        cpu=0.5,
        activities=[Activity(text=text, seconds=12.0) for text in doing.split(" > ") if text],
        positions=positions,
        stacks=Stacks(lines=("Thread 1", "  all_reduce (x.py:3)"), how="py-spy"),
        children=[Child(pid=7, command="python server", state="", stacks=Stacks(how="py-spy", lines=("Thread 9",)))],
    )


def actor(rank: int, *positions: GroupPosition, state: str = "", doing: str = "") -> Seen:
    return seen(f"actor rank {rank}", "actor", rank, *positions, state=state, doing=doing)


def wait_for(*names: str) -> WaitSeen:
    return WaitSeen(
        phase="update",
        thread="MainThread",
        seconds=30.0,
        quiet_s=30.0,
        limit_s=30.0,
        key="cluster.call_timeout_s",
        outstanding=names,
    )


def facts(processes: Sequence[Seen], *names: str) -> Facts:
    wait = wait_for(*names) if names else None
    return Facts(
        why="update has waited 30 s",
        of=wait,
        waits=[wait] if wait else [],
        phases=[Phase("update", "MainThread", time.monotonic_ns(), {"step": 3})],
        processes=processes,
        parts={"Engines": ["rollout engine 0 (pid 5): serving, no prompts"]},
    )


CASES = {
    "the rank behind, where it is": (
        [
            actor(0, at("data 1", 7, 21.0)),
            actor(1, at("data 1", 6, 22.0, inside=False), doing="update > forward, micro_batch 2"),
            actor(2, at("data 1", 7, 20.5)),
        ],
        ("actor rank 0 (pid 100 on h)", "actor rank 1 (pid 101 on h)"),
        "actor rank 1 (pid 101), which has not entered number 7 (all_reduce) of group data 1, in which rank 0, rank 2 "
        "wait for 21.0 s; it is in update > forward, micro_batch 2 for 12.0 s",
    ),
    "the rank behind is stopped": (
        [actor(0, at("data 1", 7, 21.0)), actor(1, state="stopped (SIGSTOP, or a debugger)")],
        ("actor rank 0 (pid 100 on h)",),
        "actor rank 1 (pid 101), which has not entered number 7 (all_reduce) of group data 1, in which rank 0 waits "
        "for 21.0 s; its process is stopped (SIGSTOP, or a debugger)",
    ),
    "ranks of two roles are not compared": (
        [actor(0, at("data 1", 7, 21.0)), seen("critic rank 1", "critic", 1, at("data 1", 2, 5.0))],
        ("actor rank 0 (pid 100 on h)",),
        "actor rank 0 (pid 100)",
    ),
    "a moment is no waiting; a stopped process is named before who else has not answered": (
        [
            actor(0, at("data 1", 7, 0.1)),
            actor(1, at("data 1", 6, 0.1), state="stopped (SIGSTOP, or a debugger)"),
        ],
        ("actor rank 0 (pid 100 on h)", "actor rank 1 (pid 101 on h)"),
        "actor rank 1 (pid 101), whose process is stopped (SIGSTOP, or a debugger)",
    ),
    "who has not answered, with what it does": (
        [actor(1, doing="update"), actor(11), seen("reward worker 0", "reward", 0, doing="score, response 'x'")],
        ("reward worker 0 (has groups 4 for up to 3.0 s)",),
        "reward worker 0 (pid 100), which is in score, response 'x' for 12.0 s",
    ),
    "what an engine does several times is said once": (
        [seen("rollout engine 0", "rollout", 0, doing="requests > requests > requests")],
        ("rollout engine 0 (pid 100 on h)",),
        "rollout engine 0 (pid 100), which is in 3 x requests for 12.0 s",
    ),
    "a name that begins like another's": (
        [actor(1, doing="update"), actor(11)],
        ("actor rank 11 (pid 111)",),
        "actor rank 11 (pid 111)",
    ),
    "nobody can be looked at": ([], ("texts of group 4",), "texts of group 4"),
    "an engine that was killed and started anew is not to blame": (
        [
            seen("rollout engine 0", "rollout", 0, state="gone", doing="generate", pid=50),
            seen("rollout engine 0", "rollout", 0, pid=51),
        ],
        (),
        "",
    ),
    "somebody asked, and all is well": ([actor(0), actor(1)], (), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_one_to_blame_is_named(name: str) -> None:
    processes, outstanding, expected = CASES[name]
    assert facts(processes, *outstanding).suspect == expected


def test_ranks_in_a_circle_are_told_of_as_one() -> None:
    processes = [actor(0, at("a", 1, 9.0)), actor(1, at("b", 1, 8.0))]
    suspect = facts(processes, "actor rank 0 (pid 100)").suspect
    assert suspect.startswith("actor rank 1 (pid 101), which waits elsewhere for one of those that wait for it: ")


def test_a_report_says_who_waits_where_processes_are_and_their_stacks() -> None:
    processes = [
        actor(0, at("data 1", 7, 21.0)),
        actor(1, at("data 1", 6, 22.0, inside=False), doing="update"),
    ]
    found = facts(processes, "actor rank 0 (pid 100)", "actor rank 1 (pid 101)")
    assert head_of(found)[:2] == ["update has waited 30 s", "waits for actor rank 0 (pid 100), actor rank 1 (pid 101)"]
    lines = text_of(found).splitlines()
    for line in (
        "  update (thread MainThread): 30.0 s, limit 30 s (cluster.call_timeout_s)",
        "    for actor rank 1 (pid 101)",
        "  actor rank 1  pid 101 on host: runs or waits, 0.50 CPUs, ray::actor.update",
        "    in update for 12.0 s",
        "    inside number 7 (all_reduce) of group data 1 (ranks 0, 1, 2), 21.0 s ago",
        "    child pid 7: runs or waits, python server",
        "  rollout engine 0 (pid 5): serving, no prompts",
        "== actor rank 0 (pid 100): py-spy",
        "  all_reduce (x.py:3)",
        "== child 7 of actor rank 1: py-spy",
    ):
        assert line in lines
    assert lines[lines.index("Phases of the driver") + 1].startswith("  update, step 3 (thread MainThread): 0.")
