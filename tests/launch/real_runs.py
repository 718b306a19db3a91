"""What tests of real launches share: the run that is launched, processes that stand for nodes, and what is left of
them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TIMEOUT_S = 900
"""A launch that does not get on within it hangs; how fast it is depends on the load of the machine."""
RUN = (
    "experiment=quickstart",
    "rollout=hf",
    "batching.prompts_per_step=8",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "tracking.trackers=[]",
    "cluster.start_timeout_s=600",
    "checkpoint.on_signal_s=300",
)
"""Two workers and an engine on two devices: where every node has one, nothing works unless both do."""
TRAIN = ("train", *RUN, "trainer.save_freq=1000")
WAITS = ("--cpus-per-node", "1", "--join-s", "600", "--ray-s", "600")


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without what a launch puts in, and with `more`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGAPPO_"))}
    fixed = {"PYTHONPATH": str(ROOT), "MEGAPPO_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return inherited | fixed | {"PYTHONWARNINGS": "ignore"} | more


def start(command: Sequence[str], output: Path, *, folder: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in a file. `more`: of its environment."""
    with output.open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**more),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test program in the background ignores Ctrl-C, and what it starts would, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def own_address() -> str:
    """Address of this machine that is not a loopback one."""
    shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    return shown.stdout.split()[0]


class Nodes:
    """Processes that stand for nodes, by rank, with their output."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._name = folder, name
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **more: str) -> None:
        self.processes.append(start(command, self.log(len(self.processes)), folder=self.folder, **more))

    def log(self, rank: int) -> Path:
        return self.folder / f"{self._name}-{rank}.log"

    def output(self, rank: int = 0) -> str:
        return self.log(rank).read_text(errors="replace")

    def wait(self) -> list[int]:
        return [process.wait(TIMEOUT_S) for process in self.processes]

    def wait_for(self, text: str, rank: int = 0) -> None:
        wait_until(lambda: text in self.output(rank), lambda: self.processes[rank].poll() is None, self.log(rank))

    def descendants(self) -> list[psutil.Process]:
        return [child for process in self.processes for child in descendants(process.pid)]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                kill_tree(process.pid)


def wait_until(happened: Callable[[], bool], goes_on: Callable[[], bool], log: Path) -> None:
    """Wait for what a process is to do, and fail with its log where it ends before."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        alive = goes_on() or happened()
        assert alive and time.monotonic() < deadline, log.read_text(errors="replace") if log.exists() else log
        time.sleep(0.3)


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill_tree(pid: int) -> None:
    """Kill a process and all below it at once, as a power cut does: none gets to tell the others."""
    family = [*descendants(pid), psutil.Process(pid)]
    for signal_name in ("suspend", "kill"):
        for process in family:
            with suppress(psutil.NoSuchProcess):
                getattr(process, signal_name)()


def assert_gone(processes: Iterable[psutil.Process]) -> None:
    """Check that nothing of Ray, megappo or a launcher is left."""
    _, alive = psutil.wait_procs(list(processes), timeout=120)
    assert not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def assert_no_key_in_command_lines(processes: Iterable[psutil.Process]) -> None:
    """Check that the key of the processes' Ray is in the command line of none of them, and that there is one."""
    keys: set[str] = set()
    lines: list[str] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            lines.append(" ".join(process.cmdline()))
            keys.add(process.environ().get("RAY_AUTH_TOKEN", ""))
    keys.discard("")
    assert keys and all(len(key) == 64 for key in keys)
    assert not [line for line in lines for key in keys if key in line]
