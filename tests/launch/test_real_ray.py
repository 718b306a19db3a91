"""Runs on a Ray cluster that is running already, of two nodes on this machine: a Ray job, and a node that is lost."""

import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megappo.cluster.node import ray_environment
from megappo.launch.hosts import free_port
from tests.launch.real_runs import (
    LAUNCH,
    RUN,
    TIMEOUT_S,
    Nodes,
    assert_gone,
    assert_no_key_in_command_lines,
    descendants,
    kill_tree,
    own_address,
    start,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


class RayCluster:
    """A cluster of two nodes with one device each, at addresses of their own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "ray-nodes.log"
        self.settings = ray_environment(secrets.token_hex(32), interface="lo")
        dashboard_port = free_port(own_address())
        self.dashboard = f"http://{own_address()}:{dashboard_port}"
        program = [sys.executable, "-m", "tests.launch.ray_nodes", "2", str(dashboard_port)]
        self.process = start(program, self._log, folder=folder, **self.settings)
        self.address = self._answer("cluster", 1)
        self._asked = Counter[str]()

    def ask(self, word: str) -> str:
        """Add or remove a node; returns its address."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()
        self._asked[word] += 1
        return self._answer(word, self._asked[word])

    def _answer(self, word: str, number: int) -> str:
        def answers() -> list[str]:
            lines = self._log.read_text(errors="replace").splitlines(keepends=True)
            return [line.split()[1] for line in lines if line.startswith(f"{word} ") and line.endswith("\n")]

        wait_until(lambda: len(answers()) >= number, lambda: self.process.poll() is None, self._log)
        return answers()[number - 1]

    def workers(self) -> list[psutil.Process]:
        """Return the processes of runs, not those of Ray."""
        found: list[psutil.Process] = []
        for process in descendants(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if "ray::" in line and "Agent" not in line:
                    found.append(process)
        return found

    def end(self) -> None:
        processes = descendants(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(120)
            assert_gone(processes)
        finally:
            if self.process.poll() is None:
                kill_tree(self.process.pid)


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[RayCluster]:
    made = RayCluster(work)
    yield made
    made.end()


def train(cluster: RayCluster, nodes: Nodes, *overrides: str) -> None:
    command = [sys.executable, "-m", "megappo", "train", *RUN, f"cluster.address={cluster.address}"]
    nodes.start([*command, "trainer.save_freq=1", *overrides], **cluster.settings)


def test_a_ray_job_runs_on_the_nodes_of_the_cluster_and_its_exit_code_is_told(
    cluster: RayCluster, nodes: Nodes
) -> None:
    script = [str(LAUNCH / "ray_job.sh"), "--address", cluster.dashboard, "--python", sys.executable]
    run = (*RUN, "trainer.save_freq=1000", "run.name=job", "trainer.total_steps=2")
    nodes.start([*script, "--home", str(nodes.folder), "train", *run], **cluster.settings)
    nodes.wait_for("step 1/2")
    processes = [*descendants(cluster.process.pid), *nodes.descendants()]
    assert_no_key_in_command_lines(processes)
    workers = cluster.workers()
    assert nodes.wait() == [0], nodes.output()
    assert "step 2/2" in nodes.output() and "succeeded" in nodes.output()
    assert_gone(workers)

    nodes.start([*script, "--home", str(nodes.folder), "train", "experiment=nowhere"], **cluster.settings)
    assert nodes.processes[1].wait(TIMEOUT_S) == 1, nodes.output(1)
    assert "nowhere" in nodes.output(1) and "exit code 2" in nodes.output(1)


def test_a_run_that_loses_a_node_ends_and_names_what_was_there(cluster: RayCluster, nodes: Nodes) -> None:
    train(cluster, nodes, "run.name=bereft", "trainer.total_steps=500")
    nodes.wait_for("step 2/500")
    processes = [*nodes.descendants(), *cluster.workers()]
    lost = cluster.ask("remove")
    assert nodes.processes[0].wait(180) == 1, nodes.output()
    assert f"on {lost}) failed in " in nodes.output() and "its process died" in nodes.output()
    assert_gone(processes)
    cluster.ask("add")


def test_a_run_that_may_restart_goes_on_when_there_is_another_node(cluster: RayCluster, nodes: Nodes) -> None:
    train(cluster, nodes, "run.name=back", "trainer.total_steps=20", "restart.max=1", "restart.wait_s=0")
    nodes.wait_for("step 2/20")
    processes = [*nodes.descendants(), *cluster.workers()]
    lost = cluster.ask("remove")
    cluster.ask("add")
    nodes.wait_for("step 20/20")
    processes += [*nodes.descendants(), *cluster.workers()]
    assert nodes.wait() == [0], nodes.output()
    assert f"on {lost}) failed in " in nodes.output()
    assert "failed: WorkerError; restart 1 of at most 1 in a row, from the checkpoint of step " in nodes.output()
    assert nodes.output().count("step 1/20") == 1
    assert_gone(processes)
