"""Hops 1 and 2 of a step as a whole: draw, generate and score until there is enough to train on.

One generation does, unless dynamic sampling drops groups: then there are several. Two kinds of draws outlive their step
and are the first of the next one:
- groups that are complete and not needed yet wait, scored, with their engines;
- unfinished groups (`rollout.partial`) go on from what their engines keep of them, under the same ids.
A sequence whose reward failed leaves its group here (`reward.on_failure=drop`), so that groups may be of unequal sizes;
a group that has none left leaves the step, as does one whose greedy answer has no score.
A checkpoint holds both with their tokens (`controller.rollout_files`), so a resumed run goes on with exactly these.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megappo.algo.advantages import signal_by_group
from megappo.algo.dynamic_sampling import SamplingDecision, SamplingOutcome, decide_sampling, prompts_to_draw
from megappo.config.algorithm_declarations import reads_greedy_scores
from megappo.config.reward import FailedReward
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, RewardClient, RolloutClient
from megappo.controller.rollouts import (
    ScoredRollouts,
    add_greedy,
    draw_prompts,
    generate_and_score,
    join,
    partial_metrics,
    rollout_metrics,
    sequence_inputs,
    split_greedy,
)
from megappo.controller.state import DrawIds, DrawPosition, OpenDraw
from megappo.data.curriculum import CurriculumError
from megappo.data.sampler import PromptDraws
from megappo.errors import MegappoError, RewardError
from megappo.observability.metrics import Metrics, total
from megappo.observability.timing import PhaseTimer


class SamplingExhaustedError(MegappoError):
    """Dynamic sampling ran out of rounds and `algorithm.sampling.on_exhausted` is `stop`; says what was kept."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRollouts:
    """What one step sampled."""

    train: ScoredRollouts
    """The sequences to train on; none when the step trains nothing."""
    forget: list[int]
    """Ids of sequences that no step will train on; the engines keep the tokens of those that wait for a later one."""
    metrics: Metrics
    """Of everything sampled in this step, filtered groups included; of what is trained on when nothing was sampled
    because the groups carried over fill the step."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplerState:
    """What outlives a step, beside the tokens that the engines hold."""

    position: DrawPosition
    carried: ScoredRollouts
    """Complete groups that wait for a later step; the other open draws are unfinished."""


class StepSampler:
    """Draws, generates and scores what a step trains on. One thread at a time may use it."""

    def __init__(
        self, config: RunConfig, *, prompts: PromptDraws, rollout: RolloutClient, reward: RewardClient
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollout = rollout
        self._reward = reward
        self._ids = DrawIds()
        self._carried = join([])
        self._unfinished: list[Draw] = []
        self._open: dict[int, Draw] = {}
        """Group id -> draw, of all groups that no step has trained on or dropped."""
        self._held: set[int] = set()
        """Ids of all sequences that the engines hold."""

    @property
    def carried_ids(self) -> list[int]:
        """Ids of the complete sequences that wait, with their engines, for a later step."""
        return [info.sequence_id for info in self._carried.sequences]

    @property
    def unfinished_ids(self) -> list[int]:
        """Ids of the sequences that the next step goes on with."""
        return [sequence_id for draw in self._unfinished for sequence_id in draw.sequence_ids]

    def position(self) -> DrawPosition:
        """Return where drawing goes on."""
        return DrawPosition(
            next_group_id=self._ids.next_group_id,
            next_sequence_id=self._ids.next_sequence_id,
            sampler=self._prompts.state_dict(),
            open_draws=[
                OpenDraw(
                    row=draw.prompt.row,
                    origin=draw.prompt.origin,
                    group_id=group_id,
                    sequence_ids=draw.sequence_ids,
                )
                for group_id, draw in sorted(self._open.items())
            ],
        )

    def state(self) -> SamplerState:
        """Return what another sampler needs to go on as this one would, if its engines hold the same tokens."""
        return SamplerState(position=self.position(), carried=self._carried)

    def restore(self, state: SamplerState) -> None:
        """Go on where `state` was taken; the engines have adopted the tokens of its open draws.

        Raises:
            DataError: the position is of other prompts, another seed or another shuffle setting.
        """
        position, self._carried = state.position, state.carried
        self._prompts.load_state_dict(position.sampler)
        self._ids = DrawIds(next_group_id=position.next_group_id, next_sequence_id=position.next_sequence_id)
        prompts = self._prompts.find([(draw.origin, draw.row) for draw in position.open_draws])
        self._open = {
            draw.group_id: Draw(
                group_id=draw.group_id, prompt=prompts[draw.origin, draw.row], sequence_ids=draw.sequence_ids
            )
            for draw in position.open_draws
        }
        complete = self._carried.scores_by_group().keys()
        self._unfinished = [draw for group_id, draw in self._open.items() if group_id not in complete]
        self._held = {*self.carried_ids, *self.unfinished_ids}

    def sample(self, step: int, timer: PhaseTimer) -> StepRollouts:
        """Sample what `step` (1: the first) trains on.

        Raises:
            SamplingExhaustedError: dynamic sampling ran out of rounds and is configured to stop.
            EngineError: see `generate_and_score`.
            RewardError: so many rewards failed that nothing of the step is left.
            CurriculumError: the curriculum failed; names the step.
            MegappoError: scoring failed, see `controller.ports.Scoring`.
        """
        with _named_step(step):
            return self._sample(step, timer)

    def _sample(self, step: int, timer: PhaseTimer) -> StepRollouts:
        config, target = self._config.algorithm.sampling, self._config.batching.prompts_per_step
        begun, found, fresh, rounds = set(self._open), self._carried, join([]), 0
        missing = prompts_to_draw(max(0, target - len(found.scores_by_group())), config)
        while True:
            if missing:
                new = self._generate(missing, timer, seed=(self._config.seed * 1_000_003 + step - 1) * 101 + rounds)
                found, fresh, rounds = join([found, new]), join([fresh, new]), rounds + 1
            decision = self._decide(found, rounds)
            if decision.outcome is not SamplingOutcome.refill:
                break
            missing = decision.refill
        train = self._settle(found, decision)
        if rounds and not train.sequences and not fresh.sequences:
            raise _nothing_left(fresh.scoring)
        metrics = self._metrics(fresh if fresh.sequences else train, decision, rounds) | fresh.scoring
        if self._config.rollout.partial.extra_prompts:
            metrics |= partial_metrics(fresh, begun, unfinished=len(self._unfinished))
        return StepRollouts(train=train, forget=self._dropped(train), metrics=metrics)

    def _decide(self, found: ScoredRollouts, rounds: int) -> SamplingDecision:
        """Choose among the groups so far; without dynamic sampling all are good, and the oldest come first."""
        algorithm, target = self._config.algorithm, self._config.batching.prompts_per_step
        if algorithm.sampling.max_rounds > 0:
            signal = signal_by_group(sequence_inputs(found, found.scores), algorithm)
            return decide_sampling(signal, target=target, rounds=rounds, config=algorithm.sampling)
        groups = sorted(found.scores_by_group())
        return SamplingDecision(
            outcome=SamplingOutcome.train,
            kept=groups[:target],
            surplus=groups[target:],
            filtered=[],
            refill=0,
            message="",
        )

    def _settle(self, found: ScoredRollouts, decision: SamplingDecision) -> ScoredRollouts:
        """Act on the final decision of a step; returns what it trains on."""
        if decision.outcome is SamplingOutcome.stop:
            raise SamplingExhaustedError(
                f"algorithm.sampling: {decision.message} (raise max_rounds or oversample, choose easier or harder "
                "prompts, or set on_exhausted to train_partial or carry_over)"
            )
        waits = decision.outcome is SamplingOutcome.carry_over
        self._carried = found.select(set(decision.kept + decision.surplus if waits else decision.surplus))
        still_open = self._carried.scores_by_group().keys() | {draw.group_id for draw in self._unfinished}
        self._open = {group_id: draw for group_id, draw in self._open.items() if group_id in still_open}
        return found.select(set() if waits else set(decision.kept))

    def _metrics(self, sampled: ScoredRollouts, decision: SamplingDecision, rounds: int) -> Metrics:
        metrics = rollout_metrics(sampled) | self._prompts.metrics()
        dynamic, partial = self._config.algorithm.sampling.max_rounds > 0, self._config.rollout.partial.extra_prompts
        if dynamic:
            metrics["rollout/sampling_rounds"] = total(rounds)
            metrics["rollout/groups_filtered"] = total(len(decision.filtered))
        if dynamic or partial:
            metrics["rollout/groups_carried"] = total(len(self._carried.scores_by_group()))
        return metrics

    def _dropped(self, train: ScoredRollouts) -> list[int]:
        """Return what the engines hold beside the sequences of this step and those that wait for a later one."""
        waiting = {*self.carried_ids, *self.unfinished_ids}
        dropped = self._held - waiting - {info.sequence_id for info in train.sequences}
        self._held &= waiting
        return sorted(dropped)

    def _generate(self, count: int, timer: PhaseTimer, *, seed: int) -> ScoredRollouts:
        """Answer prompts, unfinished ones first, until `count` groups or a few more are complete."""
        config, extra = self._config, self._config.rollout.partial.extra_prompts
        with timer.phase("draw"):
            draws = [*self._unfinished, *self._draw(max(0, count + extra - len(self._unfinished)))]
        greedy = add_greedy(draws, self._ids) if reads_greedy_scores(config.algorithm) else {}
        self._open |= {draw.group_id: draw for draw in draws}
        self._held.update(sequence_id for draw in (*draws, *greedy.values()) for sequence_id in draw.sequence_ids)
        rollouts = generate_and_score(
            [*draws, *greedy.values()],
            config.rollout.sampling,
            rollout=self._rollout,
            reward=self._reward,
            seed=seed,
            timer=timer,
            wanted=count if extra else None,
        )
        complete = {info.group_id for info in rollouts.sequences}
        self._unfinished = [draw for draw in draws if draw.group_id not in complete]
        sampled = split_greedy(rollouts, greedy) if greedy else rollouts
        sampled = self._drop_failed(sampled) if config.reward.on_failure is FailedReward.drop else sampled
        scores_of = sampled.scores_by_group()
        self._prompts.observe([(self._open[group].prompt, scores) for group, scores in scores_of.items() if scores])
        return sampled

    def _drop_failed(self, sampled: ScoredRollouts) -> ScoredRollouts:
        """Leave out the sequences without a score, and tell of the groups that left with them."""
        left = sampled.without_failed()
        gone = len(sampled.scores_by_group()) - len(left.scores_by_group())
        return replace(left, scoring=left.scoring | {"reward/failed_groups": total(gone)})

    def _draw(self, count: int) -> Sequence[Draw]:
        prompts = self._prompts.next(count)
        return draw_prompts(prompts, self._ids, num_samples=self._config.batching.samples_per_prompt)


@contextmanager
def _named_step(step: int) -> Iterator[None]:
    """Say in which step a curriculum failed: its rounds are no steps."""
    try:
        yield
    except CurriculumError as error:
        raise CurriculumError(f"step {step}: {error}") from error


def _nothing_left(scoring: Metrics) -> RewardError:
    prefix = "reward/failed/"
    found = {name.removeprefix(prefix): int(stat.total) for name, stat in scoring.items() if name.startswith(prefix)}
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return RewardError(
        f"nothing of the step can be trained on: {sum(found.values())} rewards failed ({kinds}) "
        "(the first failure of each kind is in the logs; mend the reward, then resume with trainer.resume=auto)"
    )
