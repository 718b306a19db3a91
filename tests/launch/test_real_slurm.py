"""The scripts for Slurm under a real one, of two nodes on this machine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.real_runs import LAUNCH, TIMEOUT_S, TRAIN, WAITS, assert_gone, assert_no_key_in_command_lines
from tests.launch.slurm_jobs import Slurm, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]
SCRIPT = (str(LAUNCH / "slurm.sbatch"), "--env", "cpu", *WAITS)


@pytest.fixture(scope="module")
def slurm_nodes(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster"), work) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_nodes: Slurm) -> Iterator[Slurm]:
    """The two nodes, which are free again after the test."""
    yield slurm_nodes
    slurm_nodes.cancel_all()


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_job_saves_at_the_signal_requeues_itself_and_goes_on_from_there(slurm: Slurm) -> None:
    run = ("run.name=slurm", "trainer.total_steps=500")
    job = slurm.ask("sbatch", "--parsable", "--nodes", "2", *SCRIPT, *TRAIN, *run)
    log, node_log = f"megappo-{job}.log", f"megappo-{job}-node0.log"
    folder = slurm.work / "runs/slurm"
    slurm.wait_for(job, node_log, "step 1/500")
    first = slurm.processes(job)
    assert_no_key_in_command_lines(first)

    slurm.ask("scancel", "--signal=USR1", job)  # what --signal=USR1@180 does before the time limit
    slurm.wait_for(job, log, "the run saved; requeued")
    assert "ended early (SIGUSR1)" in slurm.log(node_log)
    assert "node 0 ended the launch with exit code 85" in slurm.log(f"megappo-{job}-node1.log")
    saved = int((folder / "checkpoints/latest").read_text().strip().removeprefix("step_"))
    assert saved >= 1

    slurm.wait_for(job, node_log, f"resuming from {folder / f'checkpoints/step_{saved:06}'}")
    slurm.wait_for(job, node_log, f"step {saved + 1}/500")
    second = slurm.processes(job)
    assert slurm.shown(job, "Restarts") == "1"
    assert slurm.log(node_log).count("step 1/500") == 1
    assert steps_of(folder) == list(range(1, len(steps_of(folder)) + 1))

    slurm.ask("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    assert_gone({*first, *second, *slurm.processes(job)})


def test_a_chain_goes_on_where_a_job_ended_until_one_completes_the_run(slurm: Slurm) -> None:
    run = ("run.name=chain", "trainer.total_steps=12")
    told = slurm.ask(str(LAUNCH / "slurm_chain.sh"), "3", "--nodes", "2", "--", *SCRIPT, *TRAIN, *run)
    first, second, third = re.findall(r"^job \d of 3: (\d+)$", told, re.MULTILINE)
    slurm.wait_for(first, f"megappo-{first}-node0.log", "step 1/12")
    assert [slurm.shown(job, "JobState") for job in (second, third)] == ["PENDING", "PENDING"]
    slurm.ask("scancel", "--signal=USR1", first)
    slurm.wait_for_state(first, "FAILED")
    assert slurm.shown(first, "ExitCode") == "85:0" and slurm.shown(first, "Restarts") == "0"

    slurm.wait_for_state(second, "COMPLETED")
    log = slurm.log(f"megappo-{second}-node0.log")
    assert "step 1/12" not in log and "step 12/12" in log
    assert steps_of(slurm.work / "runs/chain") == list(range(1, 13))
    slurm.wait_for_state(third, "CANCELLED")
    assert not list(slurm.work.glob(f"megappo-{third}*.log"))
    assert_gone([process for job in (first, second, third) for process in slurm.processes(job)])


def test_a_benchmark_runs_on_two_nodes_of_a_job(slurm: Slurm) -> None:
    script = [str(LAUNCH / "slurm_bench.sbatch"), "--env", "cpu"]
    job = slurm.ask("sbatch", "--parsable", "--nodes", "2", *script, "train_mfu", "--model", "tiny", "--quick")
    slurm.wait_for_state(job, "COMPLETED")
    report = json.loads((slurm.work / "runs/benchmarks/train_mfu.json").read_text())
    case = report["cases"]["as given"]
    assert case["figures"]["devices"] == 2 and case["details"]["launcher"] == "torchrun", slurm.log(
        f"megappo-bench-{job}.log"
    )
    assert_gone(slurm.processes(job))
