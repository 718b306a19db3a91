"""Supervised fine-tuning through the actor's own update: cross-entropy is the policy-gradient loss with advantage 1.

Shapes: N packed tokens, B sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megappo.batch.fields import select
from megappo.batch.refs import Ref
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch
from megappo.config.batching import BatchingConfig
from megappo.config.record import SftConfig
from megappo.controller.ports import ActorClient
from megappo.controller.schedules import plan_for_layout
from megappo.errors import DataError
from megappo.observability.metrics import Metrics, values

_LOSS_MEMORY = 0.9
"""Weight of the past in the running mean that `sft.stop_loss` is held against."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SftStep:
    """What is told of one supervised step."""

    step: int
    loss: float
    """Mean cross-entropy of the batch, nats per answer token."""
    running_loss: float
    metrics: dict[str, float]


def run_sft(
    pairs: RolloutBatch,
    config: SftConfig,
    *,
    actor: ActorClient,
    put: Callable[[Experience], Ref[Experience]],
    batching: BatchingConfig,
    seed: int,
) -> Iterator[SftStep]:
    """Train until `max_steps` or until the running loss is below `stop_loss`; yields every step.

    Args:
        pairs: prompt and answer of every row; the response mask is on the answer and its end token.
        put: makes a handle of one shard's experience.
    """
    if pairs.num_sequences < config.batch_size:
        raise DataError(
            f"sft: {pairs.num_sequences} pairs are fewer than one batch of {config.batch_size} "
            "(give more rows, or lower sft.batch_size)"
        )
    order = np.random.default_rng(seed)
    running: float | None = None
    for step in range(1, config.max_steps + 1):
        chosen = order.choice(pairs.num_sequences, size=config.batch_size, replace=False)
        experience = _supervised(select(pairs, np.sort(chosen)))
        metrics = values(_update(actor, experience, batching, put))
        loss = metrics["actor/policy_loss"]
        running = loss if running is None else _LOSS_MEMORY * running + (1 - _LOSS_MEMORY) * loss
        yield SftStep(step=step, loss=loss, running_loss=running, metrics=metrics)
        if config.stop_loss is not None and running < config.stop_loss:
            return


def _supervised(batch: RolloutBatch) -> Experience:
    """Return pairs as experience with advantage 1 on the answer tokens."""
    return Experience(
        offsets=batch.offsets,
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        rollout_log_probs=batch.rollout_log_probs,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        loss_mask=batch.response_mask,
        advantages=batch.response_mask.astype(np.float32),
    )


def _update(
    actor: ActorClient,
    experience: Experience,
    batching: BatchingConfig,
    put: Callable[[Experience], Ref[Experience]],
) -> Metrics:
    """Run one optimizer step on one mini-batch, dealt over the data-parallel ranks."""
    ranks = [list(range(rank, experience.num_sequences, actor.layout.data)) for rank in range(actor.layout.data)]
    plan = plan_for_layout(ranks, experience.lengths, layout=actor.layout, batching=batching)
    weight = 1.0 / float(experience.loss_mask.sum())
    ids = experience.sequence_ids
    requests: list[UpdateRequest] = []
    for micro_batches in plan:
        named = [[int(ids[position]) for position in positions] for positions in micro_batches]
        weights = {sequence_id: weight for positions in named for sequence_id in positions}
        requests.append(UpdateRequest(mini_batches=[MiniBatch(micro_batches=named, loss_weights=weights)]))
    return actor.update([put(select(experience, positions)) for positions in ranks], requests)
