"""Does the CUDA path compute what the CPU path does? Prints a table on stderr and a JSON summary on stdout.

- parity: a tiny Qwen2 model takes one actor update (log-probs, loss, gradient, optimizer step, export) on the CPU with
  gloo and on the GPU with NCCL, in float32 and bfloat16, and with Transformer Engine where it is installed;
- tiled log-probs: values, gradients and memory with a vocabulary of 152 thousand;
- shared handle: a bucket of weights is opened by another process, as in a hand-over on shared devices;
- speed: tokens/s, TFLOP/s and MFU of the update of a model of 1.5 billion parameters with the local layers.

A part that cannot run here is skipped, which the summary says; one that fails does not keep the others from running.
Exit codes: 0 all checks pass, 1 one fails, 3 there is no GPU.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check, SkippedError
from benchmarks.gpu.parity import TINY, Run, compare, make_model, start, step_check
from benchmarks.gpu.shared_handle import check_shared_handle
from benchmarks.gpu.tiled_log_probs import check_tiles

NO_GPU = 3
SPEED_MODEL = "qwen2_5_1_5b"
_SPEED_GIB = 40
"""Weights, gradients and optimizer state take 28 GB."""
_SPEED_TIMEOUT_S = 240.0


def main() -> int:
    """Run all checks and print the report."""
    if not torch.cuda.is_available():
        print(f"gpu_check: torch {torch.__version__} sees no CUDA device; nothing was checked", file=sys.stderr)
        print(json.dumps({"device": None, "torch": torch.__version__, "checks": [], "skipped": {}}))
        return NO_GPU
    device, speed = torch.device("cuda", 0), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], Iterator[Check]]] = {
            "parity": partial(check_parity, Path(folder)),
            "parity with Transformer Engine": partial(check_transformer_engine, Path(folder)),
            "tiled log-probs, float32": partial(check_tiles, device, torch.float32),
            "tiled log-probs, bfloat16": partial(check_tiles, device, torch.bfloat16),
            "shared handle": partial(check_shared_handle, device),
            "speed": partial(measure_speed, Path(folder), speed),
        }
        found = run_parts(parts)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **found,
        "speed": speed or None,
    }
    print(json.dumps(report, indent=2))
    return 0 if report["checks"] and all(check["passed"] for check in report["checks"]) else 1


def run_parts(parts: dict[str, Callable[[], Iterator[Check]]]) -> dict[str, Any]:  # Any: JSON
    """Run one part after the other; returns `checks` and what was `skipped`, with reasons."""
    checks: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, part in parts.items():
        try:
            for check in part():
                checks.append(asdict(check) | {"passed": check.passed})
                verdict = "pass" if check.passed else "FAIL"
                numbers = f"{check.difference:.2e} <= {check.tolerance:.2e}"
                print(f"{verdict}  {check.name:<62} {numbers}", file=sys.stderr, flush=True)
        except SkippedError as reason:
            skipped[name] = str(reason)
            print(f"skip  {name}: {reason}", file=sys.stderr, flush=True)
        except Exception as error:  # whatever a device or a driver may raise: the other parts say more
            checks.append({"name": name, "error": f"{type(error).__name__}: {error}", "passed": False})
            print(f"FAIL  {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return {"checks": checks, "skipped": skipped}


def check_parity(folder: Path) -> Iterator[Check]:
    """Compare updates on CUDA with one on the CPU."""
    tiny = make_model(folder / "tiny", TINY)
    reference = start(Run(device="cpu"), tiny)
    torch.save(reference, folder / "reference.pt")
    float32 = start(Run(device="cuda"), tiny)
    yield from compare("cuda float32", float32, reference, tolerance=1e-4)
    yield step_check("cuda float32", float32, reference)
    bfloat16 = start(Run(device="cuda", dtype="bfloat16"), tiny)
    yield from compare("cuda bfloat16", bfloat16, reference, tolerance=0.1)


def check_transformer_engine(folder: Path) -> Iterator[Check]:
    """Compare an update of Transformer Engine's layers with the same one; after `check_parity`."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise SkippedError("transformer_engine is not installed")
    run = Run(device="cuda", dtype="bfloat16", layer_spec="transformer_engine")
    reference = torch.load(folder / "reference.pt")
    yield from compare("cuda bfloat16 transformer_engine", start(run, folder / "tiny"), reference, tolerance=0.1)


def measure_speed(folder: Path, speed: dict[str, Any]) -> Iterator[Check]:  # Any: JSON
    """Put the figures of `benchmarks.train_mfu` into `speed`; there is nothing to compare them with."""
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if memory < _SPEED_GIB:
        raise SkippedError(f"the device has {memory:.0f} GiB, {SPEED_MODEL} in training takes up to {_SPEED_GIB}")
    output = folder / "speed.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train_mfu", "--model", SPEED_MODEL]
    command += ["--mean-tokens", "1024", "--longest", "4096", "--output", str(output)]
    command += ["model=bfloat16", "model.layer_spec=local", "batching.micro_batch_tokens=16384"]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=_SPEED_TIMEOUT_S)
    (case,) = json.loads(output.read_text(encoding="utf-8"))["cases"].values()
    speed |= {"model": SPEED_MODEL, **case["figures"]}
    yield from ()


if __name__ == "__main__":
    sys.exit(main())
