"""What every entry of the registries of estimators and losses must hold to; the page made from their docstrings."""

from pathlib import Path

import pytest

from megappo.algo.advantages import ESTIMATORS, Estimator, estimator_of
from megappo.algo.document import LABELS, algorithms_page, describe
from megappo.algo.losses import POLICY_LOSSES, PolicyLoss, aggregation_of, policy_loss_of
from megappo.config.algorithm import AdvantageConfig, Aggregation, AlgorithmConfig, PolicyLossConfig
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS, LOSS_DECLARATIONS, AdvantageScope
from megappo.registry import RegistryError

ROOT = Path(__file__).resolve().parents[2]


def test_registries_and_declarations_list_the_same_names() -> None:
    assert set(ESTIMATORS.names()) == set(ESTIMATOR_DECLARATIONS)
    assert set(POLICY_LOSSES.names()) == set(LOSS_DECLARATIONS)


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_an_estimator_carries_its_declaration(name: str) -> None:
    entry = ESTIMATORS.get(name)
    assert isinstance(entry, Estimator)
    assert entry.declaration is ESTIMATOR_DECLARATIONS[name]
    assert (entry.scope is AdvantageScope.sequence) == (entry.sequence_stage is not None)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_loss_carries_its_declaration_and_its_own_aggregation(name: str) -> None:
    entry = POLICY_LOSSES.get(name)
    assert isinstance(entry, PolicyLoss) and entry.declaration is LOSS_DECLARATIONS[name]
    own = Aggregation.sequence_mean_token_mean if name in ("gspo", "sapo", "gmpo") else Aggregation.token_mean
    assert aggregation_of(AlgorithmConfig(policy_loss=PolicyLossConfig(name=name))) is own


def test_a_configured_aggregation_wins() -> None:
    loss = PolicyLossConfig(name="ppo_clip", aggregation=Aggregation.prompt_mean)
    assert aggregation_of(AlgorithmConfig(policy_loss=loss)) is Aggregation.prompt_mean


def test_the_page_is_current() -> None:
    remedy = "run python -m megappo.algo.document docs/algorithms.md"
    assert (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8") == algorithms_page(), remedy


def test_every_section_of_the_page_has_all_its_lines() -> None:
    sections = algorithms_page().split("\n### ")[1:]
    assert len(sections) > 30
    for section in sections:
        assert all(f"- **{label}**: " in section for label in LABELS), section.splitlines()[0]


def documented() -> None:
    """Do
    this.

    Formula: a
        and b.
    Source: c.

    Args:
        x: not this.
    """


def test_labelled_lines_are_read_with_their_continuation() -> None:
    assert describe(documented) == ("Do this.", {"Formula": "a and b.", "Source": "c."})


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(RegistryError, match="gae, gdpo"):
        estimator_of(AlgorithmConfig(advantage=AdvantageConfig(name="ppo")))
    with pytest.raises(RegistryError, match="cispo, clip_cov"):
        policy_loss_of(AlgorithmConfig(policy_loss=PolicyLossConfig(name="grpo")))


@pytest.mark.parametrize(
    ("name", "need"), [("greedy_reader", "reads_greedy_scores"), ("squares_reader", "reads_sum_pi_squared")]
)
def test_an_estimator_from_outside_is_refused_what_a_run_would_not_give_it(name: str, need: str) -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name=f"tests.algo.plugins:{name}"))
    with pytest.raises(RegistryError, match=f"plugins:{name} declares {need}, which a run provides to built-in"):
        estimator_of(algorithm)


def test_a_loss_from_outside_is_refused_what_a_run_would_not_give_it() -> None:
    algorithm = AlgorithmConfig(policy_loss=PolicyLossConfig(name="tests.algo.plugins:selecting"))
    with pytest.raises(RegistryError, match="plugins:selecting declares selects_tokens"):
        policy_loss_of(algorithm)


def test_a_loss_from_outside_keeps_its_own_aggregation() -> None:
    algorithm = AlgorithmConfig(policy_loss=PolicyLossConfig(name="tests.algo.plugins:sequence_mean_only"))
    assert aggregation_of(algorithm) is Aggregation.sequence_mean_token_mean
    algorithm.policy_loss.aggregation = Aggregation.token_mean
    with pytest.raises(RegistryError, match="aggregation=token_mean conflicts with"):
        aggregation_of(algorithm)
