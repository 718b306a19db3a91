"""Jobs of the distributed trainer tests; each runs on every rank."""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.batch.fields import BatchError, select
from megappo.batch.requests import MiniBatch, TokenSelection, UpdateRequest
from megappo.batch.stages import TokenField
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.errors import NonFiniteError
from megappo.models.export import export_hf_state
from megappo.models.parameters import unwrap
from megappo.observability.metrics import values
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.fused_head import HeadOptions
from megappo.train.log_probs import compute_token_statistics, vocab_shard
from megappo.train.trainer import ModelTrainer
from tests.train import plain
from tests.train.batches import MicroBatches, make_experience, request_of, rollouts_of


@dataclass
class RankResult:
    """What one rank gave back."""

    data_rank: int
    numbers: TokenField | None
    """Log-probs or values of its sequences (output ranks)."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> (total, count)."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of this stage after clipping, under Hugging Face names."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of this stage after the step, under Hugging Face names."""
    tensor_rank: int = 0
    embeddings: list[torch.Tensor] = field(default_factory=list)
    """This rank's copies of a tied embedding after the step: as an input, and as the output weight."""


def run_config(folder: str, parallelism: ParallelismConfig, optim: OptimConfig) -> RunConfig:
    """The configuration that `tests.train.plain` computes by hand."""
    config = RunConfig()
    config.model.path = folder
    config.actor.parallelism = config.critic.parallelism = parallelism
    config.actor.optim = config.critic.optim = optim
    config.rollout.sampling.temperature = plain.TEMPERATURE
    config.algorithm.policy_loss.clip.low = plain.CLIP_LOW
    config.algorithm.policy_loss.clip.high = plain.CLIP_HIGH
    config.algorithm.entropy.coef = plain.ENTROPY_COEF
    config.algorithm.kl.in_loss.coef = plain.KL_COEF
    config.algorithm.value_loss.clip = plain.VALUE_CLIP
    return config


def train_once(
    role: str, folder: str, layout: ParallelismConfig, optim: OptimConfig, deal: list[MicroBatches]
) -> RankResult:
    """A forward pass over this data rank's sequences and one optimizer step on them.

    Args:
        deal: micro-batches of each data rank.
    """
    config = run_config(folder, layout, optim)
    data_rank = parallel_state.get_data_parallel_rank()
    micro_batches = deal[data_rank]
    experience = make_experience()
    experience = select(experience, np.flatnonzero(np.isin(experience.sequence_ids, list(chain(*micro_batches)))))
    trainer: ModelTrainer
    if role == "actor":
        trainer = ActorTrainer(config, backend=CPU)
        fields, metrics = trainer.compute_log_probs(rollouts_of(experience), micro_batches)
        numbers = None if fields is None else fields.log_probs
    else:
        trainer = CriticTrainer(config, backend=CPU)
        numbers, metrics = trainer.compute_values(rollouts_of(experience), micro_batches)
    metrics = {f"forward {name}": stat for name, stat in metrics.items()}
    metrics |= trainer.update(experience, request_of(make_experience(), micro_batches))
    return RankResult(
        data_rank=data_rank,
        numbers=numbers,
        metrics={name: (stat.total, stat.count) for name, stat in metrics.items()},
        weights=weights_now(trainer),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        embeddings=tied_embeddings(trainer),
        gradients={} if optim.distributed else gradients_now(trainer),
    )


def tied_embeddings(trainer: ModelTrainer) -> list[torch.Tensor]:
    """Copies of the embedding where it is tied, one per chunk that uses it."""
    models = [unwrap(chunk) for chunk in trainer.chunks]
    used = [model.shared_embedding_or_output_weight() for model in models if model.share_embeddings_and_output_weights]
    return [weight.detach().clone() for weight in used if weight is not None]


