"""Hops 1 and 2 of a step as a whole: one generation, or with dynamic sampling several until enough groups carry signal.

Groups with signal beyond the step's need stay with their engines and are the first of the next step. They live as long
as the process: a resumed run starts without them and draws other prompts in their place.
"""

from dataclasses import dataclass

from megappo.algo.dynamic_sampling import SamplingDecision, SamplingOutcome, decide_sampling, prompts_to_draw
from megappo.config.algorithm_declarations import reads_greedy_scores
from megappo.config.run import RunConfig
from megappo.controller.ports import RewardClient, RolloutClient
from megappo.controller.rollouts import (
    ScoredRollouts,
    add_greedy,
    draw_prompts,
    generate_and_score,
    join,
    rollout_metrics,
    split_greedy,
)
from megappo.controller.state import LoopState
from megappo.data.sampler import PromptSampler
from megappo.errors import MegappoError
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


class StepSampler:
    """Draws, generates and scores what a step trains on."""

    def __init__(
        self, config: RunConfig, *, prompts: PromptSampler, rollout: RolloutClient, reward: RewardClient
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollout = rollout
        self._reward = reward
        self._carried = join([])
        self._held: set[int] = set()
        """Ids of all sequences that the engines hold."""

    @property
    def carried_ids(self) -> list[int]:
        """Ids of the sequences that wait, with their engines, for a later step."""
        return [info.sequence_id for info in self._carried.sequences]

    def sample(self, state: LoopState, timer: PhaseTimer) -> StepRollouts:
        """Sample one step. Raises SamplingExhaustedError; see `generate_and_score` for the rest."""
        config = self._config.algorithm.sampling
        if config.max_rounds == 0:
            found = self._generate(self._config.batching.prompts_per_step, state, timer, number=0)
            return StepRollouts(train=found, forget=self._dropped(found), metrics=rollout_metrics(found))
        return self._sample_dynamically(state, timer)

    def _sample_dynamically(self, state: LoopState, timer: PhaseTimer) -> StepRollouts:
        config, target = self._config.algorithm.sampling, self._config.batching.prompts_per_step
        found, fresh = self._carried, join([])
        draws, rounds = prompts_to_draw(max(0, target - len(found.scores_by_group())), config), 0
        while True:
            if draws:
                new = self._generate(draws, state, timer, number=rounds)
                found, fresh = join([found, new]), join([fresh, new])
                rounds += 1
            decision = decide_sampling(found.scores_by_group(), target=target, rounds=rounds, config=config)
            if decision.outcome is not SamplingOutcome.refill:
                return self._settle(found, fresh, decision, rounds)
            draws = decision.refill

    def _settle(
        self, found: ScoredRollouts, fresh: ScoredRollouts, decision: SamplingDecision, rounds: int
    ) -> StepRollouts:
        """Act on the final decision of a step."""
        if decision.outcome is SamplingOutcome.stop:
            raise SamplingExhaustedError(
                f"algorithm.sampling: {decision.message} (raise max_rounds or oversample, choose easier or harder "
                "prompts, or set on_exhausted to train_partial or carry_over)"
            )
        waits = decision.outcome is SamplingOutcome.carry_over
        self._carried = found.select(set(decision.kept + decision.surplus if waits else decision.surplus))
        metrics: Metrics = {
            "rollout/sampling_rounds": total(rounds),
            "rollout/groups_filtered": total(len(decision.filtered)),
            "rollout/groups_carried": total(len(self._carried.scores_by_group())),
        }
        train = found.select(set() if waits else set(decision.kept))
        metrics |= rollout_metrics(fresh if fresh.sequences else train)
        return StepRollouts(train=train, forget=self._dropped(train), metrics=metrics)

    def _dropped(self, train: ScoredRollouts) -> list[int]:
        """Return what the engines hold beside the sequences of this step and those that wait for a later one."""
        waiting = set(self.carried_ids)
        dropped = self._held - waiting - {info.sequence_id for info in train.sequences}
        self._held = waiting
        return sorted(dropped)

    def _generate(self, num_prompts: int, state: LoopState, timer: PhaseTimer, *, number: int) -> ScoredRollouts:
        """Draw and answer prompts; `number` is the round within the step."""
        config = self._config
        draws = draw_prompts(self._prompts.next(num_prompts), state, num_samples=config.batching.samples_per_prompt)
        greedy = add_greedy(draws, state) if reads_greedy_scores(config.algorithm) else {}
        self._held.update(sequence_id for draw in (*draws, *greedy.values()) for sequence_id in draw.sequence_ids)
        rollouts = generate_and_score(
            [*draws, *greedy.values()],
            config.rollout.sampling,
            rollout=self._rollout,
            reward=self._reward,
            seed=(config.seed * 1_000_003 + state.step) * 101 + number,
            timer=timer,
        )
        return split_greedy(rollouts, greedy) if greedy else rollouts
