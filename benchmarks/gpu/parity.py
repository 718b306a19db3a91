"""One actor update of a tiny model on a device (log-probs, loss, gradient, optimizer step, export), and the
comparison of two of them. Each runs in a process of its own: a world of one rank, with gloo or NCCL.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.check import Check

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


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """One process: an update of a model on a device."""

    device: str
    dtype: str = "float32"
    layer_spec: str = "local"
    num_sequences: int = 12
    longest: int = 90
    """Lengths are spread from 2 to this many tokens."""


def main() -> None:
    """Make one run, for `start`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=json.loads)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    torch.save(run_update(Run(**arguments.run), arguments.folder), arguments.result)


def make_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """Write a random Qwen2 model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.05)).save_pretrained(folder)
    return folder


def start(run: Run, folder: Path) -> dict[str, Any]:
    """Make the run in a process of its own and return its results."""
    result = folder.parent / "result.pt"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.parity"]
    command += [json.dumps(asdict(run)), str(folder), str(result)]
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
    """Build the actor, compute log-probs and make an update."""
    from safetensors.torch import load_file

    from megappo.models.export import export_hf_state

    trainer = make_trainer(run, folder)
    batch, experience, request = make_batch(run, trainer.architecture.vocab_size)
    source = load_file(folder / "model.safetensors")
    exported = {name: tensor.cpu().clone() for name, tensor in export_hf_state(trainer.chunks).items()}
    wrong = sum(not torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in source.items())
    fields, _ = trainer.compute_log_probs(batch, request.mini_batches[0].micro_batches)
    metrics = trainer.update(experience, request)
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
    }


def make_trainer(run: Run, folder: Path) -> Any:  # Any: megatron is imported in the process that needs it
    """Return the actor of a world of one process."""
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
    return ActorTrainer(config, backend=backend)


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
    main()
