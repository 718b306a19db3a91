"""Does the CUDA path compute what the CPU path does? Prints a table on stderr and a JSON report on stdout.

A tiny Qwen2 model takes one actor update (log-probs, loss, gradient, optimizer step, export) on the CPU with gloo and
on the GPU with NCCL, each in a process of its own; the results must agree. Then bfloat16 and, where it is installed,
Transformer Engine are held against it, and one update of a model of 0.5 billion parameters is timed (seconds, TFLOP/s,
MFU where the device's peak is known).

Exit codes: 0 all checks pass, 1 one fails, 3 there is no GPU.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NO_GPU = 3
RUN_TIMEOUT_S = 180.0
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """One process: an update of a model on a device."""

    device: str
    dtype: str = "float32"
    layer_spec: str = "local"
    updates: int = 1
    """Updates that are made; the last one is timed."""
    num_sequences: int = 12
    longest: int = 90
    """Lengths are spread from 2 to this many tokens."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Check:
    """One comparison: the largest difference that was found and the largest that is allowed."""

    name: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


def main() -> int:
    """Run all checks and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)  # a process of this program's own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        torch.save(run_update(Run(**arguments.run), arguments.folder), arguments.result)
        return 0
    if not torch.cuda.is_available():
        print(f"gpu_check: torch {torch.__version__} sees no CUDA device; nothing was checked", file=sys.stderr)
        print(json.dumps({"device": None, "torch": torch.__version__, "checks": []}))
        return NO_GPU
    with tempfile.TemporaryDirectory() as folder:
        report = build_report(Path(folder))
    for check in report["checks"]:
        verdict = "pass" if check["passed"] else "FAIL"
        print(f"{verdict}  {check['name']:<50} {check['difference']:.2e} <= {check['tolerance']:.2e}", file=sys.stderr)
    print(json.dumps(report, indent=2))
    return 0 if all(check["passed"] for check in report["checks"]) else 1


def build_report(folder: Path) -> dict[str, Any]:  # Any: a JSON object
    """Make the models, run the processes and compare."""
    tiny = make_model(folder / "tiny", TINY)
    reference = start(Run(device="cpu"), tiny)
    float32 = start(Run(device="cuda"), tiny)
    checks = [
        *compare("cuda float32", float32, reference, tolerance=1e-4),
        step_check("cuda float32", float32, reference),
    ]
    checks += compare("cuda bfloat16", start(Run(device="cuda", dtype="bfloat16"), tiny), reference, tolerance=0.1)
    if importlib.util.find_spec("transformer_engine") is not None:
        run = Run(device="cuda", dtype="bfloat16", layer_spec="transformer_engine")
        checks += compare("cuda bfloat16 transformer_engine", start(run, tiny), reference, tolerance=0.1)
    large = make_model(folder / "large", HALF_BILLION)
    timed = Run(device="cuda", dtype="bfloat16", updates=3, num_sequences=16, longest=1024)
    speed = start(timed, large)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "half_billion_update": {name: speed[name] for name in ("tokens", "seconds", "tflops", "mfu", "peak_bytes")},
    }


def make_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """Write a random Qwen2 model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.05)).save_pretrained(folder)
    return folder


def start(run: Run, folder: Path) -> dict[str, Any]:
    """Make the run in a process of its own and return its results."""
    result = folder.parent / "result.pt"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check"]
    command += ["--run", json.dumps(asdict(run)), "--folder", str(folder), "--result", str(result)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=RUN_TIMEOUT_S)
    return torch.load(result)


def compare(name: str, result: dict[str, Any], reference: dict[str, Any], *, tolerance: float) -> Iterator[Check]:
    """Compare a run with the reference."""
    difference = float((result["log_probs"] - reference["log_probs"]).abs().max())
    yield Check(name=f"{name}: log-probs", difference=difference, tolerance=tolerance)
    loss = abs(result["loss"] - reference["loss"])
    yield Check(name=f"{name}: loss", difference=loss, tolerance=tolerance)
    gradients = relative_difference(result["gradients"], reference["gradients"])
    yield Check(name=f"{name}: gradient", difference=gradients, tolerance=tolerance)
    yield Check(name=f"{name}: wrong tensors in the export", difference=result["export_errors"], tolerance=0)


def step_check(name: str, result: dict[str, Any], reference: dict[str, Any]) -> Check:
    """Compare what the optimizer step did; in float32 only, since bfloat16 weights round most of it away."""
    difference = relative_difference(result["changes"], reference["changes"])
    return Check(name=f"{name}: optimizer step", difference=difference, tolerance=1e-3)


