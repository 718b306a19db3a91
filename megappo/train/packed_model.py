"""One Megatron model on this rank, and forward passes over packed micro-batches.

Shapes: N packed tokens and B sequences of a batch, T input tokens of a micro-batch, n tokens that it predicts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule

from megappo.batch.fields import BatchError
from megappo.batch.stages import TokenField
from megappo.config.lora import LoraConfig
from megappo.config.model import ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import Backend
from megappo.models.architecture import read_architecture
from megappo.models.build import Head, build_model
from megappo.models.context import ContextShare
from megappo.models.expert_ranks import most_of_expert_ranks
from megappo.models.gpt import LanguageModel
from megappo.models.load import load_hf_weights
from megappo.models.precision import fp8_token_multiple
from megappo.models.random_weights import draw_random_weights
from megappo.models.save import save_hf_model
from megappo.observability.phases import in_phase, phase
from megappo.train.offload import TrainerMemory
from megappo.train.packing import PackableBatch, PackedMicroBatch, PackingRules, pack_micro_batches
from megappo.train.weight_facts import weight_facts

T = TypeVar("T")


class PackedModel:
    """Base of what runs a model. All ranks that hold a part of it call every method together, with the same arguments
    within a data-parallel rank. Results are there on the output rank only.

    Subclasses set `chunks` and `memory`.
    """

    chunks: Sequence[MegatronModule]
    """Of this rank, bare or wrapped for training."""
    memory: TrainerMemory

    def __init__(
        self, *, path: str, model: ModelConfig, parallelism: ParallelismConfig, lora: LoraConfig | None = None
    ) -> None:
        """Say what is built: a model of the architecture in the Hugging Face folder `path`."""
        self._path = path
        self._model = model
        self._lora = lora
        self.parallelism = parallelism
        self.architecture = read_architecture(path)
        interleaved = parallelism.virtual_pipeline is not None
        self._rules = PackingRules(
            multiple=(parallelism.tensor if parallelism.sequence else 1) * fp8_token_multiple(model.fp8),
            # Without virtual stages the stages tell each other the shapes (models/build.py).
            equal_counts=interleaved,
            share=ContextShare.of_this_rank(),
        )
        # The interleaved schedule runs micro-batches in groups of the number of stages.
        self._micro_batch_multiple = parallelism.pipeline if interleaved else 1

    def _build(self, head: Head, backend: Backend, *, seed: int) -> list[LanguageModel]:
        """Return the chunks of this rank with the weights of the folder.

        Args:
            seed: of the first values of adapters.

        Raises:
            CapabilityError: the layout asks for what the model cannot do.
            CheckpointError: the weights do not fit.
        """
        chunks = build_model(
            self.architecture,
            model=self._model,
            parallelism=self.parallelism,
            head=head,
            backend=backend,
            lora=self._lora,
            seed=seed,
        )
        if self._model.random_weights:
            draw_random_weights(chunks)
        else:
            load_hf_weights(chunks, self.architecture, self._path)
        return chunks

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.chunks[0].parameters()).device

    @property
    def is_output_rank(self) -> bool:
        """Whether results come back on this rank: first tensor and context rank of the last pipeline stage."""
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    @in_phase("save_hf")
    def save_hf(self, folder: str | Path, config: Mapping[str, object] | None = None) -> None:
        """Write the weights as a Hugging Face folder, with the side files of the starting model. All ranks take part.

        Args:
            config: keys of config.json to set.

        Raises:
            CheckpointError: on every rank, when one of them cannot write.
        """
        self.memory.require_params()
        save_hf_model(self.chunks, self._path, folder, config=config)

    def weight_checksums(self) -> dict[str, str]:
        """Return the checksums of the tensors that this rank sends in an export, by Hugging Face name. All ranks take
        part; layouts and devices give the same ones."""
        self.memory.require_params()
        return {name: facts.checksum for name, facts in weight_facts(self.chunks).items()}

    def _pack(
        self, batch: PackableBatch, micro_batches: Sequence[Sequence[int]], predict: np.ndarray
    ) -> list[PackedMicroBatch]:
        """Pack the micro-batches of one pass, with empty ones behind them where the schedule wants a multiple, or where
        ranks with more micro-batches meet this one in the experts."""
        count = most_of_expert_ranks(len(micro_batches), self.device)
        missing = count + -count % self._micro_batch_multiple - len(micro_batches)
        return pack_micro_batches(
            batch, [*micro_batches, *[[]] * missing], predict=predict, rules=self._rules, device=self.device
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _compute_token_fields(
        self,
        batch: PackableBatch,
        micro_batches: Sequence[Sequence[int]],
        read: Callable[..., Sequence[torch.Tensor]],
        *,
        predict: np.ndarray,
    ) -> list[TokenField] | None:
        """Run a forward pass over all sequences and return one field per quantity read, in the order of the batch.

        Args:
            predict: [N] bool, the entries before which something is read; the fields are 0 elsewhere.
            read: (model output, its micro-batch) -> quantities [n] fp32, one number per entry asked for.

        Raises:
            BatchError: a sequence of the batch is in no micro-batch.
        """
        named = sum(len(ids) for ids in micro_batches)
        if named != batch.num_sequences:
            raise BatchError(f"micro-batches name {named} sequences, the batch has {batch.num_sequences}")
        packed = self._pack(batch, micro_batches, predict)
        results = self._run_forward(packed, lambda output, index: read(output, packed[index]))
        if not self.is_output_rank:
            return None
        fields: list[TokenField] = []
        for quantity in zip(*results):
            values = np.zeros(batch.num_tokens, np.float32)
            for micro_batch, numbers in zip(packed, quantity):
                values[micro_batch.token_index] = numbers.cpu().numpy()
            fields.append(TokenField(offsets=batch.offsets, values=values, sequence_ids=batch.sequence_ids))
        return fields

    def _run_forward(self, packed: list[PackedMicroBatch], read: Callable[[torch.Tensor, int], T]) -> list[T]:
        """Return `read(output, number)` of every micro-batch, in order; an empty list before the last stage."""
        self.memory.require_params()
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            return self._schedule(packed, lambda output, index, non_loss_data: read(output, index), forward_only=True)

    def _schedule(self, packed: list[PackedMicroBatch], function: Callable[..., Any], *, forward_only: bool) -> Any:
        """Run Megatron's schedule; returns what it collected from `function`."""

        def forward_step(micro_batches: Iterator[tuple[int, PackedMicroBatch]], chunk: MegatronModule) -> Any:
            index, micro_batch = next(micro_batches)
            with phase("forward", micro_batch=index, tokens=micro_batch.num_tokens):
                output = chunk(
                    micro_batch.input_ids,
                    micro_batch.position_ids,
                    None,
                    packed_seq_params=micro_batch.packed_seq_params,
                )
            return output, lambda output, **options: function(output.squeeze(0), index, **options)

        iterators = [iter(list(enumerate(packed))) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self.chunks),
            num_microbatches=len(packed),
            seq_length=packed[0].num_tokens,  # of all context-parallel ranks: schedules.py:1020,1963 divides by them
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
