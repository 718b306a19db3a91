"""The actor: log-probs of sampled tokens under the trained or the reference policy, and its update.

Shapes: N packed tokens, T input tokens of a micro-batch, n tokens that it predicts, H hidden features.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state

from megappo.algo.losses import PolicyLossBatch, compute_policy_loss
from megappo.algo.masked import whiten
from megappo.algo.selection import loss_tokens_of, select_tokens
from megappo.batch.requests import MiniBatch, UpdateRequest, Whitening
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import OldLogProbs
from megappo.config.algorithm_declarations import reads_sum_pi_squared
from megappo.config.run import RunConfig
from megappo.device.backend import Backend
from megappo.models.build import Head
from megappo.models.export import WeightExport
from megappo.models.parameters import unwrap
from megappo.observability.metrics import Metrics, mean
from megappo.observability.phases import in_phase
from megappo.train.context import gather_statistics
from megappo.train.fused_head import HeadOptions
from megappo.train.log_probs import TokenStatistics, compute_token_statistics, vocab_shard
from megappo.train.packing import PackedMicroBatch
from megappo.train.reference import FrozenWeights, SwitchedOffAdapters
from megappo.train.trainer import LossFunction, ModelTrainer, token_weights
from megappo.weights.buckets import BucketMeta


class PolicyFields(NamedTuple):
    """What a forward pass of the policy gives per response token."""

    log_probs: TokenField
    sum_pi_squared: TokenField | None
    """Sum over the vocabulary of squared probabilities; only where it is read."""


class ActorTrainer(ModelTrainer):
    """The policy model on this rank, with the reference policy inside if the algorithm needs one."""

    def __init__(self, config: RunConfig, *, backend: Backend) -> None:
        """Build the policy from `model.path`; its starting weights are the reference policy."""
        super().__init__(
            role="actor",
            path=config.model.path,
            model=config.model,
            training=config.actor,
            head=Head.language_model,
            backend=backend,
            seed=config.seed,
        )
        self.algorithm = config.algorithm
        self.temperature = config.rollout.sampling.temperature
        self._fp32_head = config.model.fp32_head
        self._call_timeout_s = config.cluster.call_timeout_s
        self._exports: dict[tuple[int, str | None, bool], WeightExport] = {}
        """By the arguments of `export_buckets`."""
        self._reference: FrozenWeights | SwitchedOffAdapters | None = None
        if self.algorithm.needs_reference:
            make = FrozenWeights if config.actor.lora is None else SwitchedOffAdapters
            self._reference = make(self.chunks)

    @in_phase("log_probs")
    def compute_log_probs(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]], *, reference: bool = False
    ) -> tuple[PolicyFields | None, Metrics]:
        """Log-probs of the sampled tokens of all sequences of the batch, in its order.

        Args:
            micro_batches: sequence ids; together each sequence of the batch once.
            reference: under the reference policy instead of the trained one.

        Returns:
            The log-probs (with the sum of squared probabilities if the advantage estimator reads it), and
            `actor/entropy/mean` (over response tokens; not for the reference). None and no metrics on all but the
            output rank.
        """
        entropies: list[torch.Tensor] = []
        with_squares = reads_sum_pi_squared(self.algorithm) and not reference

        def read(hidden: torch.Tensor, micro_batch: PackedMicroBatch) -> list[torch.Tensor]:
            statistics = self._statistics(
                hidden, micro_batch, with_entropy=not reference, with_sum_squared_probs=with_squares
            )
            if statistics.entropy is not None:
                entropies.append(statistics.entropy.double().sum())
            squares = statistics.sum_squared_probs
            return [statistics.log_probs] if squares is None else [statistics.log_probs, squares]

        self.memory.require_params()
        if reference:
            assert self._reference is not None, "asked for the reference, which algorithm.needs_reference rules out"
        with self._reference.in_place() if reference and self._reference else nullcontext():
            fields = self._compute_token_fields(batch, micro_batches, read, predict=batch.response_mask)
        if fields is None:
            return None, {}
        found = PolicyFields(log_probs=fields[0], sum_pi_squared=fields[1] if with_squares else None)
        if reference:
            return found, {}
        total = torch.stack(entropies).sum().item()
        return found, {"actor/entropy/mean": mean(total, int(batch.response_mask.sum()))}

    @in_phase("update")
    def update(self, experience: Experience, request: UpdateRequest) -> Metrics:
        """Run the update phase: one optimizer step per mini-batch, `epochs` times over.

        Without old log-probs in the experience, those of the forward pass itself are taken, detached: right when the
        request makes one optimizer step.

        Returns:
            `actor/...` of the policy loss (`megappo.algo.losses`) and of the optimizer steps
            (`ModelTrainer._step_metrics`); `actor/entropy/mean` (over loss tokens) only when the old log-probs were
            not recomputed: otherwise `compute_log_probs` has measured it. Nothing on all but the output rank.

        Raises:
            BatchError: ids of the experience and the request do not match.
            NonFiniteError: too many steps in a row had a gradient that is not finite.
        """
        selected = None
        if request.selection is not None:
            selected = np.zeros(experience.num_tokens, bool)
            selected[experience.loss_mask] = select_tokens(
                loss_tokens_of(experience), request.selection, self.algorithm
            )
        steps = [self._policy_step(experience, mini_batch, request, selected) for mini_batch in request.mini_batches]
        return self._optimize(steps, epochs=request.epochs)

    def _policy_step(
        self, experience: Experience, mini_batch: MiniBatch, request: UpdateRequest, selected: np.ndarray | None
    ) -> tuple[list[PackedMicroBatch], LossFunction]:
        """Prepare one optimizer step; `selected` [N] bool marks tokens that some losses treat apart."""
        packed = self._pack(experience, mini_batch.micro_batches, experience.loss_mask)
        inputs = [
            self._loss_batch(
                experience,
                micro_batch,
                weights=token_weights(experience, mini_batch, micro_batch),
                whitening=request.whitening,
                selected=selected,
            )
            for micro_batch in packed
        ]
        measured_before = (
            experience.old_log_probs is not None and self.algorithm.old_log_probs is not OldLogProbs.rollout
        )
        with_entropy = self.algorithm.entropy.coef != 0 or not measured_before
        step_before = self.optimizer.step_number

        def loss(hidden: torch.Tensor, index: int) -> tuple[torch.Tensor, Metrics]:
            statistics = self._statistics(hidden, packed[index], with_entropy=with_entropy)
            batch = replace(
                inputs[index],
                entropy=statistics.entropy,
                is_first_step=self.optimizer.step_number == step_before,
            )
            output = compute_policy_loss(statistics.log_probs, batch, self.algorithm)
            if measured_before:
                output.metrics.pop("actor/entropy/mean", None)
            return output.loss, output.metrics

        return packed, loss

    def _loss_batch(
        self,
        experience: Experience,
        micro_batch: PackedMicroBatch,
        *,
        weights: np.ndarray,
        whitening: Whitening | None,
        selected: np.ndarray | None,
    ) -> PolicyLossBatch:
        """Gather what the loss needs at the n predicted tokens, which are all loss tokens; `weights` is [n]."""
        advantages = whiten(experience.advantages[micro_batch.token_index], whitening)
        return PolicyLossBatch(
            offsets=self._tensor(micro_batch.target_offsets),
            loss_mask=self._tensor(np.ones(len(weights), bool)),
            loss_weights=self._tensor(weights),
            advantages=self._tensor(advantages.astype(np.float32, copy=False)),
            old_log_probs=self._predicted(micro_batch, experience.old_log_probs),
            ref_log_probs=self._predicted(micro_batch, experience.ref_log_probs),
            rollout_log_probs=self._predicted(micro_batch, experience.rollout_log_probs),
            correction_weights=self._predicted(micro_batch, experience.correction_weights),
            selected=self._predicted(micro_batch, selected),
        )

    def export_buckets(
        self, bucket_bytes: int, *, dtype: str | None = None, shared: bool = False
    ) -> Iterator[tuple[BucketMeta, torch.Tensor]]:
        """Yield the weights that this rank sends, under Hugging Face names; see `models.export.iter_export_buckets`."""
        self.memory.require_params()
        key = bucket_bytes, dtype, shared
        if key not in self._exports:
            self._exports[key] = WeightExport(
                self.chunks, bucket_bytes, dtype=dtype, shared=shared, timeout_s=self._call_timeout_s
            )
        return self._exports[key].buckets()

    def _statistics(
        self,
        hidden: torch.Tensor,
        micro_batch: PackedMicroBatch,
        *,
        with_entropy: bool,
        with_sum_squared_probs: bool = False,
    ) -> TokenStatistics:
        """Statistics [n] of the predicted tokens of a micro-batch, from the last hidden states [T, H] of this rank."""
        # With virtual stages the last chunk of the last pipeline rank is the one that gives them.
        weight = unwrap(self.chunks[-1]).output_weight
        options = HeadOptions(
            shard=vocab_shard(
                self.architecture.vocab_size, len(weight), parallel_state.get_tensor_model_parallel_group()
            ),
            temperature=self.temperature,
            with_entropy=with_entropy,
            with_sum_squared_probs=with_sum_squared_probs,
            fp32=self._fp32_head,
        )
        statistics = compute_token_statistics(hidden, weight, micro_batch.rows, micro_batch.targets, options)
        return statistics if micro_batch.split is None else gather_statistics(statistics, micro_batch.split)
