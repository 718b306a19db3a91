"""The rewards of a run, before its processes start."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megappo.config.data import DataConfig, SourceConfig
from megappo.config.reward import RewardTerm, RewardTerms
from megappo.config.reward_rules import asks_reward_model, reward_keys
from megappo.config.run import RunConfig
from megappo.errors import CheckpointError, Violation
from megappo.rewards import reward_violations

Section = TypeVar("Section", bound=RewardTerms)


def rewards_can_be_made(config: RunConfig) -> list[Violation]:
    """Every reward is made once, so that faults in its name and parameters show before anything starts; of the reward
    model, whose folder another rule looks for, the names in its files are read."""
    return reward_violations(reward_keys(config), timeout_s=config.reward.timeout_s) + _reward_model_scores(config)


def _reward_model_scores(config: RunConfig) -> list[Violation]:
    folder = config.reward_model.path
    if not asks_reward_model(config) or folder is None or not (Path(folder) / "config.json").is_file():
        return []
    # torch takes seconds to import, and few runs have such a model.
    from megappo.weights.score_head import check_score_head

    try:
        check_score_head(folder, needed=True)
    except CheckpointError as error:
        remedy = "docs/reward_models.md tells how to make one"
        return [Violation(key="reward_model.path", value=folder, rule=f"cannot score: {error}", remedy=remedy)]
    return []


def settle_rewards(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of reward models: workers have another working directory."""
    path = config.reward_model.path
    return replace(
        config,
        reward=_settled(config.reward),
        reward_model=replace(config.reward_model, path=None if path is None else str(Path(path).resolve())),
        data=_settled_data(config.data),
    )


def _settled(section: Section) -> Section:
    terms = {name: _with_absolute_path(term) for name, term in section.terms.items()}
    return replace(_with_absolute_path(section), terms=terms)


def _settled_data(data: DataConfig) -> DataConfig:
    def of(source: SourceConfig) -> SourceConfig:
        return source if source.reward is None else replace(source, reward=_settled(source.reward))

    return replace(
        data,
        train=of(data.train),
        train_sources={name: of(source) for name, source in data.train_sources.items()},
        validation=None if data.validation is None else of(data.validation),
        validation_sets={name: of(source) for name, source in data.validation_sets.items()},
    )


Named = TypeVar("Named", RewardTerm, RewardTerms)


def _with_absolute_path(named: Named) -> Named:
    path = named.model_path
    return named if path is None else replace(named, model_path=str(Path(path).resolve()))
