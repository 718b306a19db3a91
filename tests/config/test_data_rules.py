"""Rules of the section `data`."""

from pathlib import Path
from typing import Any

import pytest

from megappo.config.data import SourceConfig
from megappo.config.rules import check_config, check_data, check_files
from megappo.config.run import RunConfig


def gym(**changes: Any) -> SourceConfig:
    return SourceConfig(**({"kind": "reasoning_gym", "task": "spell_backward", "size": 100} | changes))


def found(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


def several(config: RunConfig, **sources: SourceConfig) -> None:
    """Name training sources in place of the one."""
    config.data.train, config.data.train_sources = SourceConfig(), sources


def test_several_sources_break_no_rule(config: RunConfig) -> None:
    several(config, spelling=gym(weight=0.5), words=gym(seed=2, weight=2.0))
    config.data.validation, config.data.validation_sets = None, {"spelling": gym(size=10)}
    assert found(config) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "jsonl", "task": None}, "data.train_sources.one.path=null must be given with"),
        ({"kind": "csv"}, "data.train_sources.one.kind=csv is not there"),
        ({"size": 0}, "data.train_sources.one.size=0 must be positive"),
        ({"skip": -1}, "data.train_sources.one.skip=-1 must not be negative"),
        ({"skip": 100}, "data.train_sources.one.size=100 must be above data.train_sources.one.skip=100"),
        ({"weight": 0.0}, "data.train_sources.one.weight=0.0 must be positive (leave a source out"),
        ({"split": "train"}, "data.train_sources.one.split=train has no use with data.train_sources.one.kind="),
        ({"path": "a.jsonl"}, "data.train_sources.one.path=a.jsonl has no use with"),
        ({"extra_columns": ["a"]}, "data.train_sources.one.extra_columns=['a'] has no use with"),
        ({"storage_options": {"anon": True}}, "data.train_sources.one.storage_options={'anon': True} has no use"),
    ],
)
def test_every_source_is_checked_by_its_key(config: RunConfig, changes: dict[str, Any], message: str) -> None:
    several(config, one=gym(**changes), other=gym())
    (violation,) = found(config)
    assert violation.startswith(message)


def test_a_source_named_both_ways_would_not_be_read(config: RunConfig) -> None:
    config.data.train_sources = {"one": gym()}
    config.data.validation_sets = {"one": gym(size=10)}
    assert [line.split(" (")[0] for line in found(config)] == [
        "data.train.task=spell_backward is not read beside data.train_sources",
        "data.validation=spell_backward is not read beside data.validation_sets",
    ]


@pytest.mark.parametrize("name", ["", "a/b", "a b"])
def test_names_of_sources_are_parts_of_metric_names(config: RunConfig, name: str) -> None:
    several(config, **{name: gym()})
    assert "cannot be a part of a metric's name" in found(config)[0]


def test_settings_that_nothing_reads_are_refused(config: RunConfig) -> None:
    config.data.train.weight = 2.0
    config.data.curriculum_params = {"size": 3}
    assert [line.split(" (")[0] for line in found(config)] == [
        "data.train.weight=2.0 has no use with one training source, or for validation",
        "data.curriculum_params={'size': 3} has no use without data.curriculum",
    ]
    config.data.train.weight, config.data.curriculum = 1.0, "easy_first"
    assert found(config) == ["data.curriculum=easy_first is not there (name a class: package.module:Class)"]


def test_options_of_a_file_system_need_a_url(config: RunConfig) -> None:
    source = SourceConfig(path="rows.jsonl", storage_options={"anon": True})
    config.data.train = source
    assert "has no use with a path that is no URL" in found(config)[0]
    source.path = "s3://bucket/rows.jsonl"
    assert found(config) == []


def test_files_of_every_source_are_looked_for_and_urls_are_not(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "rows.jsonl").touch()
    several(
        config,
        here=SourceConfig(path=str(tmp_path / "**" / "*.jsonl")),
        url=SourceConfig(path="s3://bucket/*.jsonl"),
        lost=SourceConfig(kind="datasets", path=str(tmp_path / "lost")),
    )
    keys = [violation.key for violation in check_files(config) if violation.key.startswith("data.")]
    assert keys == ["data.train_sources.lost.path"]


def test_inspecting_data_minds_the_rules_of_the_data_only(config: RunConfig, tmp_path: Path) -> None:
    config.batching.prompts_per_step = 0
    assert check_data(config) == []
    config.data.train = SourceConfig(path=str(tmp_path / "lost.jsonl"), skip=-1)
    assert [violation.key for violation in check_data(config)] == ["data.train.skip", "data.train.path"]