def relative_difference(tensors: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference over all tensors, relative to the largest entry of all of the reference."""
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    return max(float((tensors[name].float() - tensor).abs().max()) for name, tensor in reference.items()) / largest


def run_update(run: Run, folder: Path) -> dict[str, Any]:  # Any: tensors and numbers by name
    """Build the actor, compute log-probs and make the updates."""
    from safetensors.torch import load_file

    from megappo.models.export import export_hf_state

    trainer, backend = make_trainer(run, folder)
    batch, experience, request = make_batch(run, trainer.architecture.vocab_size)
    source = load_file(folder / "model.safetensors")
    exported = {name: tensor.cpu().clone() for name, tensor in export_hf_state(trainer.chunks).items()}
    wrong = sum(not torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in source.items())
    fields, _ = trainer.compute_log_probs(batch, request.mini_batches[0].micro_batches)
    for _ in range(run.updates):
        seconds = -time.perf_counter()
        metrics = trainer.update(experience, request)  # its metrics are numbers: the device has finished
        seconds += time.perf_counter()
    after = export_hf_state(trainer.chunks)
    changes = {name: tensor.cpu().float() - exported[name].float() for name, tensor in after.items()}
    with torch.no_grad():
        for parameter in trainer.chunks[0].parameters():
            parameter.data = parameter.main_grad  # exported under the names of the parameters
    gradients = {name: tensor.cpu() for name, tensor in export_hf_state(trainer.chunks).items()}
    loss = metrics["actor/loss/mean"]
    return {
        "log_probs": torch.from_numpy(fields.log_probs.values),
        "loss": loss.total / loss.count,
        "gradients": gradients,
        "changes": changes,
        "export_errors": wrong,
        "tokens": batch.num_tokens,
        "seconds": seconds,
        **speed_of(batch, seconds, folder, dtype=run.dtype, device_name=backend.device_name()),
        "peak_bytes": torch.cuda.max_memory_allocated() if backend.kind == "cuda" else 0,
    }


def speed_of(batch: Any, seconds: float, folder: Path, *, dtype: str, device_name: str) -> dict[str, float | None]:
    """Return the useful TFLOP/s of an update and its share of the device's peak (None: not known)."""
    from megappo.observability.device_peaks import MatmulFormat, peak_flops
    from megappo.observability.flops import model_flops, pass_size

    size = pass_size(batch.lengths, predictions=int(batch.response_mask.sum()))
    rate = model_flops(json.loads((folder / "config.json").read_text())).training(size) / seconds
    peak = peak_flops(device_name, MatmulFormat(dtype))
    return {"tflops": rate / 1e12, "mfu": None if peak is None else rate / peak}


def make_trainer(run: Run, folder: Path) -> tuple[Any, Any]:
    """Return the actor of a world of one process, and the back end."""
    from megappo.config.cluster import DeviceKind
    from megappo.config.model import Dtype, LayerSpec
    from megappo.config.parallelism import ParallelismConfig
    from megappo.config.run import RunConfig
    from megappo.device.backend import resolve_backend
    from megappo.device.process_group import init_distributed, init_model_parallel
    from megappo.train.actor import ActorTrainer

    backend = resolve_backend(DeviceKind(run.device))
    # Port 0: any free one, since nobody else joins.
    init_distributed(rank=0, world_size=1, address="127.0.0.1", port=0, backend=backend, timeout_s=60.0)
    init_model_parallel(ParallelismConfig(), seed=0)
    config = RunConfig()
    config.model.path = str(folder)
    config.model.dtype = Dtype(run.dtype)
    config.model.layer_spec = LayerSpec(run.layer_spec)
    config.actor.optim.lr = 1e-2
    # Large against the gradients, so that the first step is not their sign, which rounding can turn.
    config.actor.optim.eps = 1.0
    return ActorTrainer(config, backend=backend), backend


def make_batch(run: Run, vocab_size: int) -> tuple[Any, Any, Any]:
    """Return sampled sequences, their experience, and the request of one optimizer step in two micro-batches."""
    from megappo.batch.fields import offsets_of
    from megappo.batch.requests import MiniBatch, UpdateRequest
    from megappo.batch.stages import Experience, RolloutBatch

    random = np.random.default_rng(0)
    lengths = np.linspace(2, run.longest, run.num_sequences).astype(np.int64)
    num_tokens = int(lengths.sum())
    response_mask = np.concatenate([np.arange(length) >= (length + 1) // 2 for length in lengths])
    log_probs = np.where(response_mask, -np.log(vocab_size), 0).astype(np.float32)
    ids = np.arange(run.num_sequences)
    sampled = {
        "offsets": offsets_of(lengths),
        "tokens": random.integers(0, vocab_size, num_tokens).astype(np.int32),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "sequence_ids": ids,
        "group_ids": ids // 2,
    }
    experience = Experience(
        **sampled,
        loss_mask=response_mask,
        advantages=np.where(response_mask, random.normal(size=num_tokens), 0).astype(np.float32),
        old_log_probs=log_probs,
    )
    weights = dict.fromkeys(ids.tolist(), 1 / int(response_mask.sum()))
    halves = [ids[::2].tolist(), ids[1::2].tolist()]
    request = UpdateRequest(mini_batches=[MiniBatch(micro_batches=halves, loss_weights=weights)])
    return RolloutBatch(**sampled), experience, request


if __name__ == "__main__":
    sys.exit(main())
