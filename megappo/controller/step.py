"""One PPO step, hop by hop. Reads like the paper; every line is a plain call to a port or a pure function.

Shapes: B sequences of the step. Tokens never come here: shards, log-probs, values and experience are handles.
"""

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
from megappo.algo.diagnostics import merge_pairs
from megappo.algo.experience import ExperienceTotals, merge_experience_metrics, merge_whitening
from megappo.algo.kl import KLCoefficient
from megappo.algo.losses import aggregation_of
from megappo.algo.selection import close_selection, count_selected, open_selection
from megappo.balance.workload import Workload
from megappo.batch.refs import Ref
from megappo.batch.requests import TokenSelection, Whitening
from megappo.batch.stages import Experience, TokenField
from megappo.config.algorithm import Aggregation, AlgorithmConfig
from megappo.config.algorithm_declarations import AdvantageScope, selects_tokens
from megappo.config.run import RunConfig
from megappo.controller.comparison import StepComparison
from megappo.controller.observation import NoObservation, StepObservation
from megappo.controller.order import engines_take_turns, needs_old_log_probs
from megappo.controller.parity import check_parity, check_update, gather_gaps
from megappo.controller.ports import ActorClient, CriticClient, RewardClient, RolloutClient, Shard, WeightSync
from megappo.controller.record import RecordSink, StepRecorder, StepTrace
from megappo.controller.rollouts import ScoredRollouts, sequence_inputs
from megappo.controller.sampling import StepRollouts, StepSampler
from megappo.controller.schedules import StepSchedule, schedule_step
from megappo.controller.throughput import StepThroughput
from megappo.data.sampler import PromptDraws
from megappo.observability.metrics import Metrics, maximum, mean, merge, minimum, total
from megappo.observability.timing import PhaseTimer


@dataclass(kw_only=True, slots=True)
class Components:
    """Everything a run is made of, behind ports."""

    config: RunConfig
    sampler: PromptDraws
    rollout: RolloutClient
    reward: RewardClient
    actor: ActorClient
    critic: CriticClient | None
    weight_sync: WeightSync
    kl_coefficient: KLCoefficient
    workload: Workload
    """What a sequence costs the actor."""
    throughput: StepThroughput
    records: RecordSink = field(default_factory=RecordSink)
    """Where steps are recorded, and who hears of steps in which engines and trainer disagree."""
    observation: StepObservation = field(default_factory=NoObservation)
    step_sampler: StepSampler = field(init=False)
    recorder: StepRecorder = field(init=False)

    def __post_init__(self) -> None:
        # A loss from outside that cannot be had is refused before anything is sampled for it.
        aggregation_of(self.config.algorithm)
        self.step_sampler = StepSampler(self.config, prompts=self.sampler, rollout=self.rollout, reward=self.reward)
        self.recorder = StepRecorder(self.config, self.records, actor=self.actor, critic=self.critic)


class StepResult(NamedTuple):
    """What one step leaves behind."""

    metrics: Metrics
    rollouts: ScoredRollouts
    """What was trained on."""


def learn(parts: Components, sampled: StepRollouts, *, step: int, timer: PhaseTimer) -> Metrics:
    """Hops 3-8 of a step: schedule, log-probs, values, experience, updates. Engines on the trainers' devices sleep from
    the first pass on.

    Args:
        sampled: of hops 1 and 2; where it holds nothing to train on, the engines forget what was dropped, and that is
            all.
    """
    config, rollouts = parts.config, sampled.train
    if not rollouts.sequences:
        parts.rollout.pack([], forget=sampled.forget)
        return {}
    # 3  who computes what
    schedule = schedule_step(
        rollouts,
        config.batching,
        data_sizes=[client.layout.data for client in (parts.actor, parts.critic) if client is not None],
        keep_groups=estimator_of(config.algorithm).declaration.scope is AdvantageScope.group_token,
        workload=parts.workload,
    )
    shards = parts.rollout.pack(schedule.shard_ids(), forget=sampled.forget)
    if engines_take_turns(config):
        parts.rollout.sleep()
    trace = StepTrace(
        step=step,
        rollouts=rollouts,
        schedule=schedule,
        current=rollouts.policy_versions == step - 1,
        kl_coef=parts.kl_coefficient.value,
    )
    with parts.recorder.follow(trace):
        # 4-6  log-probs, values, experience
        totals = make_experience(parts, trace, shards, timer)
        compare_engines(parts, trace, totals)
        # 7-8  critic, then actor once the critic is warm
        updated = update_models(parts, trace, totals, timer)
        updated = check_update(
            updated,
            config,
            parts.recorder.warn,
            lambda limits: parts.recorder.keep_parity(trace, limits, None),
            step=step,
            all_current=bool(trace.current.all()),
        )
    rates = parts.throughput.phases(
        rollouts.lengths,
        response_tokens=int(rollouts.sampled_lengths.sum()),
        loss_tokens=sum(int(part.loss_tokens.sum()) for part in totals),
        log_prob_passes=int(needs_old_log_probs(config)) + int(config.algorithm.needs_reference),
        epochs=config.batching.ppo_epochs,
        seconds=timer.seconds,
    )
    return merge([trace.metrics["experience"], updated, rates, {"schedule/imbalance": mean(schedule.imbalance(), 1)}])


