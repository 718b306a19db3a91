"""Bytes that a trained model has on each rank: weights, gradients, optimizer. Exact (tests/planning builds them).

What is not here: torch's step counters of Adam (4 bytes per parameter, in host memory) and everything that comes and
goes within a phase.
"""

from dataclasses import dataclass
from functools import lru_cache

from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, OptimizerName
from megappo.config.parallelism import ParallelismConfig
from megappo.planning.buffers import BufferLayout, bucket_elements, lay_out
from megappo.planning.parameters import LocalParameter, PlannedModel, chunk_parameters

ELEMENT_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_FLOAT32 = 4


@dataclass(kw_only=True, slots=True, frozen=True)
class RankMemory:
    """Bytes on one rank. All but the last three are on its device."""

    weights: int
    """With the padding of a distributed optimizer's buffers; with adapters, the frozen weights."""
    adapters: int = 0
    """Adapters, and the value head beside them; 0 without."""
    gradients: int = 0
    """Buffers of float32, padding included."""
    master_weights: int = 0
    """Copies in float32 of what the rank steps; 0 where the weights are of that type."""
    moments: int = 0
    """State of the optimizer after its first step, float32."""
    largest_parameter: int = 0
    """Moved at a time where the reference policy's weights change places with the trained ones."""
    plain_weights: int = 0
    """All weights without padding: what a frozen copy of them takes."""
    saved: int = 0
    """What the rank writes of a checkpoint, on average over the ranks that could write it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Coordinates:
    """Where a rank stands in the mesh of its model."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_data: int
    """Among the ranks that hold the same experts."""


def coordinates(layout: ParallelismConfig, rank: int, devices: int) -> Coordinates:
    """Return where a rank stands, numbered as Megatron does: tensor, context, data, pipeline; for experts, over the
    same ranks of a stage: expert tensor, expert, expert data (megatron/core/parallel_state.py:417)."""
    stage_ranks = devices // layout.pipeline
    place = rank % stage_ranks
    return Coordinates(
        tensor=place % layout.tensor,
        context=place // layout.tensor % layout.context,
        data=place // (layout.tensor * layout.context),
        pipeline=rank // stage_ranks,
        expert=place // layout.expert_tensor % layout.expert,
        expert_data=place // (layout.expert_tensor * layout.expert),
    )


@dataclass(kw_only=True, slots=True)
class TrainedModel:
    """A model on its ranks."""

    model: PlannedModel
    layout: ParallelismConfig
    devices: int
    dtype: Dtype
    optim: OptimConfig | None
    """None: it only scores."""
    lora: LoraConfig | None = None


def memory_of_ranks(trained: TrainedModel) -> list[RankMemory]:
    """Return the bytes of every rank, by rank."""
    stages = [_Stage(trained, stage) for stage in range(trained.layout.pipeline)]
    places = [coordinates(trained.layout, rank, trained.devices) for rank in range(trained.devices)]
    width = trained.layout.context
    return [
        # Data and context ranks share a buffer, context ranks first.
        stages[place.pipeline].memory(place.data * width + place.context, place.expert_data)
        for place in places
    ]


class _Stage:
    """One pipeline stage: all its ranks hold parameters of the same sizes."""

    def __init__(self, trained: TrainedModel, stage: int) -> None:
        layout = trained.layout
        self._trained = trained
        chunks = chunk_parameters(trained.model, layout, stage=stage, lora=trained.lora)
        self._parameters = [parameter for chunk in chunks for parameter in chunk]
        stage_ranks = trained.devices // layout.pipeline
        self._ranks = {False: stage_ranks // layout.tensor, True: stage_ranks // (layout.expert * layout.expert_tensor)}
        self._buffers = [] if trained.optim is None else list(self._lay_out(chunks, trained.optim, stage))
        self.memory = lru_cache(maxsize=None)(self._memory)

    def _lay_out(
        self, chunks: list[list[LocalParameter]], optim: OptimConfig, stage: int
    ) -> list[tuple[bool, BufferLayout]]:
        """Return (of experts, layout) of the buffers: a chunk's dense parameters, then its experts."""
        data_ranks = self._ranks[False] // self._trained.layout.context
        found: list[tuple[bool, BufferLayout]] = []
        for index, chunk in enumerate(chunks):
            # Megatron cuts into buckets where gradients are summed behind the backward pass, on the first stage, and
            # of its first chunk only (distributed_data_parallel.py:105).
            is_cut = optim.overlap_grad_reduce and stage == 0 and index == 0
            size = bucket_elements(wanted=optim.overlap_bucket_params, ranks=data_ranks) if is_cut else None
            for of_experts in (False, True):
                held = [p for p in chunk if p.is_trained and p.is_of_expert is of_experts]
                if held:
                    layout = lay_out(
                        held, distributed=optim.distributed, ranks=self._ranks[of_experts], bucket_elements=size
                    )
                    found.append((of_experts, layout))
        return found

    def _memory(self, dense_rank: int, expert_rank: int) -> RankMemory:
        """Args: the rank's places among those that share its dense buffers and its buffers of experts."""
        trained, optim = self._trained, self._trained.optim
        size = ELEMENT_BYTES[trained.dtype]
        plain = sum(parameter.elements for parameter in self._parameters)
        largest = max((parameter.elements for parameter in self._parameters), default=0)
        if optim is None:
            return RankMemory(weights=plain * size, largest_parameter=largest * size, plain_weights=plain * size)
        frozen = sum(parameter.elements for parameter in self._parameters if not parameter.is_trained)
        in_buffers = sum(layout.elements for _, layout in self._buffers)
        stepped = sum(
            self._stepped(of_experts, layout, dense_rank, expert_rank) for of_experts, layout in self._buffers
        )
        state = _states(optim) * _FLOAT32 + (_FLOAT32 if trained.dtype is not Dtype.float32 else 0)
        return RankMemory(
            weights=(frozen + (0 if trained.lora else in_buffers)) * size,
            adapters=in_buffers * size if trained.lora else 0,
            gradients=in_buffers * _FLOAT32,
            master_weights=stepped * _FLOAT32 if trained.dtype is not Dtype.float32 else 0,
            moments=stepped * _states(optim) * _FLOAT32,
            largest_parameter=largest * size,
            plain_weights=plain * size,
            saved=self._written(size + (0 if optim.distributed else state))
            + (stepped * state if optim.distributed else 0),
        )

    def _stepped(self, of_experts: bool, layout: BufferLayout, dense_rank: int, expert_rank: int) -> int:
        optim = self._trained.optim
        if optim is None or not optim.distributed:
            return sum(end - start for start, end in layout.places)
        return layout.owned(expert_rank if of_experts else dense_rank, self._ranks[of_experts])

    def _written(self, bytes_per_element: int) -> int:
        """Return the bytes of trained parameters, each shared by the ranks that hold the same of it."""
        return sum(
            parameter.elements * bytes_per_element // self._ranks[parameter.is_of_expert]
            for parameter in self._parameters
            if parameter.is_trained
        )


def _states(optim: OptimConfig) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps."""
    if optim.name is OptimizerName.adam:
        return 2
    return 1 if optim.momentum else 0
