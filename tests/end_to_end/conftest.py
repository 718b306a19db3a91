"""Real runs of the command line, in processes of their own, and the starting model they share."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megappo.data.tokenizer import load_tokenizer
from tests.rewards.tiny_reward_model import make_random_reward_model

START_TIMEOUT_S = 240
END_TIMEOUT_S = 90
"""A run that does not end within it hangs; how fast it ends depends on the load of the machine."""
ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """One `megappo` process."""

    process: subprocess.Popen[str]
    output_path: Path
    directory: Path

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; a run that does not end in time is killed and fails the test."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end within {timeout_s} s\n{self.output}")

    def wait_for_step(self, step: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until metrics.jsonl has a line of the given step."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(line["step"] >= step for line in self.metrics()):
                return
            time.sleep(0.2)
        self.kill()
        pytest.fail(f"step {step} was not reached\n{self.output}")

    def kill(self) -> None:
        for process in self.descendants():
            process.kill()
        self.process.kill()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self) -> None:
        """What Ctrl-C in the terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of all steps; not that of the validation before them, step 0."""
        path = self.directory / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["step"] > 0]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())


Launch = Callable[..., Run]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of all runs: `runs/` is made in it."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def launch(workspace: Path) -> Launch:
    """Start `megappo COMMAND experiment=... overrides...`; the run's name is `name`. `killed`: arguments of
    tests/end_to_end/killed.py, by which one of its processes is killed."""

    def start(command: str, name: str, *overrides: str, killed: Sequence[str] = ()) -> Run:
        output = workspace / f"{name}.out"
        program = ["tests.end_to_end.killed", *killed] if killed else ["megappo"]
        arguments = [sys.executable, "-m", *program, command, *overrides, f"run.name={name}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
        with output.open("w") as file:
            process = subprocess.Popen(
                arguments,
                cwd=workspace,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                # A test program that runs in the background ignores Ctrl-C, and what it starts would, too.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        return Run(process=process, output_path=output, directory=workspace / "runs" / name)

    return start


@pytest.fixture(scope="session")
def sft_run(launch: Launch) -> Run:
    """A finished supervised run of a few steps."""
    run = launch("sft", "x", "experiment=quickstart", "sft.max_steps=25")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    return run


@pytest.fixture(scope="session")
def ppo_overrides(sft_run: Run, workspace: Path) -> list[str]:
    """A PPO run of three steps: a critic, adaptive KL in the reward, a sequence-classification model that scores."""
    tokenizer = load_tokenizer(str(workspace / "runs/quickstart-sft/model"))
    reward_model = make_random_reward_model(workspace / "reward-model", tokenizer)
    return [
        "experiment=quickstart_ppo",
        "rollout=hf",
        "reward.name=model",
        f"reward.model_path={reward_model}",
        "reward.params={}",
        "algorithm.kl.in_reward.coef=0.05",
        "trainer.critic_warmup=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "batching.prompts_per_step=8",
        "data.validation.size=5510",
        "trainer.total_steps=3",
        "trainer.export_hf_freq=3",
    ]


@pytest.fixture(scope="session")
def ppo_run(launch: Launch, ppo_overrides: list[str]) -> Run:
    """That run, finished, with checkpoints, and a record of its last step."""
    run = launch("train", "ppo", *ppo_overrides, "trainer.save_freq=2", "record.steps=[3]")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    return run


def assert_all_gone(processes: list[psutil.Process], timeout_s: float = 5.0) -> None:
    """Check that none of the processes is alive (zombies of other parents aside)."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    running = [line for process in alive if (line := command_line_of(process))]
    assert not running, running


def command_line_of(process: psutil.Process) -> list[str]:
    """Command line of a running process; empty when it is gone or a zombie."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline() or [process.name()]
    except psutil.NoSuchProcess:
        return []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run starts in half a minute on an idle machine and in minutes on a busy one; each wait has its own deadline."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
