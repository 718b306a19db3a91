"""Adapters on a model: beside which layers, with which first values, and how they are found again.

Invariants (asserted by tests/models/test_lora.py):
1. A fresh adapter changes nothing: B is zero.
2. The adapter is the same in every layout: A of a matrix is drawn whole, from a seed made of the run's seed and the
   matrix's Hugging Face name, and then cut.
3. Only adapters and a value head want gradients, so gradient buffers and optimizer hold nothing else.
"""

from collections.abc import Iterator, Sequence
from zlib import crc32

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.config.lora import LoraConfig, lora_on_experts
from megappo.errors import CapabilityError
from megappo.models.gpt import LanguageModel
from megappo.models.low_rank import AdaptedLinear, LowRankUpdate, Matrix, Placement
from megappo.models.parameters import hugging_face_shapes, mapped_parameters, shards_of
from megappo.models.value_head import ValueHead
from megappo.weights.name_map import MappedParameter, Partition
from megappo.weights.transforms import shard


def add_adapters(chunks: Sequence[LanguageModel], lora: LoraConfig, *, seed: int) -> None:
    """Freeze the model but for a value head, and put an update beside each layer with a matrix in `lora.targets`.

    To be called before the model is wrapped for data parallelism.

    Raises:
        CapabilityError: the targets are matrices of experts.
    """
    for chunk in chunks:
        has_experts = chunk.architecture.experts is not None
        if violations := lora_on_experts(lora, has_experts=has_experts, key="lora"):
            raise CapabilityError(str(violations[0]))
        for parameter in chunk.parameters():
            parameter.requires_grad = False
        if chunk.post_process and isinstance(chunk.output_layer, ValueHead):
            chunk.output_layer.requires_grad_()
        owners = {
            child.weight: (owner, name)
            for owner in chunk.modules()
            for name, child in owner.named_children()
            if isinstance(getattr(child, "weight", None), torch.nn.Parameter)
        }
        for parameter, mapped in list(mapped_parameters(chunk)):
            if any(_is_target(name, lora) for name in mapped.hugging_face):
                owner, name = owners[parameter]
                update = _make_update(parameter, mapped, chunk, lora, seed=seed)
                setattr(owner, name, AdaptedLinear(getattr(owner, name), update))


def _is_target(name: str, lora: LoraConfig) -> bool:
    """Whether a Hugging Face tensor is a matrix that gets an update."""
    *_, module, kind = name.split(".")
    return kind == "weight" and module in lora.targets


def _make_update(
    parameter: torch.nn.Parameter, mapped: MappedParameter, chunk: LanguageModel, lora: LoraConfig, *, seed: int
) -> LowRankUpdate:
    architecture, shards = chunk.architecture, shards_of(mapped)
    shapes = dict(zip(mapped.hugging_face, hugging_face_shapes(parameter, mapped, architecture)))
    cut = mapped.partition is Partition.column
    matrices: list[Matrix] = []
    starts: dict[str, torch.Tensor] = {}
    for name, (rows, features) in shapes.items():
        is_target = _is_target(name, lora)
        matrices.append(Matrix(name=name, rows=rows // shards.size if cut else rows, is_adapted=is_target))
        if is_target:
            start = _draw_start(name, lora.rank, features, seed=seed)
            # A is cut along its input features where the matrix is.
            starts[name] = start if cut else shard(Partition.row, start, rank=shards.rank, size=shards.size)
    placement = Placement(
        partition=mapped.partition,
        transform=mapped.transform,
        num_groups=architecture.num_key_value_heads // parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=chunk.config.sequence_parallel,
    )
    return LowRankUpdate(matrices, placement, starts=starts, scale=lora.alpha / lora.rank, weight=parameter)


def _draw_start(name: str, rank: int, features: int, *, seed: int) -> torch.Tensor:
    """Return the whole first A [r, I] of a matrix: uniform in +-1 / sqrt(I), as PEFT's (Kaiming with a = sqrt(5))."""
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    bound = features**-0.5
    return torch.empty(rank, features).uniform_(-bound, bound, generator=generator)


def adapted_linears(chunk: MegatronModule) -> list[AdaptedLinear]:
    """Return the layers of a chunk (bare or wrapped) that have an update, in a fixed order."""
    return [module for module in chunk.modules() if isinstance(module, AdaptedLinear)]


def updates_of(chunk: MegatronModule) -> dict[torch.nn.Parameter, LowRankUpdate]:
    """Return the update of each weight that has one."""
    return {layer.base.get_parameter("weight"): layer.update for layer in adapted_linears(chunk)}


def adapter_parameters(chunk: MegatronModule) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield the parameters of the adapters of a chunk under the names that PEFT gives them."""
    for layer in adapted_linears(chunk):
        for name, parameter in layer.update.named_factors():
            yield parameter, name
