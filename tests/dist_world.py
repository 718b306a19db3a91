"""One long-lived gloo world of up to four processes, shared by all tests of a pytest session.

Starting processes with torch and Megatron takes many seconds, so they start once (as many as are asked for) and then
run job after job. A job is a function of a test module or of a module beside it; every rank calls it with the same
arguments and its result comes back pickled:

    def logits_of(path):                       # at module level: ranks import it by file and name
        ...                                    # torch.distributed and Megatron's groups are initialised
        return tensor

    def test_two_ranks_agree(world):
        first, second = world.run(logits_of, parallelism=ParallelismConfig(tensor=2), path=str(path))

The world of a job has `world_size` ranks (default: the size of one model copy; the rest is data parallelism).
Megatron's state is made anew for every job and destroyed after it. An exception comes back as `RankError` with the
rank and its traceback; a job past its deadline ends the processes, and the next job starts new ones.
`parallelism=None` runs the function without any process group; its rank is then in the environment as RANK.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from megappo.config.parallelism import ParallelismConfig

MAX_RANKS = 4
START_S = 120.0
GRACE_S = 10.0
"""How long the other ranks may take to end after one of them failed."""
_KEY = b"dist-world"


class RankError(Exception):
    """A rank raised, died or was too late; the message holds its traceback."""


class DistWorld:
    """The processes, seen from the test session."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dist-world-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *,
        world_size: int | None = None,
        parallelism: ParallelismConfig | None = None,
        timeout_s: float = 200.0,
        **arguments: Any,
    ) -> list[Any]:
        """Call `function(**arguments)` on every rank and return the results by rank. Raises RankError."""
        size = world_size or (parallelism.model_size if parallelism else 1)
        self._start(size)
        job = {
            "file": inspect.getsourcefile(function),
            "module": function.__module__,
            "name": function.__qualname__,
            "arguments": arguments,
            "world_size": size,
            "parallelism": parallelism,
            "port": free_port(),
            "timeout_s": timeout_s,
        }
        for pipe in self._pipes[:size]:
            pipe.send_bytes(pickle.dumps(job))
        return self._collect(size, time.monotonic() + timeout_s)

    def _start(self, size: int) -> None:
        """Start ranks until there are `size`."""
        assert size <= MAX_RANKS, f"{size} ranks asked for, at most {MAX_RANKS}"
        if any(process.poll() is not None for process in self._processes):
            self.stop()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        new = range(len(self._processes), size)
        addresses = [str(Path(self._folder.name) / f"{time.monotonic_ns()}-{rank}") for rank in new]
        listeners = [Listener(address, authkey=_KEY) for address in addresses]
        for rank, listener in zip(new, listeners):
            command = [sys.executable, "-W", "ignore", __file__, str(rank), str(listener.address)]
            self._processes.append(subprocess.Popen(command, env=environment | {"RANK": str(rank)}))
        for listener in listeners:
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]  # accept() has no timeout
            self._pipes.append(listener.accept())
            listener.close()

    def _collect(self, size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < size:
            open_ranks = [rank for rank in range(size) if rank not in results and rank not in failures]
            ready = wait([self._pipes[rank] for rank in open_ranks], max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(dict.fromkeys(open_ranks, "no answer before the deadline; the processes were ended"))
                self.stop()
                break
            for rank in [rank for rank in open_ranks if self._pipes[rank] in ready]:
                try:
                    succeeded, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    succeeded, value = False, "the process died"
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise RankError("\n".join(f"rank {rank} of {size}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(size)]

    def stop(self) -> None:
        """End all processes; the next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system gives to connections (they could take it)."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _serve(rank: int, address: str) -> None:
    """Run jobs until the session closes its end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the session, not even in a hang
    pipe = Client(address, authkey=_KEY)
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run_job(rank, job)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _run_job(rank: int, job: dict[str, Any]) -> Any:
    function = getattr(_load_module(job["module"], job["file"]), job["name"])
    if job["parallelism"] is None:
        return function(**job["arguments"])
    from megappo.device import backend, process_group

    process_group.init_distributed(
        rank=rank,
        world_size=job["world_size"],
        address="127.0.0.1",
        port=job["port"],
        backend=backend.CPU,
        timeout_s=job["timeout_s"],
    )
    try:
        process_group.init_model_parallel(job["parallelism"], seed=1, timeout_s=job["timeout_s"])
        return function(**job["arguments"])
    finally:
        # After a failure the other ranks are in a collective: leaving the groups ends their wait.
        with contextlib.suppress(RuntimeError):
            process_group.destroy()


def _load_module(name: str, file: str) -> ModuleType:
    """Import a file once per process, under the name it has in the session, so that its classes can be pickled."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
