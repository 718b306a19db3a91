"""Rewards from outside for the tests of the port: well-behaved ones, and every way of failing."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import DataError
from megappo.rewards import Reward, Sample


def length(sample: Sample) -> float:
    return float(len(sample.response))


def scaled(sample: Sample, scale: float, offset: float = 0.0) -> float:
    return scale * len(sample.response) + offset


def takes_anything(sample: Sample, scale: float, **more: Any) -> float:
    return scale * len(more)


def takes_no_sample() -> float:
    return 1.0


async def length_later(sample: Sample) -> Reward:
    await asyncio.sleep(0.001)
    return Reward(score=float(len(sample.response)), parts={"later": 1.0})


@dataclass
class Batch:
    """Scores a batch; refuses the whole of one with a bad response in it."""

    scale: float = 1.0

    def score(self, samples: Sequence[Sample]) -> list[float]:
        if any("bad" in sample.response for sample in samples):
            raise ValueError("a bad one")
        return [self.scale * len(sample.response) for sample in samples]


class AsyncBatch:
    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        await asyncio.sleep(0.001)
        return [Reward(score=float(len(samples)), parts={"length": float(len(sample.response))}) for sample in samples]


class OnePerSample:
    def __init__(self, add: float) -> None:
        self.add = add

    def __call__(self, sample: Sample) -> float:
        return len(sample.response) + self.add


class TooFew:
    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [1.0] * (len(samples) - 1)


class NotReady:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class DiesAtOnce:
    def __init__(self) -> None:
        os._exit(9)


class StartsOnce:
    """The process of the first one lives; that of any later one ends."""

    def __init__(self, path: str) -> None:
        if Path(path).exists():
            os._exit(9)
        Path(path).touch()

    def __call__(self, sample: Sample) -> Any:
        return by_word(sample)


class Nothing:
    """Neither has score nor can be called."""


def by_word(sample: Sample) -> Any:
    """Do what the response says; any other response scores its length."""
    word, _, argument = sample.response.partition(" ")
    actions = {
        "raise": _raise,
        "refuse": _refuse,
        "cancel": _cancel,
        "speechless": _raise_speechless,
        "odd": lambda _: _OddReward(score=1.0),
        "exit": lambda _: sys.exit(3),
        "die": lambda code: os._exit(int(code)),
        "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
        "loop": _loop,
        "hold": _hold_everything,
        "sleep": _sleep,
        "none": lambda _: None,
        "nan": lambda _: float("nan"),
        "part": lambda _: Reward(score=1.0, parts={"share": float("inf")}),
        "text": lambda _: "1.0",
        "list": lambda _: [1.0],
        "child": _start_child,
    }
    return actions[word](argument) if word in actions else float(len(sample.response))


async def by_word_later(sample: Sample) -> Any:
    if sample.response == "never":
        await asyncio.Event().wait()
    await asyncio.sleep(0.01)
    return by_word(sample)


def flaky(sample: Sample) -> float:
    """Fails as often as the response says, per file that it names."""
    path, _, times = sample.response.partition(" ")
    with Path(path).open("a") as file:
        file.write("x")
    if len(Path(path).read_text()) <= int(times):
        raise ConnectionError("try again")
    return 1.0


def slow(sample: Sample, seconds: float = 0.05) -> float:
    time.sleep(seconds)
    return float(len(sample.response))


async def slow_later(sample: Sample, seconds: float = 0.05) -> float:
    await asyncio.sleep(seconds)
    return float(len(sample.response))


class ByWordBatch:
    def score(self, samples: Sequence[Sample]) -> list[Any]:
        return [by_word(sample) for sample in samples]


def _raise(message: str) -> None:
    raise ValueError(message)


class _SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError


class _OddReward(Reward):
    """Cannot travel between processes."""

    def __reduce__(self) -> str:
        raise TypeError


def _raise_speechless(_: str) -> None:
    raise _SpeechlessError


def _cancel(_: str) -> None:
    raise asyncio.CancelledError


def _refuse(message: str) -> None:
    raise DataError(message)


def _sleep(seconds: str) -> float:
    time.sleep(float(seconds))
    return float(seconds)


def _loop(_: str) -> None:
    while True:
        pass


def _hold_everything(_: str) -> None:
    """Run C code that lets no other thread of this process run Python."""
    ctypes.PyDLL(None).sleep(60)


def _start_child(path: str) -> None:
    """Start a process, note its number, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(str(child.pid))
    time.sleep(60)
