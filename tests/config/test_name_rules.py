"""Names of plug-ins are checked before anything starts."""

from megappo.config import name_rules
from megappo.config.rules import check_config
from megappo.config.run import RunConfig
from megappo.data.sources import SOURCES
from megappo.rewards import REWARDS
from megappo.rollout import ENGINES
from megappo.rollout.agents import AGENTS
from megappo.rollout.agents.tool_formats import TOOL_FORMATS
from megappo.weight_sync import TRANSPORTS


def test_the_tables_are_the_registries() -> None:
    assert list(name_rules.AGENTS) == AGENTS.names()
    assert list(name_rules.ENGINES) == ENGINES.names()
    assert list(name_rules.REWARDS) == REWARDS.names()
    assert list(name_rules.SOURCES) == SOURCES.names()
    assert list(name_rules.TOOL_FORMATS) == TOOL_FORMATS.names()
    assert list(name_rules.TRANSPORTS) == TRANSPORTS.names()


def test_all_unknown_names_come_in_one_report_with_the_nearest_one(config: RunConfig) -> None:
    config.rollout.engine, config.reward.name, config.weight_sync.transport = "sgl", "exactmatch", "nccl"
    found = {violation.key: violation for violation in check_config(config)}
    assert found.keys() == {"rollout.engine", "reward.name", "weight_sync.transport"}
    assert "did you mean exact_match?" in found["reward.name"].remedy
    assert "broadcast" in found["weight_sync.transport"].remedy


def test_names_from_outside_are_left_to_their_import(config: RunConfig) -> None:
    config.reward.name = "my_package.rewards:mine"
    assert check_config(config) == []


def test_the_in_process_engine_is_not_split(config: RunConfig) -> None:
    config.rollout.engine, config.rollout.tensor = "hf", 2
    assert [violation.key for violation in check_config(config)] == ["rollout.tensor"]


def test_reward_model_workers_need_a_device_each(config: RunConfig) -> None:
    config.reward.name, config.reward.model_path, config.reward.workers = "model", "folder", 5
    assert [violation.key for violation in check_config(config)] == ["reward.workers"]
