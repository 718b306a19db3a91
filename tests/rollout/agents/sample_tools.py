"""Tools of the tests."""

import asyncio
import sys
import time
from typing import Literal

CALLS: list[tuple[str, object]] = []
"""What was called, in order."""


def add(x: int, y: int = 1) -> int:
    """Add two numbers.

    Args:
        x: one
        y: the other
    """
    CALLS.append(("add", (x, y)))
    return x + y


async def look_up(word: str, kind: Literal["short", "long"] = "short") -> dict[str, str]:
    """Look a word up.

    Args:
        word: what to look for
        kind: of the answer
    """
    await asyncio.sleep(0)
    return {"word": word, "kind": kind}


def fails(why: str) -> None:
    """Fail.

    Args:
        why: the reason
    """
    if why == "exit":
        sys.exit(3)
    if why == "stop":
        raise StopIteration
    raise LookupError(why)


def sleeps(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "awake"


async def sleeps_softly(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "awake"


def untyped(x) -> int:  # type: ignore[no-untyped-def]  # what the test is about
    """Have no types.

    Args:
        x: something
    """
    return x


def undescribed(x: int) -> int:
    """Describe no parameter."""
    return x


class Other:
    """Holds a second function of a name."""

    @staticmethod
    def add(x: int) -> int:
        """Add something.

        Args:
            x: it
        """
        return x


other_add = Other.add