def weights_now(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    """A copy of this stage's weights under Hugging Face names."""
    return {name: tensor.clone() for name, tensor in export_hf_state(trainer.chunks).items()}


def gradients_now(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    """This stage's gradients under Hugging Face names; the weights are lost."""
    with torch.no_grad():
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]  # made by Megatron's DDP
    return weights_now(trainer)


def whole_request(**options: Any) -> UpdateRequest:
    """One micro-batch per mini-batch: two optimizer steps, on all sequences each."""
    request = request_of(make_experience(), [make_experience().sequence_ids.tolist()])
    return replace(request, mini_batches=request.mini_batches * 2, **options)


def spoil_steps(folder: str, layout: ParallelismConfig, optim: OptimConfig, dtype: Dtype) -> dict[str, Any]:
    """A good step, one with an infinite advantage on the last data rank, a good one, then bad ones to the end."""
    config = run_config(folder, layout, optim)
    config.model.dtype = dtype
    trainer = ActorTrainer(config, backend=CPU)
    good, bad = make_experience(), make_experience()
    if parallel_state.get_data_parallel_rank() == parallel_state.get_data_parallel_world_size() - 1:
        bad.advantages[np.flatnonzero(bad.loss_mask)[0]] = np.inf
    request = replace(whole_request(), mini_batches=whole_request().mini_batches[:1])
    trainer.update(good, request)
    before = complete_state(trainer)
    skipped = trainer.update(bad, request)
    after = complete_state(trainer)
    recovered = trainer.update(good, request)
    moved = not same(after, complete_state(trainer))
    error = None
    try:
        trainer.update(bad, replace(request, epochs=optim.max_skipped_steps))
    except NonFiniteError as caught:
        error = str(caught)
    return {
        "untouched": same(before, after),
        "skipped": values(skipped),
        "moved": moved,
        "recovered": values(recovered),
        "steps": trainer.optimizer.step_number,
        "error": error,
    }


def complete_state(trainer: ModelTrainer) -> list[torch.Tensor]:
    """Copies of all weights and all tensors of the optimizer on this rank."""
    tensors = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    return [tensor.detach().clone() for tensor in [*tensors, *trainer.optimizer.state_tensors()]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bitwise equality."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def follow_reference(folder: str, layout: ParallelismConfig, optim: OptimConfig) -> dict[str, Any]:
    """Reference and current log-probs before and after two steps."""
    trainer = ActorTrainer(run_config(folder, layout, optim), backend=CPU)
    experience = make_experience()
    batch, micro_batches = rollouts_of(experience), [experience.sequence_ids.tolist()]

    def log_probs(*, reference: bool) -> np.ndarray | None:
        found, _ = trainer.compute_log_probs(batch, micro_batches, reference=reference)
        return None if found is None else found.log_probs.values

    start, reference_before = log_probs(reference=False), log_probs(reference=True)
    trainer.update(experience, whole_request())
    trained = complete_state(trainer)
    reference_after = log_probs(reference=True)
    return {
        "weights kept": same(trained, complete_state(trainer)),
        "start": start,
        "reference before": reference_before,
        "reference after": reference_after,
        "now": log_probs(reference=False),
    }


@dataclass
class Step:
    """Loss, metrics and gradient of one optimizer step."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    """After clipping, under Hugging Face names."""


def step_of_each_split(folder: str, splits: list[MicroBatches], dtype: Dtype) -> list[Step]:
    """The same step, from the same weights and with the log-probs computed before it, once per split.

    The log-probs are those of the first split."""
    config = run_config(folder, ParallelismConfig(), OptimConfig())
    config.model.dtype = dtype
    steps = []
    experience = make_experience()
    for index, micro_batches in enumerate(splits):
        trainer = ActorTrainer(config, backend=CPU)
        if index == 0:
            fields, _ = trainer.compute_log_probs(rollouts_of(experience), micro_batches)
            assert fields is not None
            experience = replace(experience, old_log_probs=fields.log_probs.values)
        metrics = trainer.update(experience, request_of(experience, micro_batches))
        steps.append(Step(metrics=values(metrics), gradients=gradients_now(trainer)))
    return steps


def metrics_without_old_log_probs(folder: str) -> dict[str, float]:
    """Metrics of an update that no log-prob pass came before."""
    trainer = ActorTrainer(run_config(folder, ParallelismConfig(), OptimConfig()), backend=CPU)
    experience = replace(make_experience(), old_log_probs=None)
    return values(trainer.update(experience, request_of(experience, [experience.sequence_ids.tolist()])))


def norms_by_threshold(folder: str, thresholds: list[float]) -> list[float]:
    """Gradient norm of clip_cov alone when tokens from a threshold on are selected."""
    config = run_config(folder, ParallelismConfig(), OptimConfig())
    config.algorithm.policy_loss.name = "clip_cov"
    config.algorithm.policy_loss.covariance_low, config.algorithm.policy_loss.covariance_high = -np.inf, np.inf
    config.algorithm.entropy.coef = config.algorithm.kl.in_loss.coef = 0.0
    experience = make_experience()
    request = request_of(experience, [experience.sequence_ids.tolist()])
    norms = []
    for threshold in thresholds:
        selection = TokenSelection(mean_log_prob=-4.0, mean_advantage=0.0, scale=1.0, threshold=threshold)
        trainer = ActorTrainer(config, backend=CPU)
        metrics = trainer.update(experience, replace(request, selection=selection))
        norms.append(values(metrics)["actor/grad_norm"])
    return norms


def refused_requests(folder: str) -> list[str]:
    """Messages of the errors for requests that do not fit the batch."""
    config = run_config(folder, ParallelismConfig(), OptimConfig())
    actor, critic = ActorTrainer(config, backend=CPU), CriticTrainer(config, backend=CPU)
    experience = make_experience()
    ids = experience.sequence_ids.tolist()
    request = request_of(experience, [ids])
    unweighted = MiniBatch(micro_batches=[ids], loss_weights={ids[0]: 1.0})
    without_values = replace(experience, values=None)
    messages = []
    for call in (
        lambda: actor.compute_log_probs(rollouts_of(experience), [ids[1:]]),
        lambda: actor.update(experience, replace(request, mini_batches=[unweighted])),
        lambda: critic.update(without_values, request),
    ):
        try:
            call()
        except BatchError as error:
            messages.append(str(error))
    return messages


def starting_values(folder: str) -> np.ndarray:
    """Values [N] of a critic made from a policy folder."""
    critic = CriticTrainer(run_config(folder, ParallelismConfig(), OptimConfig()), backend=CPU)
    experience = make_experience()
    found, _ = critic.compute_values(rollouts_of(experience), [experience.sequence_ids.tolist()])
    assert found is not None
    return found.values


def shard_statistics(vocab_size: int, temperature: float) -> list[torch.Tensor]:
    """Log-probs, entropy, sum of squares, the gradient of the hidden states summed over the ranks, and that of this
    rank's rows of the output weight, which is padded to equal shares."""
    hidden, weight, rows, tokens, weights, bonus = statistics_case(vocab_size)
    group: Any = parallel_state.get_tensor_model_parallel_group()  # Any: Megatron types it as a number, too
    columns = -(-vocab_size // group.size())
    padded = torch.nn.functional.pad(weight, (0, 0, 0, columns * group.size() - vocab_size), value=9.0)
    own = padded[group.rank() * columns :][:columns].clone().requires_grad_()
    hidden.requires_grad_()
    statistics = compute_token_statistics(
        hidden,
        own,
        rows,
        tokens,
        HeadOptions(
            shard=vocab_shard(vocab_size, columns, group),
            temperature=temperature,
            with_entropy=True,
            with_sum_squared_probs=True,
        ),
    )
    assert statistics.entropy is not None and statistics.sum_squared_probs is not None
    (statistics.log_probs @ weights + statistics.entropy @ bonus).backward()
    assert hidden.grad is not None and own.grad is not None
    dist.all_reduce(hidden.grad, group=group)
    results = (statistics.log_probs, statistics.entropy, statistics.sum_squared_probs, hidden.grad, own.grad)
    return [result.detach() for result in results]


def statistics_case(vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Hidden states [11, 8], weight [V, 8], rows [5], tokens [5], weights [5] of log-probs and entropies in a loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(vocab_size, 8, generator=generator)
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2, 1, vocab_size // 2 - 1])
    weights, bonus = torch.randn(2, 5, generator=generator)
    return hidden, weight, torch.tensor([7, 0, 3, 10, 4]), tokens, weights, bonus


def scattered(results: list[RankResult], sequence_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Numbers of all data ranks in the order of the whole batch, [N]; NaN where no rank gave any."""
    numbers = np.full(offsets[-1], np.nan, np.float32)
    for result in results:
        if result.numbers is None:
            continue
        for index, sequence in enumerate(result.numbers.sequence_ids.tolist()):
            place = sequence_ids.tolist().index(sequence)
            start, stop = result.numbers.offsets[index : index + 2]
            numbers[offsets[place] : offsets[place + 1]] = result.numbers.values[start:stop]
    return numbers
