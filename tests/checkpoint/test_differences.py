"""What a changed configuration means for a checkpoint."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from megappo.checkpoint import differences
from megappo.checkpoint.differences import Verdict, compare_configs, read_config
from megappo.config import schema
from megappo.config.store import load_run_config, resolved_yaml
from megappo.errors import CheckpointError

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def base() -> Tree:
    return yaml.safe_load(resolved_yaml(load_run_config(["experiment=quickstart"])))


def _at(tree: Tree, key: str) -> tuple[Tree, str]:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree[section]
    return tree, last


def _set(tree: Tree, key: str, value: object) -> None:
    section, last = _at(tree, key)
    section[last] = value


@pytest.mark.parametrize(
    ("key", "value", "verdict", "reason"),
    [
        ("run.dir", "elsewhere", Verdict.ignored, "no number"),
        ("tracking.trackers", [], Verdict.ignored, "no number"),
        ("cluster.address", "10.0.0.1:6379", Verdict.ignored, "no number"),
        ("checkpoint.keep_last", 9, Verdict.ignored, "no number"),
        ("trainer.resume", "auto", Verdict.ignored, "no number"),
        ("critic.optim.lr", 1.0, Verdict.ignored, "no critic"),
        ("critic.lora", {"rank": 4}, Verdict.ignored, "no critic"),
        ("trainer.total_steps", 500, Verdict.allowed, "new value"),
        ("actor.optim.lr", 1.0, Verdict.allowed, "new value"),
        ("batching.micro_batch_tokens", 64, Verdict.allowed, "new value"),
        ("actor.parallelism.tensor", 1, Verdict.allowed, "any layout"),
        ("cluster.pools", {"main": 8}, Verdict.allowed, "any layout"),
        ("data.train.path", "elsewhere.jsonl", Verdict.allowed, "prompts are compared"),
        ("model.path", "elsewhere", Verdict.allowed, "reference policy"),
        ("rollout.num_engines", 2, Verdict.allowed, "other answers"),
        ("seed", 3, Verdict.refused, "position in the data"),
        ("data.shuffle", False, Verdict.refused, "position in the data"),
        ("model.dtype", "bfloat16", Verdict.refused, "another type"),
        ("actor.lora", {"rank": 4}, Verdict.refused, "adapters"),
        ("actor.optim.name", "sgd", Verdict.refused, "another optimizer's"),
        ("actor.optim.momentum", 0.9, Verdict.refused, "another optimizer's"),
        ("critic.optim.momentum", 0.9, Verdict.ignored, "no critic"),
        ("algorithm.advantage.name", "gae", Verdict.refused, "needs a critic"),
        ("algorithm.advantage.name", "rloo", Verdict.allowed, "new value"),
        ("algorithm.advantage.name", "my.module:estimator", Verdict.allowed, "new value"),
    ],
)
def test_a_changed_key_is_ignored_allowed_or_refused(
    key: str, value: object, verdict: Verdict, reason: str, base: Tree
) -> None:
    wanted = copy.deepcopy(base)
    _set(wanted, key, value)
    (found,) = compare_configs(base, wanted)
    assert found.key.startswith(key)
    assert found.verdict is verdict
    assert reason in str(found)


def test_equal_configurations_have_no_difference(base: Tree) -> None:
    assert compare_configs(base, copy.deepcopy(base)) == []


@pytest.mark.parametrize(
    ("total_steps", "section", "verdict"),
    [(None, None, Verdict.refused), (100, None, Verdict.allowed), (None, "sft", Verdict.ignored)],
)
def test_steps_of_another_size_are_refused_where_epochs_say_when_the_run_ends(
    total_steps: int | None, section: str | None, verdict: Verdict, base: Tree
) -> None:
    saved, wanted = copy.deepcopy(base), copy.deepcopy(base)
    saved["trainer"]["total_steps"] = wanted["trainer"]["total_steps"] = total_steps
    wanted["batching"]["prompts_per_step"] = 64
    (found,) = compare_configs(saved, wanted, section=section)
    assert (found.key, found.verdict) == ("batching.prompts_per_step", verdict)
    assert ("trainer.total_steps=N" in found.reason) == (verdict is Verdict.refused)


def test_a_critic_may_be_left_behind_and_is_compared_while_it_stays(base: Tree) -> None:
    saved, wanted = copy.deepcopy(base), copy.deepcopy(base)
    saved["algorithm"]["advantage"]["name"] = "gae"
    (left,) = compare_configs(saved, wanted)
    assert (left.verdict, left.reason) == (Verdict.allowed, "the critic of the checkpoint is left behind")
    wanted["algorithm"]["advantage"]["name"] = "gae"
    wanted["critic"]["optim"]["name"] = "sgd"
    (kept,) = compare_configs(saved, wanted)
    assert (kept.key, kept.verdict) == ("critic.optim.name", Verdict.refused)


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (lambda tree: tree.pop("checkpoint"), []),
        (lambda tree: tree["actor"]["optim"].pop("eps"), []),
        (lambda tree: tree["actor"]["optim"].pop("lr"), ["actor.optim.lr"]),
        (lambda tree: tree["trainer"].update(of_another_version=3), ["trainer.of_another_version"]),
    ],
)
def test_a_key_that_the_other_version_had_not_counts_as_its_default(
    change: Callable[[Tree], object], keys: list[str], base: Tree
) -> None:
    saved = copy.deepcopy(base)
    change(saved)
    # The quickstart sets the learning rate of the actor, and nothing else of these.
    assert [difference.key for difference in compare_configs(saved, base)] == keys


def test_verdicts_are_of_keys_that_there_are() -> None:
    assert [key for key in differences._VERDICTS if schema.annotation_of(key) is None] == []


@pytest.mark.parametrize("text", [None, "[", "- a list", ""])
def test_a_configuration_that_cannot_be_read_is_named(text: str | None, tmp_path: Any) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.yaml (cannot be read|holds no configuration)"):
        read_config(tmp_path)
