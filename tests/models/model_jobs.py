"""Jobs of the distributed model tests: build a model from a folder, run it packed, and give back what it computed."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from megappo.config.model import Dtype, LayerSpec
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.models.architecture import read_architecture
from megappo.models.attention import pack_lengths, position_ids
from megappo.models.build import Head, build_model
from megappo.models.export import export_hf_state
from megappo.models.load import load_hf_weights

Sequences = list[list[int]]


@dataclass
class RankResult:
    """What one rank computed."""

    outputs: list[torch.Tensor] | None
    """Last stage: per micro-batch the logits [T, vocab] or values [T]."""
    loss: float
    gradients: dict[str, torch.Tensor]
    """Of this stage, under Hugging Face names."""


def loaded_model(folder: str, head: Head, layout: ParallelismConfig, dtype: Dtype = Dtype.float32) -> Any:
    architecture = read_architecture(folder)
    chunks = build_model(
        architecture, parallelism=layout, dtype=dtype, layer_spec=LayerSpec.auto, head=head, backend=CPU
    )
    load_hf_weights(chunks, architecture, folder)
    return chunks


def call_packed(model: Any, sequences: Sequences) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    device = torch.device("cpu")
    tokens = torch.tensor([list(chain(*sequences))])
    positions = position_ids(lengths, device=device)
    return model(tokens, positions, None, packed_seq_params=pack_lengths(lengths, device=device))


def language_model_loss(logits: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Sum of next-token cross-entropies. logits [T, vocab]."""
    parts = logits.float().split([len(sequence) for sequence in sequences])
    return sum(
        F.cross_entropy(part[:-1], torch.tensor(sequence[1:], dtype=torch.int64), reduction="sum")
        for part, sequence in zip(parts, sequences)
    )  # type: ignore[return-value]


def value_loss(values: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Sum of squared distances to a made-up target. values [T]."""
    target = torch.tensor(list(chain(*sequences))).float() / 10
    return ((values - target) ** 2).sum()


def forward_backward(
    *, folder: str, head: Head, layout: ParallelismConfig, micro_batches: list[Sequences], dtype: Dtype = Dtype.float32
) -> RankResult:
    """One forward and backward pass over the micro-batches with Megatron's schedule and gradient reduction."""
    chunks = loaded_model(folder, head, layout, dtype)
    config = chunks[0].config
    wrapped: list[torch.nn.Module] = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks
    ]
    config.finalize_model_grads_func = finalize_model_grads
    outputs: list[torch.Tensor] = []

    def forward_step(batches: Any, model: Any) -> Any:
        sequences = next(batches)
        output = call_packed(model, sequences)

        def loss_of(output: torch.Tensor) -> Any:
            whole = output[0] if head is Head.value_function else gather_from_tensor_model_parallel_region(output[0])
            outputs.append(whole.detach().clone())
            loss = (value_loss if head is Head.value_function else language_model_loss)(whole, sequences)
            return loss * len(micro_batches), {"loss": loss.detach().clone()}

        return output, loss_of

    iterators = [iter(micro_batches) for _ in wrapped]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(wrapped) > 1 else iterators[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(micro_batches),
        seq_length=sum(len(sequence) for sequence in micro_batches[0]),
        micro_batch_size=1,
        forward_only=False,
    )
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad.clone()  # exported under the names of the parameters
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return RankResult(
        outputs=outputs if last else None,
        loss=float(sum(report["loss"] for report in reports)),
        gradients=export_hf_state(chunks),
    )


def exported(*, folder: str, head: Head, layout: ParallelismConfig) -> dict[str, torch.Tensor]:
    """Load and export again."""
    return export_hf_state(loaded_model(folder, head, layout))
