"""From scored answers to the statistics of a validation set, and of each source in it.

Shapes: P prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megappo.algo.judgement import bootstrap_interval, majority_score, pass_at_k
from megappo.config.run import RunConfig
from megappo.config.validation import SameAnswer, ValidationConfig, metric_prefix, pass_at_name
from megappo.controller.ports import SequenceInfo
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.observability.metrics import Metrics, maximum, mean, total
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class Answer:
    """One answer to a validation prompt."""

    info: SequenceInfo
    reward: Reward
    sample: Sample | None
    """Its text; None: it was left with the engines."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AnsweredPrompt:
    """A validation prompt with the answers that were scored, in order of their ids."""

    prompt: Prompt
    answers: list[Answer]
    failed: list[Answer] = field(default_factory=list[Answer])
    """Further answers, whose reward failed: no statistic counts them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AnsweredSet:
    """A validation set, answered."""

    name: str
    """Empty: the only one."""
    prompts: list[AnsweredPrompt]

    @property
    def title(self) -> str:
        """Its name for people and files."""
        return self.name or "validation"


@dataclass(kw_only=True, slots=True, frozen=True)
class Statistic:
    """A mean over prompts."""

    total: float
    prompts: int
    """Those that it is over, at least one."""
    interval: tuple[float, float] | None
    """Confidence interval; None: `validation.bootstrap_samples=0`."""

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.prompts


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupReport:
    """Statistics of some prompts: of a set or of a source."""

    prompts: int
    failed: int
    """Answers whose reward failed."""
    statistics: dict[str, Statistic]
    """`mean`, `best`, `majority`, `pass_at_<k>`; absent where no prompt has it."""
    response_tokens: np.ndarray
    """Of each answer, int64."""
    truncated: int
    """Answers that ended by length."""
    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Part of the reward -> its values, of the answers that have it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SetReport:
    """What is said of one validation set."""

    name: str
    whole: GroupReport
    sources: dict[str, GroupReport]
    """By source; none where all prompts have the same."""
    values: dict[str, np.ndarray]
    """Statistic -> its number for each prompt, [P] float64; NaN where a prompt has none."""


def judge(answered: AnsweredSet, config: RunConfig) -> SetReport:
    """Return the statistics of a set.

    Raises:
        DataError: `validation.majority=extracted`, and the reward does not say what it read.
    """
    values = values_of_prompts(answered.prompts, config.validation)
    rows_of: dict[str, list[int]] = {}
    for row, prompt in enumerate(answered.prompts):
        rows_of.setdefault(prompt.prompt.source, []).append(row)

    def report(rows: Sequence[int]) -> GroupReport:
        chosen = [answered.prompts[row] for row in rows]
        return _report(chosen, {name: found[list(rows)] for name, found in values.items()}, config)

    return SetReport(
        name=answered.name,
        whole=report(range(len(answered.prompts))),
        sources={name: report(rows) for name, rows in sorted(rows_of.items())} if len(rows_of) > 1 else {},
        values=values,
    )


def values_of_prompts(prompts: Sequence[AnsweredPrompt], validation: ValidationConfig) -> dict[str, np.ndarray]:
    """Return each statistic's number for each prompt, [P] float64; NaN: too few answers of it were scored."""
    scores = [np.array([answer.reward.score for answer in prompt.answers]) for prompt in prompts]
    values = {"mean": _each(scores, np.mean)}
    if validation.samples_per_prompt > 1:
        values["best"] = _each(scores, np.max)
        if validation.majority is not SameAnswer.off:
            found = [_majority(prompt, validation.majority) for prompt in prompts]
            values["majority"] = np.array(found, dtype=np.float64)
    answers = np.array([len(found) for found in scores], dtype=np.int64)
    correct = np.array([int((found >= validation.correct_from).sum()) for found in scores], dtype=np.int64)
    return values | {pass_at_name(k): pass_at_k(correct, answers, k) for k in validation.pass_at}


def _each(scores: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.floating]) -> np.ndarray:
    """Return a statistic of the scores of each prompt; NaN where there are none."""
    return np.array([statistic(found) if len(found) else np.nan for found in scores], dtype=np.float64)


def _majority(prompt: AnsweredPrompt, same: SameAnswer) -> float:
    if not prompt.answers:
        return np.nan
    votes = [_vote(answer, same, prompt.prompt) for answer in prompt.answers]
    return majority_score([answer.reward.score for answer in prompt.answers], votes)


def _vote(answer: Answer, same: SameAnswer, prompt: Prompt) -> str:
    if same is SameAnswer.response:
        assert answer.sample is not None, "the texts of all answers are asked for"
        return " ".join(answer.sample.response.casefold().split())
    if answer.reward.failure is not None:
        return ""  # with reward.on_failure=score it has a score, but nothing was read
    if answer.reward.extracted is None:
        raise DataError(
            f"validation.majority=extracted: the reward of {prompt.source or 'the validation prompts'} does not say "
            "which answer it read out of a response (use validation.majority=response, which compares the texts, or "
            "off; a reward of your own sets Reward.extracted)"
        )
    return answer.reward.extracted


def _report(prompts: Sequence[AnsweredPrompt], values: Mapping[str, np.ndarray], config: RunConfig) -> GroupReport:
    answers = [answer for prompt in prompts for answer in prompt.answers]
    parts: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.reward.parts.items():
            parts.setdefault(name, []).append(value)
    found = {name: numbers[~np.isnan(numbers)] for name, numbers in values.items()}
    return GroupReport(
        prompts=len(prompts),
        failed=sum(len(prompt.failed) for prompt in prompts),
        statistics={name: _statistic(numbers, config) for name, numbers in found.items() if len(numbers)},
        response_tokens=np.array([answer.info.response_tokens for answer in answers], dtype=np.int64),
        truncated=sum(answer.info.finish_reason == "length" for answer in answers),
        parts=parts,
    )


def _statistic(values: np.ndarray, config: RunConfig) -> Statistic:
    validation = config.validation
    interval = bootstrap_interval(
        values, resamples=validation.bootstrap_samples, confidence=validation.confidence, seed=config.seed
    )
    return Statistic(total=float(values.sum()), prompts=len(values), interval=interval)


def metrics_of(report: SetReport) -> Metrics:
    """Return the metrics of a set: `val/reward/mean`, or `val/<set>/reward/mean` of a set with a name, and so on.
    Means of answers are over those whose reward did not fail; intervals are those of the set, not of its sources."""
    prefix = metric_prefix(report.name)
    metrics = _group_metrics(report.whole, prefix)
    for name, statistic in report.whole.statistics.items():
        if statistic.interval is not None:
            for end, value in zip(("low", "high"), statistic.interval):
                metrics[f"{prefix}reward/{name}/{end}"] = mean(value, 1)
    for source, group in report.sources.items():
        metrics |= _group_metrics(group, f"{prefix}source/{source}/")
    return metrics


def _group_metrics(group: GroupReport, prefix: str) -> Metrics:
    tokens = group.response_tokens
    metrics = {
        f"{prefix}reward/{name}": mean(statistic.total, statistic.prompts)
        for name, statistic in group.statistics.items()
    }
    metrics |= {
        f"{prefix}response_tokens/mean": mean(float(tokens.sum()), len(tokens)),
        f"{prefix}response_tokens/max": maximum(float(tokens.max(initial=0)), len(tokens)),
        f"{prefix}truncated_ratio": mean(group.truncated, len(tokens)),
        f"{prefix}failed_rewards": total(group.failed),
    }
    return metrics | {f"{prefix}part/{name}/mean": mean(sum(found), len(found)) for name, found in group.parts.items()}
