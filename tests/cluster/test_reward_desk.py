"""The queue in front of a reward model."""

import asyncio
import threading
from collections.abc import Callable

from megappo.cluster.reward_desk import PassQueue

Run = Callable[[list[list[int]]], list[float]]


RELEASE = threading.Event()
"""Lets a pass end."""


def scores_of(run: Run, orders: list[list[list[int]]], started: threading.Event) -> list[object]:
    """Ask for the first order, and for the others while its pass runs; returns scores or errors."""

    async def ask() -> list[object]:
        passes = PassQueue(run)
        first = asyncio.create_task(passes.scores(orders[0]))
        await asyncio.to_thread(started.wait, 20)
        others = [asyncio.create_task(passes.scores(order)) for order in orders[1:]]
        await asyncio.sleep(0)
        RELEASE.set()
        return list(await asyncio.gather(first, *others, return_exceptions=True))

    RELEASE.clear()
    return asyncio.run(ask())


def test_what_is_asked_while_a_pass_runs_goes_into_the_next_one_together() -> None:
    passes: list[list[list[int]]] = []
    started = threading.Event()

    def run(tokens: list[list[int]]) -> list[float]:
        passes.append(tokens)
        started.set()
        assert RELEASE.wait(20)
        return [float(sum(text)) for text in tokens]

    found = scores_of(run, [[[1], [2, 3]], [[4]], [[5], [6]]], started)
    assert found == [[1.0, 5.0], [4.0], [5.0, 6.0]]
    assert passes == [[[1], [2, 3]], [[4], [5], [6]]]


def test_everyone_is_told_that_the_ranks_failed() -> None:
    started = threading.Event()

    def run(tokens: list[list[int]]) -> list[float]:
        started.set()
        assert RELEASE.wait(20)
        raise OSError(f"{len(tokens)} texts")

    found = scores_of(run, [[[1]], [[2]], [[3], [4]]], started)
    assert [str(error) for error in found] == ["1 texts", "3 texts", "2 texts"]


def test_nothing_else_runs_beside_a_pass() -> None:
    events: list[str] = []
    started = threading.Event()

    def run(tokens: list[list[int]]) -> list[float]:
        events.append("pass begins")
        started.set()
        assert RELEASE.wait(20)
        events.append("pass ends")
        return [0.0] * len(tokens)

    async def ask() -> None:
        passes = PassQueue(run)
        first = asyncio.create_task(passes.scores([[1]]))
        await asyncio.to_thread(started.wait, 20)
        rest = asyncio.create_task(passes.between(lambda: events.append("rest")))
        await asyncio.sleep(0)
        RELEASE.set()
        await asyncio.gather(first, rest)

    RELEASE.clear()
    asyncio.run(ask())
    assert events == ["pass begins", "pass ends", "rest"]
