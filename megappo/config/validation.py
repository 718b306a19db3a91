"""How a policy is judged: in the run and by `megappo evaluate`."""

from dataclasses import dataclass, field
from enum import Enum


class SameAnswer(Enum):
    """Which answers to a prompt are the same one, for the majority."""

    off = "off"
    """There is no majority."""
    extracted = "extracted"
    """Those out of which the reward read the same (`megappo.rewards.types.Reward.extracted`); a response that holds no
    answer has no vote. Needs a reward that says what it read."""
    response = "response"
    """Those with the same text, but for case and white space; one without text has no vote."""


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """Answers to validation prompts; their sampling is `rollout.validation`."""

    samples_per_prompt: int = 1
    """Answers to each prompt. With more than one, sampling must not be greedy."""
    pass_at: list[int] = field(default_factory=list[int])
    """Each k gives `val/reward/pass_at_<k>`, at most samples_per_prompt (unbiased estimator, Chen et al. 2021,
    arXiv:2107.03374, section 2.1)."""
    correct_from: float = 1.0
    """Scores from here on count as correct for pass@k."""
    majority: SameAnswer = SameAnswer.off
    """What makes two answers the same one for `val/reward/majority`."""
    bootstrap_samples: int = 1000
    """Resamples of the prompts behind the confidence intervals; 0: no intervals."""
    confidence: float = 0.95
    """Share of the resampled means that an interval holds."""
    save_generations: bool = True
    """Write every answer with its score to `<run>/generations/`, and the first of them to MLflow as a table."""


def metric_prefix(name: str) -> str:
    """Return what the metrics of a validation set begin with; its name is empty where there is one set."""
    return f"val/{name}/" if name else "val/"


def pass_at_name(k: int) -> str:
    """Return the name of pass@k."""
    return f"pass_at_{k}"


def statistic_names(validation: ValidationConfig) -> list[str]:
    """Return the names of the statistics that a validation measures; each is the metric `reward/<name>`, after the
    prefix of the set."""
    names = ["mean"]
    if validation.samples_per_prompt > 1:
        names.append("best")
        if validation.majority is not SameAnswer.off:
            names.append("majority")
    return names + [pass_at_name(k) for k in validation.pass_at]
