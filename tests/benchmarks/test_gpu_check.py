"""The parts of the check of a GPU, on a CPU, and what it says without a GPU."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.check import Check, SkippedError
from benchmarks.gpu.parity import TINY, Run, compare, make_model, start, step_check
from benchmarks.gpu.shared_handle import check_shared_handle
from benchmarks.gpu.tiled_log_probs import check_tiles
from benchmarks.gpu_check import run_parts

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_agree_with_the_whole_logits(dtype: torch.dtype) -> None:
    checks = list(check_tiles(CPU, dtype, tokens=16, vocabulary=9000, features=32))
    assert [check.name.rsplit(": ", 1)[1] for check in checks] == ["log-probs", "entropy", "gradient"]
    assert all(check.passed for check in checks), checks


def test_parts_that_fail_or_are_skipped_do_not_keep_others_from_running() -> None:
    def passes() -> Iterator[Check]:
        yield Check(name="a", difference=0.0, tolerance=0.0)
        yield Check(name="b", difference=float("nan"), tolerance=1.0)

    def skips() -> Iterator[Check]:
        raise SkippedError("it is not installed")
        yield

    def breaks() -> Iterator[Check]:
        raise RuntimeError("no memory left")
        yield

    found = run_parts({"breaks": breaks, "skips": skips, "passes": passes})
    assert [(check["name"], check["passed"]) for check in found["checks"]] == [
        ("breaks", False),
        ("a", True),
        ("b", False),
    ]
    assert found["checks"][0]["error"] == "RuntimeError: no memory left"
    assert found["skipped"] == {"skips": "it is not installed"}


@pytest.mark.slow
def test_a_bucket_is_opened_and_written_by_another_process() -> None:
    checks = list(check_shared_handle(CPU))
    assert len(checks) == 2 and all(check.passed for check in checks), checks


@pytest.mark.slow
def test_two_updates_on_the_cpu_are_equal(tmp_path: Path) -> None:
    tiny = make_model(tmp_path / "tiny", TINY)
    first, second = (start(Run(device="cpu"), tiny) for _ in range(2))
    checks = [*compare("cpu", first, second, tolerance=0.0), step_check("cpu", first, second)]
    assert len(checks) == 5 and all(check.passed for check in checks), checks
    assert second["changes"] and max(float(change.abs().max()) for change in second["changes"].values()) > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_3_and_says_so() -> None:
    python = str(ROOT / ".venv" / "bin" / "python")
    done = subprocess.run(
        ["benchmarks/gpu_check.sh"],
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHON": python},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3 and "sees no CUDA device" in done.stderr
    assert json.loads(done.stdout) == {"device": None, "torch": torch.__version__, "checks": [], "skipped": {}}