def make_experience(
    parts: Components, trace: StepTrace, shards: list[Shard], timer: PhaseTimer
) -> list[ExperienceTotals]:
    """Hops 4-6: old and reference log-probs, values, token rewards, advantages, correction; what is made goes into the
    trace."""
    rollouts, schedule = trace.rollouts, trace.schedule
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
            kl_coef=trace.kl_coef,
        )
        inputs = sequence_inputs(rollouts, schedule.gather([totals.returns for totals in reward_totals]))
        experience, totals = actor.build_experience(
            shards,
            rewards=rewards,
            truncated=truncated,
            sequence_advantages=sequence_advantages(inputs, schedule, algorithm),
            values=values,
            old_log_probs=old,
            ref_log_probs=ref,
            current=schedule.per_shard(trace.current),
        )
    trace.rewards, trace.experience = rewards, experience
    metrics += [merge_experience_metrics(totals), group_metrics(inputs, algorithm)]
    metrics += [part.metrics for part in reward_totals]
    if algorithm.kl.in_reward.coef > 0:
        metrics.append({"kl/in_reward/coef": mean(trace.kl_coef, 1)})
        parts.kl_coefficient.update([part.kl for part in reward_totals])
    trace.metrics["experience"] = merge(metrics)
    return totals


def compare_engines(parts: Components, trace: StepTrace, totals: list[ExperienceTotals]) -> None:
    """Hold the difference of rollout and old log-probs against `rollout.parity`. Raises ParityError."""
    gaps = gather_gaps([part.gaps for part in totals], trace.schedule.gather)
    if gaps is None:
        return
    comparison = StepComparison(
        step=trace.step,
        version=trace.step - 1,
        sequences=trace.rollouts.sequences,
        gaps=gaps,
        pearson_r=merge_pairs(part.mismatch for part in totals).pearson_r,
    )
    check_parity(
        comparison,
        parts.config,
        parts.recorder.warn,
        lambda finding: parts.recorder.keep_parity(trace, finding.reasons, finding),
    )


def sequence_advantages(
    inputs: SequenceInputs, schedule: StepSchedule, algorithm: AlgorithmConfig
) -> list[np.ndarray] | None:
    """Advantages of estimators that need only scores and groups, per shard; None for all others."""
    if not needs_sequence_advantages(algorithm):
        return None
    return schedule.per_shard(compute_sequence_advantages(inputs, algorithm))


def update_models(parts: Components, trace: StepTrace, totals: list[ExperienceTotals], timer: PhaseTimer) -> Metrics:
    """Hops 7-8: critic update, then actor update once `trainer.critic_warmup` steps are done."""
    config, schedule, experience = parts.config, trace.schedule, trace.experience
    loss_tokens = schedule.gather([part.loss_tokens for part in totals])
    parts.recorder.before_update(trace)
    trace.is_updated = True
    if parts.critic is not None:
        with timer.phase("update_critic"):
            trace.requests["critic"] = schedule.update_requests(
                parts.critic.layout,
                loss_tokens=loss_tokens,
                aggregation=Aggregation.token_mean,
                constant_length=None,
                whitening=None,
            )
            trace.metrics["critic"] = parts.critic.update(experience, trace.requests["critic"])
        parts.critic.offload()
    if parts.critic is None or trace.step > config.trainer.critic_warmup:
        with timer.phase("update_actor"):
            whitening = merge_whitening(totals)
            trace.requests["actor"] = schedule.update_requests(
                parts.actor.layout,
                loss_tokens=loss_tokens,
                aggregation=aggregation_of(config.algorithm),
                constant_length=config.algorithm.policy_loss.constant_length,
                whitening=whitening,
                selection=select_tokens(parts.actor, experience, whitening, config.algorithm),
            )
            trace.metrics["actor"] = parts.actor.update(experience, trace.requests["actor"])
    without_tokens: Metrics = {
        "schedule/mini_batches_without_tokens": total(schedule.count_without_tokens(loss_tokens))
    }
    return merge([without_tokens, *(trace.metrics.get(role, {}) for role in ("critic", "actor"))])


def hand_over(parts: Components, version: int, *, asleep: bool) -> Metrics:
    """Hop 10: give the engines the actor's weights.

    On shared devices each side makes room for the other, so that nothing is there twice: what the trainers' `offload`
    names leaves, the engines' weights come back (where they sleep), the actor's leave once they are handed over, and
    the KV cache takes what is free then.
    """
    if not engines_take_turns(parts.config):
        return parts.weight_sync.push(version)
    if parts.critic is not None:
        parts.critic.offload()
    parts.actor.offload(keep_params=True)
    if asleep:
        parts.rollout.wake_weights()
    metrics = parts.weight_sync.push(version)
    parts.actor.offload()
    if asleep:
        parts.rollout.wake_cache()
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


def step_metrics(parts: Components, rollouts: ScoredRollouts, *, step: int, seconds: float) -> Metrics:
    """Sizes, throughput and staleness of what a step trained on: a rollout's lag is the version that was trained (that
    of the step before) minus the oldest version that sampled one of its tokens."""
    tokens = int(rollouts.lengths.sum())
    metrics: Metrics = {
        "rollout/sequences": total(len(rollouts.sequences)),
        "rollout/tokens": total(tokens),
        "perf/tokens_per_s": mean(tokens / seconds, 1),
        "perf/tokens_per_s_per_device": mean(tokens / seconds / parts.throughput.num_devices, 1),
    }
    if rollouts.sequences:
        versions = [info.policy_version for info in rollouts.sequences]
        metrics["rollout/policy_version/min"] = minimum(min(versions))
        metrics["rollout/policy_lag/max"] = maximum(step - 1 - min(versions))
        metrics["rollout/policy_lag/mean"] = mean(sum(step - 1 - version for version in versions), len(versions))
    return metrics
