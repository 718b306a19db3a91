"""Validation: answers to held-out prompts, scored and judged.

It never touches the training: its draws have ids of their own, its sampling a seed that is the run's, and what engines
keep of training draws stays. With `rollout.engine=hf` training samples are therefore bitwise the same with and without
it. SGLang draws all samples from one stream per engine, which only greedy validation leaves alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megappo.config.run import RunConfig
from megappo.config.validation import SameAnswer
from megappo.controller.judge import Answer, AnsweredPrompt, AnsweredSet, SetReport, judge, metrics_of
from megappo.controller.ports import Draw, FinishedGroup, RewardClient, RolloutClient, ScoredGroups, Scoring
from megappo.controller.rollouts import ScoredRollouts, draw_prompts, generate_and_score
from megappo.controller.state import DrawIds
from megappo.data.types import Prompt
from megappo.observability.metrics import Metrics, merge, total
from megappo.observability.timing import PhaseTimer
from megappo.rewards.types import Reward

_VALIDATION_IDS = 1 << 40
"""Validation draws take ids from here, so that training ids do not depend on how often one validates."""
_IDS_OF_A_SET = 1 << 36
"""Ids set aside for each set, so that its samples do not depend on the sizes of the others."""

OnAnswered = Callable[[int, int], None]
"""Told how many answers there are, and how many there will be."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Evaluation:
    """All validation sets, answered and judged."""

    answered: list[AnsweredSet]
    reports: list[SetReport]
    """In the same order."""
    metrics: Metrics


def evaluate(
    config: RunConfig,
    sets: Mapping[str, Sequence[Prompt]],
    *,
    rollout: RolloutClient,
    reward: RewardClient,
    on_answered: OnAnswered | None = None,
) -> Evaluation:
    """Answer every prompt `validation.samples_per_prompt` times with `rollout.validation`, score and judge.

    Args:
        sets: by name; a single one is called "".

    Raises:
        MegappoError: see `generate_and_score` and `judge`.
    """
    draws = {name: _draws(prompts, config, number) for number, (name, prompts) in enumerate(sets.items())}
    every = [draw for of_set in draws.values() for draw in of_set]
    timer = PhaseTimer()
    watched = _Watched(
        reward=reward,
        all_texts=config.validation.save_generations or config.validation.majority is SameAnswer.response,
        on_answered=on_answered,
        expected=sum(len(draw.sequence_ids) for draw in every),
    )
    rollouts = generate_and_score(
        every,
        config.rollout.validation,
        rollout=rollout,
        reward=watched,
        seed=config.seed,
        timer=timer,
    )
    rollout.pack([], forget=[info.sequence_id for info in rollouts.sequences])
    answered = [AnsweredSet(name=name, prompts=_answers(of_set, rollouts)) for name, of_set in draws.items()]
    reports = [judge(one, config) for one in answered]
    seconds: Metrics = {"timing/validate_s": total(timer.seconds("generate") + timer.seconds("score"))}
    return Evaluation(
        answered=answered, reports=reports, metrics=merge([seconds, *(metrics_of(report) for report in reports)])
    )


def check_majority(
    config: RunConfig, sets: Mapping[str, Sequence[Prompt]], *, rollout: RolloutClient, reward: RewardClient
) -> None:
    """Refuse `validation.majority=extracted` before all prompts are answered: ask for the answers to one prompt of each
    source.

    Raises:
        DataError: the reward of a source does not say which answer it read.
    """
    if config.validation.majority is not SameAnswer.extracted:
        return
    first = {(prompt.source, prompt.reward): prompt for prompts in sets.values() for prompt in reversed(prompts)}
    evaluate(config, {"": list(first.values())}, rollout=rollout, reward=reward)


def _draws(prompts: Sequence[Prompt], config: RunConfig, number: int) -> list[Draw]:
    first = _VALIDATION_IDS + number * _IDS_OF_A_SET
    ids = DrawIds(next_group_id=first, next_sequence_id=first)
    return draw_prompts(prompts, ids, num_samples=config.validation.samples_per_prompt)


@dataclass(kw_only=True, slots=True)
class _Watched:
    """The rewards of one evaluation (ports RewardClient and Scoring), which count the answers that come."""

    reward: RewardClient
    all_texts: bool
    """As of `RewardClient.begin`."""
    on_answered: OnAnswered | None
    expected: int
    done: int = 0
    scoring: Scoring = field(init=False)

    def begin(self, *, all_texts: bool = False) -> Scoring:
        self.scoring = self.reward.begin(all_texts=all_texts or self.all_texts)
        return self

    def submit(self, group: FinishedGroup) -> None:
        self.scoring.submit(group)
        self.done += len(group.sequences)
        if self.on_answered is not None:
            self.on_answered(self.done, self.expected)

    def collect(self) -> ScoredGroups:
        return self.scoring.collect()


def _answers(draws: Sequence[Draw], rollouts: ScoredRollouts) -> list[AnsweredPrompt]:
    """Put the answers to their prompts; those whose reward failed are counted and left out."""
    answers = {
        info.sequence_id: Answer(info=info, reward=reward, sample=rollouts.samples.get(info.sequence_id))
        for info, reward in zip(rollouts.sequences, rollouts.rewards)
    }
    answered: list[AnsweredPrompt] = []
    for draw in draws:
        given = [answers[sequence_id] for sequence_id in draw.sequence_ids]
        scored = [answer for answer in given if _has_score(answer.reward)]
        failed = [answer for answer in given if not _has_score(answer.reward)]
        answered.append(AnsweredPrompt(prompt=draw.prompt, answers=scored, failed=failed))
    return answered


def _has_score(reward: Reward) -> bool:
    """Whether there is a score: the reward did not fail, or `reward.on_failure=score` gives one all the same."""
    return reward.failure is None or not math.isnan(reward.score)
