"""The sequences of a PPO step at its end, with a critic and a reference policy, as each side holds them.

Shapes: B sequences, P padded prompt tokens, T padded response tokens, N packed tokens (prompts and responses).
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from verl.protocol import DataProto

from benchmarks.algorithm_cases.workloads import SAMPLES, PackedResponses, draw_prompt_lengths, draw_responses
from megappo.balance.layout import RankLayout
from megappo.balance.workload import TOKENS
from megappo.batch.fields import PackedBatch, arrays_of
from megappo.batch.stages import Experience
from megappo.config.algorithm import Aggregation
from megappo.config.batching import BatchingConfig
from megappo.controller.ports import SequenceInfo
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.schedules import schedule_step
from megappo.rewards.types import Reward


@dataclass(kw_only=True, frozen=True)
class Sizes:
    """Size of the step."""

    sequences: int
    response: int
    """T."""
    prompt: int
    """P."""

    def describe(self) -> dict[str, object]:
        """Return them for the report."""
        return {"sequences": self.sequences, "padded response": self.response, "padded prompt": self.prompt, "seed": 0}


class StepBatches:
    """The same sequences as verl's trainer holds them and as megappo's training ranks do."""

    def __init__(self, sizes: Sizes) -> None:
        responses = draw_responses(sizes.sequences, sizes.response)
        self.responses = responses.lengths
        self.prompts = draw_prompt_lengths(sizes.sequences, sizes.prompt)
        packed = PackedResponses(responses, self.prompts)
        values = packed.field(responses.values).values
        batch = packed.batch
        self.packed = Experience(
            **arrays_of(batch),
            loss_mask=batch.response_mask,
            advantages=values,
            old_log_probs=values * np.float32(0.1),
            ref_log_probs=values * np.float32(0.1),
            values=values.copy(),
            returns=values.copy(),
        )
        mask = responses.mask.long()
        before = torch.arange(sizes.prompt)[None] >= sizes.prompt - torch.from_numpy(self.prompts)[:, None]
        attention = torch.cat([before.long(), mask], dim=1)
        scores, filled = responses.rewards, responses.values
        self.padded = DataProto.from_dict(
            # The fields that its trainer has put into the batch by the end of a PPO step.
            tensors={
                "prompts": torch.zeros(sizes.sequences, sizes.prompt, dtype=torch.long),
                "responses": torch.zeros_like(mask),
                "input_ids": torch.zeros_like(attention),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "response_mask": mask,
                "old_log_probs": filled * 0.1,
                "ref_log_prob": filled * 0.1,
                "values": filled,
                "token_level_scores": scores,
                "token_level_rewards": scores.clone(),
                "advantages": filled.clone(),
                "returns": filled.clone(),
            },
            non_tensors={"uid": np.repeat(np.arange(-(-sizes.sequences // SAMPLES)), SAMPLES)[: sizes.sequences]},
        )

    @property
    def response_tokens(self) -> int:
        """Tokens that count."""
        return int(self.responses.sum())

    @property
    def padded_bytes(self) -> int:
        """What verl's trainer holds in its own process."""
        assert self.padded.batch is not None
        return sum(tensor.nbytes for tensor in self.padded.batch.values())

    @property
    def packed_bytes(self) -> int:
        """What megappo's training ranks hold."""
        return bytes_of(self.packed)


def bytes_of(batch: PackedBatch) -> int:
    """Return the bytes of all arrays of a packed batch."""
    return sum(array.nbytes for array in arrays_of(batch).values())


def metadata_bytes(prompts: np.ndarray, responses: np.ndarray, *, ranks: int = 16) -> int:
    """Return what the controller allocates for a step of these lengths: the sequences with their scores, the schedule,
    and the requests of an update."""

    def make() -> object:
        rollouts = ScoredRollouts(
            sequences=[
                SequenceInfo(
                    sequence_id=index,
                    group_id=index // SAMPLES,
                    prompt_tokens=int(prompts[index]),
                    response_tokens=int(responses[index]),
                    finish_reason="stop",
                    policy_version=3,
                    row=index // SAMPLES,
                )
                for index in range(len(prompts))
            ],
            rewards=[Reward(score=float(index % 2)) for index in range(len(prompts))],
            samples={},
        )
        batching = BatchingConfig(
            prompts_per_step=len(prompts) // SAMPLES, samples_per_prompt=SAMPLES, micro_batch_tokens=16384
        )
        schedule = schedule_step(rollouts, batching, data_sizes=[ranks], keep_groups=False, workload=TOKENS)
        requests = schedule.update_requests(
            RankLayout(data=ranks),
            loss_tokens=rollouts.sampled_lengths,
            aggregation=Aggregation.token_mean,
            constant_length=None,
            whitening=None,
        )
        return rollouts, schedule, requests

    make()  # compiles the balancer
    return allocated_bytes(make)


def allocated_bytes(make: Callable[[], object]) -> int:
    """Return the bytes that are allocated for what a function returns."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = make()
        after, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return after - before
