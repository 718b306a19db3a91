"""The process that runs reward functions: nothing they do, hang or crash, reaches the process that asks.

Started by `megappo.rewards.scorer`, which sends requests over a socket and kills this process when it does not answer.
"""

import asyncio
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread

from megappo.config.reward import RewardTerms
from megappo.errors import MegappoError
from megappo.observability.stacks import show_stacks_on_signal
from megappo.rewards.calling import Caller, Outcome
from megappo.rewards.composed import ComposedReward
from megappo.rewards.make import make_rewards
from megappo.rewards.types import Failure, FailureKind, Sample

LENGTH_BYTES = 8
"""Every message is its length and a pickle: both ends are this project's."""
SHOW_STACKS = signal.SIGUSR1
"""Makes this process write where its threads are, even one that runs C code and lets no Python run."""
_PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class ProcessSettings:
    """What a scoring process is told first."""

    sections: Mapping[str, RewardTerms]
    concurrency: int
    timeout_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Started:
    """The rewards are made, or why they are not."""

    batched: frozenset[tuple[str, str]] = frozenset()
    """Rewards and their terms that score several samples in one call."""
    error: str | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """Samples to be scored together."""

    number: int
    reward: str
    term: str
    samples: Sequence[Sample]


@dataclass(kw_only=True, slots=True, frozen=True)
class Answer:
    """What became of the samples of a request, in order."""

    number: int
    outcomes: Sequence[Outcome]
    stuck: bool = False
    """Whether a thread still runs one of its calls, which nothing but the end of the process can stop."""


def frame(message: object) -> bytes:
    """Return a message as it travels."""
    content = pickle.dumps(message)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def command(descriptor: int, stacks: int) -> list[str]:
    """Return the command line of a scoring process: its end of the socket, and a file for `SHOW_STACKS`.

    It gets this process's import path, so that it finds the same `package.module:name`.
    """
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from megappo.rewards.scoring_process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
    )
    return [sys.executable, "-c", code, json.dumps(sys.path), str(descriptor), str(stacks)]


def main(descriptor: int, stacks: int) -> None:
    """Make the rewards, then answer requests until the socket closes."""
    if sys.platform == "linux":
        # A reward that lets no Python run would not see that the socket is closed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(file=2)
    faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
    show_stacks_on_signal()
    connection = socket.socket(fileno=descriptor)
    settings = _receive(connection)
    if settings is None:
        return
    assert isinstance(settings, ProcessSettings)
    try:
        rewards = make_rewards(settings.sections)
    except MegappoError as error:
        connection.sendall(frame(Started(error=str(error))))
        return
    except Exception:  # the boundary to foreign code: told of by the other process
        connection.sendall(frame(Started(error=traceback.format_exc())))
        return
    terms = [(name, term, made) for name, reward in rewards.items() for term, made in reward.terms.items()]
    batched = frozenset((name, term) for name, term, made in terms if made.score is not None)
    connection.sendall(frame(Started(batched=batched)))
    asyncio.run(_Server(connection=connection, rewards=rewards, settings=settings).serve())


def _receive(connection: socket.socket) -> object | None:
    """Return the next message, None once the other end is closed."""
    head = connection.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    content = connection.recv(length, socket.MSG_WAITALL)
    return pickle.loads(content) if len(content) == length else None


@dataclass(kw_only=True, slots=True)
class _Server:
    """Answers each request in a task of its own. Plain functions run in threads where several may go on at a time, else
    in the main thread, where libraries may use signals."""

    connection: socket.socket
    rewards: Mapping[str, ComposedReward]
    settings: ProcessSettings
    threads: ThreadPoolExecutor | None = field(init=False, default=None)
    tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set[asyncio.Task[None]])

    async def serve(self) -> None:
        if self.settings.concurrency > 1:
            self.threads = ThreadPoolExecutor(self.settings.concurrency, thread_name_prefix="score")
        loop = asyncio.get_running_loop()
        Thread(target=self._listen, args=(loop,), daemon=True, name="requests").start()
        await asyncio.Event().wait()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Body of a thread: the loop must not wait for requests."""
        while (request := _receive(self.connection)) is not None:
            assert isinstance(request, Request)
            loop.call_soon_threadsafe(self._begin, request)
        # Threads that score, and children that they started, must not keep the process.
        os._exit(0)

    def _begin(self, request: Request) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, request: Request) -> None:
        caller, stuck = Caller(threads=self.threads), False
        term, limit_s = self.rewards[request.reward].terms[request.term], self.settings.timeout_s
        try:
            found = await asyncio.wait_for(term.outcomes(request.samples, caller), limit_s)
        except TimeoutError as error:
            stuck = bool(caller.running)
            where = "".join(traceback.format_exception(error))
            found = [timed_out(sample, request.term, limit_s, details=where) for sample in request.samples]
        self.connection.sendall(frame(Answer(number=request.number, outcomes=found, stuck=stuck)))


def label_of(term: str) -> str:
    """Name a term in messages of this module and of who asks it."""
    return f"reward term {term}" if term else "reward"


def timed_out(sample: Sample, term: str, timeout_s: float, *, details: str) -> Failure:
    """Return the failure of a sample that was not scored in time."""
    label = label_of(term)
    text = f"{label}: no answer within reward.timeout_s={timeout_s:g}, response {sample.response!r:.200}"
    return Failure(kind=FailureKind.timed_out, message=text, details=details)
