"""One PPO step, hop by hop. Reads like the paper; every line is a plain call to a port or a pure function.

Shapes: B sequences of the step. Tokens never come here: shards, log-probs, values and experience are handles.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megappo.algo.advantages import (
    SequenceInputs,
    compute_sequence_advantages,
    estimator_of,
    group_metrics,
    needs_sequence_advantages,
)
from megappo.algo.experience import ExperienceTotals, RewardTotals, merge_experience_metrics, merge_whitening
from megappo.algo.kl import KLCoefficient
from megappo.algo.losses import aggregation_of
from megappo.algo.selection import close_selection, count_selected, open_selection
from megappo.balance.workload import Workload
from megappo.batch.refs import Ref
from megappo.batch.requests import TokenSelection, Whitening
from megappo.batch.stages import Experience, TokenField
from megappo.config.algorithm import Aggregation, AlgorithmConfig, OldLogProbs
from megappo.config.algorithm_declarations import AdvantageScope, reads_old_log_probs, selects_tokens
from megappo.config.run import RunConfig
from megappo.controller.ports import ActorClient, CriticClient, RewardClient, RolloutClient, Shard, WeightSync
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.sampling import StepRollouts, StepSampler
from megappo.controller.schedules import StepSchedule, schedule_step
from megappo.controller.state import LoopState
from megappo.controller.throughput import StepThroughput
from megappo.data.sampler import PromptSampler
from megappo.observability.metrics import Metrics, mean, merge, minimum, total
from megappo.observability.timing import PhaseTimer


@dataclass(kw_only=True, slots=True)
class Components:
    """Everything a run is made of, behind ports."""

    config: RunConfig
    sampler: PromptSampler
    rollout: RolloutClient
    reward: RewardClient
    actor: ActorClient
    critic: CriticClient | None
    weight_sync: WeightSync
    kl_coefficient: KLCoefficient
    workload: Workload
    """What a sequence costs the actor."""
    throughput: StepThroughput
    step_sampler: StepSampler = field(init=False)

    def __post_init__(self) -> None:
        self.step_sampler = StepSampler(self.config, prompts=self.sampler, rollout=self.rollout, reward=self.reward)


class StepResult(NamedTuple):
    """What one step leaves behind."""

    metrics: Metrics
    rollouts: ScoredRollouts
    """What was trained on."""


def run_ppo_step(parts: Components, state: LoopState, *, save: Callable[[], None] | None = None) -> StepResult:
    """Run one step: sample, score, learn, save, hand the weights over. The state's counters advance.

    Args:
        save: writes a checkpoint when one is due; before the hand-over, whose failure must not cost it.
    """
    timer = PhaseTimer()
    with timer.phase("step"):
        # 1-2  prompts and rollouts, scored as they finish
        sampled = parts.step_sampler.sample(state, timer)
        metrics = [sampled.metrics]
        learned = bool(sampled.train.sequences)
        if learned:
            metrics.append(learn(parts, state, sampled, timer))
        else:
            # As in `learn`: the engines forget the tokens of groups that were dropped.
            parts.rollout.pack([], forget=sampled.forget)
        state.step += 1
        # 9  save when due
        if save is not None:
            with timer.phase("save"):
                save()
        # 10  the engines get the new weights
        with timer.phase("weight_sync"):
            metrics.append(hand_over(parts, state.step, asleep=learned))
    metrics += [timer.metrics(), step_metrics(parts, sampled.train, seconds=timer.seconds("step"))]
    return StepResult(merge(metrics), sampled.train)


def learn(parts: Components, state: LoopState, sampled: StepRollouts, timer: PhaseTimer) -> Metrics:
    """Hops 3-8: schedule, log-probs, values, experience, updates. The engines sleep from the first pass on."""
    config, rollouts = parts.config, sampled.train
    # 3  who computes what
    schedule = schedule_step(
        rollouts,
        config.batching,
        data_sizes=[client.layout.data for client in (parts.actor, parts.critic) if client is not None],
        keep_groups=estimator_of(config.algorithm).declaration.scope is AdvantageScope.group_token,
        workload=parts.workload,
    )
    shards = parts.rollout.pack(schedule.shard_ids(), forget=sampled.forget)
    parts.rollout.sleep()
    # 4-6  log-probs, values, experience
    experience, totals, metrics = make_experience(parts, rollouts, schedule, shards, timer)
    # 7-8  critic, then actor once the critic is warm
    updated = update_models(parts, state, schedule, experience, totals, timer)
    rates = parts.throughput.phases(
        rollouts.lengths,
        response_tokens=int(rollouts.response_lengths.sum()),
        loss_tokens=sum(int(part.loss_tokens.sum()) for part in totals),
        log_prob_passes=int(needs_old_log_probs(config)) + int(config.algorithm.needs_reference),
        epochs=config.batching.ppo_epochs,
        seconds=timer.seconds,
    )
    return merge([metrics, updated, rates, {"schedule/imbalance": mean(schedule.imbalance(), 1)}])


def needs_old_log_probs(config: RunConfig) -> bool:
    """Whether log-probs are recomputed before the update.

    `auto` skips the pass when the batch is used for one optimizer step (then old equals current), all of it was
    sampled by the current weights (dynamic sampling may carry groups over) and nothing before the update asks for it.
    """
    algorithm, batching = config.algorithm, config.batching
    if algorithm.old_log_probs is not OldLogProbs.auto:
        return algorithm.old_log_probs is OldLogProbs.recompute
    several_steps = batching.ppo_epochs * batching.num_mini_batches > 1
    return several_steps or algorithm.sampling.max_rounds > 0 or reads_old_log_probs(algorithm)


def make_experience(
    parts: Components, rollouts: ScoredRollouts, schedule: StepSchedule, shards: list[Shard], timer: PhaseTimer
) -> tuple[list[Ref[Experience]], list[ExperienceTotals], Metrics]:
    """Hops 4-6: old and reference log-probs, values, token rewards, advantages, correction."""
    config, actor, critic = parts.config, parts.actor, parts.critic
    algorithm = config.algorithm
    old: list[Ref[TokenField]] | None = None
    ref: list[Ref[TokenField]] | None = None
    values: list[Ref[TokenField]] | None = None
    metrics: list[Metrics] = []
    with timer.phase("log_probs"):
        plan = schedule.plan_pass(actor.layout)
        if needs_old_log_probs(config):
            old, found = actor.compute_log_probs(shards, plan)
            metrics.append(found)
        if algorithm.needs_reference:
            ref, _ = actor.compute_log_probs(shards, plan, reference=True)
    if critic is not None:
        actor.offload()
        with timer.phase("values"):
            values, found = critic.compute_values(shards, schedule.plan_pass(critic.layout))
            metrics.append(found)
    with timer.phase("experience"):
        truncated = schedule.per_shard(rollouts.truncated)
        rewards, reward_totals = actor.compute_token_rewards(
            shards,
            scores=schedule.per_shard(rollouts.scores),
            truncated=truncated,
            old_log_probs=old,
            ref_log_probs=ref,
            kl_coef=parts.kl_coefficient.value,
        )
        inputs = sequence_inputs(rollouts, schedule, reward_totals)
        experience, totals = actor.build_experience(
            shards,
            rewards=rewards,
            truncated=truncated,
            sequence_advantages=sequence_advantages(inputs, schedule, algorithm),
            values=values,
            old_log_probs=old,
            ref_log_probs=ref,
        )
    metrics += [merge_experience_metrics(totals), group_metrics(inputs), *(part.metrics for part in reward_totals)]
    if algorithm.kl.in_reward.coef > 0:
        metrics.append({"kl/in_reward/coef": mean(parts.kl_coefficient.value, 1)})
        parts.kl_coefficient.update([part.kl for part in reward_totals])
    return experience, totals, merge(metrics)


def sequence_inputs(
    rollouts: ScoredRollouts, schedule: StepSchedule, reward_totals: list[RewardTotals]
) -> SequenceInputs:
    """Return what is known of every sequence once its token rewards are summed."""
    return SequenceInputs(
        scores=schedule.gather([totals.returns for totals in reward_totals]),
        sequence_ids=schedule.sequence_ids,
        group_ids=rollouts.group_ids,
        response_tokens=rollouts.response_lengths,
        parts=[reward.parts for reward in rollouts.rewards],
        greedy_scores=rollouts.greedy_baseline,
    )


def sequence_advantages(
    inputs: SequenceInputs, schedule: StepSchedule, algorithm: AlgorithmConfig
) -> list[np.ndarray] | None:
    """Advantages of estimators that need only scores and groups, per shard; None for all others."""
    if not needs_sequence_advantages(algorithm):
        return None
    return schedule.per_shard(compute_sequence_advantages(inputs, algorithm))


def update_models(
    parts: Components,
    state: LoopState,
    schedule: StepSchedule,
    experience: list[Ref[Experience]],
    totals: list[ExperienceTotals],
    timer: PhaseTimer,
) -> Metrics:
    """Hops 7-8: critic update, then actor update once `trainer.critic_warmup` steps are done."""
    config = parts.config
    loss_tokens = schedule.gather([part.loss_tokens for part in totals])
    metrics: Metrics = {}
    if parts.critic is not None:
        with timer.phase("update_critic"):
            requests = schedule.update_requests(
                parts.critic.layout,
                loss_tokens=loss_tokens,
                aggregation=Aggregation.token_mean,
                constant_length=None,
                whitening=None,
            )
            metrics |= parts.critic.update(experience, requests)
        parts.critic.offload()
    if parts.critic is None or state.step >= config.trainer.critic_warmup:
        with timer.phase("update_actor"):
            whitening = merge_whitening(totals)
            requests = schedule.update_requests(
                parts.actor.layout,
                loss_tokens=loss_tokens,
                aggregation=aggregation_of(config.algorithm),
                constant_length=config.algorithm.policy_loss.constant_length,
                whitening=whitening,
                selection=select_tokens(parts.actor, experience, whitening, config.algorithm),
            )
            metrics |= parts.actor.update(experience, requests)
    return metrics


def hand_over(parts: Components, version: int, *, asleep: bool) -> Metrics:
    """Hop 10: wake the engines if they sleep, and give them the actor's weights. Trainers make room for them: what
    `offload` names leaves the device first, the actor's weights after the hand-over."""
    if parts.critic is not None:
        parts.critic.offload()
    parts.actor.offload(keep_params=True)
    if asleep:
        parts.rollout.wake()
    metrics = parts.weight_sync.push(version)
    parts.actor.offload()
    return metrics


def select_tokens(
    actor: ActorClient, experience: list[Ref[Experience]], whitening: Whitening | None, algorithm: AlgorithmConfig
) -> TokenSelection | None:
    """Choose the tokens that clip_cov and kl_cov treat apart, over all shards; None for other losses."""
    if not selects_tokens(algorithm):
        return None
    moments = actor.selection_moments(experience)
    selection, count = open_selection(moments, whitening), count_selected(moments, algorithm)
    return close_selection(selection, actor.selection_keys(experience, selection, count), count=count)


def step_metrics(parts: Components, rollouts: ScoredRollouts, *, seconds: float) -> Metrics:
    """Sizes and throughput of the whole step."""
    tokens = int(rollouts.lengths.sum())
    metrics: Metrics = {
        "data/epoch": mean(parts.sampler.epoch, 1),
        "rollout/sequences": total(len(rollouts.sequences)),
        "rollout/tokens": total(tokens),
        "perf/tokens_per_s": mean(tokens / seconds, 1),
        "perf/tokens_per_s_per_device": mean(tokens / seconds / parts.throughput.num_devices, 1),
    }
    if rollouts.sequences:
        metrics["rollout/policy_version/min"] = minimum(min(info.policy_version for info in rollouts.sequences))
    return metrics
