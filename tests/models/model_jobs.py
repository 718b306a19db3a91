"""Jobs of the distributed model tests: build a model from a folder, run it packed, and give back what it computed."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from megappo.config.model import Dtype, ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.models.architecture import read_architecture
from megappo.models.attention import pack_lengths
from megappo.models.build import Head, build_model
from megappo.models.context import ContextShare, held_positions
from megappo.models.export import export_hf_state
from megappo.models.load import load_hf_weights
from megappo.models.parameters import unwrap

Sequences = list[list[int]]


@dataclass
class RankResult:
    """What one rank computed."""

    outputs: dict[int, torch.Tensor] | None
    """Last stage: logits [T, vocab] or values [T] of the micro-batches of this data-parallel rank, by number."""
    loss: float
    """Sum over all micro-batches."""
    gradients: dict[str, torch.Tensor]
    """Of this stage, under Hugging Face names."""


def loaded_model(folder: str, head: Head, layout: ParallelismConfig, dtype: Dtype = Dtype.float32) -> Any:
    architecture = read_architecture(folder)
    chunks = build_model(architecture, model=ModelConfig(dtype=dtype), parallelism=layout, head=head, backend=CPU)
    load_hf_weights(chunks, architecture, folder)
    return chunks


def call_packed(model: Any, sequences: Sequences) -> torch.Tensor:
    """Run the tokens that this rank holds; under context parallelism lengths are multiples of twice its size."""
    lengths = [len(sequence) for sequence in sequences]
    share = ContextShare.of_this_rank()
    tokens = torch.tensor(list(chain(*sequences)))[held_positions(lengths, share)]
    packed = pack_lengths(lengths, device=torch.device("cpu"), share=share)
    return model(tokens[None], packed.positions[None], None, packed_seq_params=packed)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """This rank's columns of the logits, [T, vocab / tensor], of the hidden states [T, H] that the last stage gives."""
    return hidden @ unwrap(model).output_weight.t()


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
    """One forward and backward pass over the micro-batches with Megatron's schedule and gradient reduction.

    Data-parallel rank r takes micro-batches r, r + size, ...; loss and gradient are sums, as in training.
    """
    chunks = loaded_model(folder, head, layout, dtype)
    config = chunks[0].config
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = lambda chunks, _, **groups: finalize_model_grads(chunks, None, **groups)
    wrapped: list[torch.nn.Module] = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks
    ]
    vocab_size = chunks[0].architecture.vocab_size
    replicas: Any = parallel_state.get_data_parallel_group()  # Any: Megatron's groups may be numbers
    own = range(replicas.rank(), len(micro_batches), replicas.size())
    outputs: list[torch.Tensor] = []

    def forward_step(batches: Any, model: Any) -> Any:
        sequences = next(batches)
        output = call_packed(model, sequences)

        def loss_of(output: torch.Tensor) -> Any:
            whole = output[0]
            if head is Head.language_model:
                whole = gather_from_tensor_model_parallel_region(logits_of(model, whole))[:, :vocab_size]
            outputs.append(whole.detach().clone())
            loss = (value_loss if head is Head.value_function else language_model_loss)(whole, sequences)
            return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach().clone()}

        return output, loss_of

    iterators = [iter([micro_batches[number] for number in own]) for _ in wrapped]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(wrapped) > 1 else iterators[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(own),
        seq_length=sum(len(sequence) for sequence in micro_batches[0]),
        micro_batch_size=1,
        forward_only=False,
    )
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad.clone()  # exported under the names of the parameters
    loss = torch.stack([torch.zeros(()), *(report["loss"] for report in reports)]).sum()
    dist.all_reduce(loss, group=replicas)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return RankResult(
        outputs=dict(zip(own, outputs)) if last else None,
        loss=float(loss),
        gradients=export_hf_state(chunks),
    )


def forward_backward_of_all(
    *, folders: list[str], layout: ParallelismConfig, micro_batches: list[Sequences]
) -> list[RankResult]:
    """The same for several policies."""
    return [
        forward_backward(folder=folder, head=Head.language_model, layout=layout, micro_batches=micro_batches)
        for folder in folders
    ]


def exported(*, folder: str, head: Head, layout: ParallelismConfig) -> dict[str, torch.Tensor]:
    """Load and export again."""
    return export_hf_state(loaded_model(folder, head, layout))
