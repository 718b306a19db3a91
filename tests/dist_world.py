"""One long-lived gloo world of up to four processes, shared by all tests of a pytest session.

Importing torch and Megatron takes many seconds, so one process does it, ranks are its forks (as many as are asked for),
and they run job after job. A job is a function of a test module or of a module beside it; every rank calls it with the
same arguments and its result comes back pickled:

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
import importlib
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from megappo.config.parallelism import ParallelismConfig

MAX_RANKS = 4
START_S = 120.0
GRACE_S = 10.0
"""How long the other ranks may take to end after one of them failed."""
_KEY = b"dist-world"


class RankError(Exception):
    """A rank raised, died or was too late; the message holds its traceback."""


class DistWorld:
    """The processes, seen from the test session.

    Args:
        imported: modules that ranks have from their start.
    """

    def __init__(self, imported: Sequence[str] = ("megappo.train.actor", "transformers")) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dist-world-")
        self._imported = imported
        self._parent: subprocess.Popen[bytes] | None = None
        self._orders: Connection | None = None
        """To the parent of the ranks."""
        self._processes: list[psutil.Process] = []
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
        if not all(process.is_running() for process in self._processes):
            self._stop_ranks()
        orders = self._orders or self._start_parent()
        for rank in range(len(self._processes), size):
            listener = self._listen()
            orders.send((rank, listener.address))
            self._processes.append(psutil.Process(orders.recv()))
            self._pipes.append(_accept(listener))

    def _start_parent(self) -> Connection:
        """Start the process that ranks are forked from; returns the way to it."""
        listener = self._listen()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-W", "ignore", __file__, str(listener.address), *self._imported]
        self._parent = subprocess.Popen(command, env=environment)
        self._orders = _accept(listener)
        return self._orders

    def _listen(self) -> Listener:
        return Listener(str(Path(self._folder.name) / str(time.monotonic_ns())), authkey=_KEY)

    def _collect(self, size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < size:
            open_ranks = [rank for rank in range(size) if rank not in results and rank not in failures]
            ready = wait([self._pipes[rank] for rank in open_ranks], max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(dict.fromkeys(open_ranks, "no answer before the deadline; the processes were ended"))
                self._stop_ranks()
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
        self._stop_ranks()
        if self._parent is not None and self._orders is not None:
            self._orders.close()
            self._parent.kill()
            self._parent.wait()
        self._parent, self._orders = None, None

    def _stop_ranks(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _accept(listener: Listener) -> Connection:
    listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]  # accept() has no timeout
    with listener:
        return listener.accept()


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system gives to connections (they could take it)."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _end_with_parent() -> None:
    """Never outlive the process that started this one, not even in a hang."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _fork_ranks(address: str, imported: Sequence[str]) -> None:
    """Fork a rank for every order, (rank, address), and answer with its process, until the session closes its end."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks
    orders = Client(address, authkey=_KEY)
    for name in imported:
        importlib.import_module(name)
    while True:
        try:
            rank, own_address = orders.recv()
        except EOFError:
            return
        process = os.fork()
        if process:
            orders.send(process)
            continue
        orders.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ["RANK"] = str(rank)
        _serve(rank, own_address)
        return


def _serve(rank: int, address: str) -> None:
    """Run jobs until the session closes its end."""
    _end_with_parent()
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
    _fork_ranks(sys.argv[1], sys.argv[2:])
