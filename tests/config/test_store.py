"""Composition of files and command-line overrides, and what is said of faulty ones."""

import os
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from megappo.config.algorithm import CorrectionLevel, KLController
from megappo.config.rules import check_config, check_files
from megappo.config.run import RunConfig
from megappo.config.store import config_folder, load_run_config, override_of, resolved_yaml
from megappo.errors import ConfigError

EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in config_folder().iterdir()
    if folder.is_dir() and folder.name not in ("experiment", "data")
}


def faults(*overrides: str) -> dict[str, str]:
    """Return key -> whole message of every violation that these overrides cause."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(overrides)
    return {violation.key: str(violation) for violation in caught.value.violations}


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "it's",
        'the "best"',
        "lr=1,b=2",
        "x\\",
        "x\\'",
        "\\\\${x}",
        "${seed}",
        "$",
        "[1]",
        "{a}",
        " a ",
        "1",
        "null",
        "\n",
    ],
)
def test_an_override_of_a_text_sets_it_as_it_stands(text: str) -> None:
    tree = OmegaConf.create({"path": ""})
    OmegaConf.update(tree, "path", OverridesParser.create().parse_override(override_of("path", text)).value())
    assert tree.path == text


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_a_complete_run_that_breaks_no_rule(experiment: str) -> None:
    config = load_run_config([f"experiment={experiment}"])
    assert type(config) is RunConfig


@pytest.mark.parametrize("number", range(max(map(len, GROUPS.values()))))
def test_every_choice_of_every_group_fits_the_schema(number: int) -> None:
    # Rules are left out: not every choice suits the quickstart (a GPU pool has other sizes).
    choices = [f"{group}={known[number]}" for group, known in GROUPS.items() if number < len(known)]
    load_run_config(["experiment=quickstart", *choices], rules=())


def test_quickstart_is_grpo_on_two_tensor_parallel_ranks_and_one_sglang_engine() -> None:
    config = load_run_config(["experiment=quickstart"])
    assert config.run.name == "quickstart"
    assert config.algorithm.advantage.name == "grpo"
    assert config.actor.parallelism.tensor == 2
    assert (config.rollout.engine, config.rollout.num_engines) == ("sglang", 1)
    assert config.model.path == "runs/quickstart-sft/model"
    assert config.sft.output == "runs/quickstart-sft"


def test_quickstart_ppo_has_a_critic_pipeline_stages_and_adaptive_kl() -> None:
    config = load_run_config(["experiment=quickstart_ppo"])
    assert config.algorithm.advantage.name == "gae"
    assert (config.actor.parallelism.tensor, config.actor.parallelism.pipeline) == (1, 2)
    assert config.critic.parallelism.tensor == 2
    assert config.critic.parallelism.sequence
    assert config.algorithm.kl.in_reward.controller is KLController.adaptive
    assert config.trainer.critic_warmup > 0


def test_the_starting_model_stays_where_it_is_when_the_run_is_renamed() -> None:
    config = load_run_config(["experiment=quickstart", "run.name=other"])
    assert config.sft.output == "runs/quickstart-sft"
    assert config.model.path == "runs/quickstart-sft/model"


def test_a_group_on_the_command_line_wins_over_the_experiment() -> None:
    config = load_run_config(["experiment=quickstart", "rollout=hf"])
    assert config.rollout.engine == "hf"
    assert config.rollout.sampling.max_new_tokens == 8


def test_values_on_the_command_line_win_over_everything() -> None:
    config = load_run_config(["trainer.total_steps=20", "experiment=quickstart", "seed=1", "run.name=x"])
    assert (config.trainer.total_steps, config.seed, config.run.name) == (20, 1, "x")


def test_a_key_inside_an_optional_section_switches_the_section_on() -> None:
    config = load_run_config(
        ["experiment=quickstart", "algorithm.overlong.max_length=8", "algorithm.correction.weight={level: sequence}"],
        rules=(),
    )
    assert config.algorithm.overlong is not None
    assert config.algorithm.overlong.max_length == 8
    assert config.algorithm.correction.weight is not None
    assert config.algorithm.correction.weight.level is CorrectionLevel.sequence
    assert config.algorithm.correction.weight.high == 2.0


def test_maps_take_new_keys_and_are_replaced_when_given_whole() -> None:
    config = load_run_config(
        ["experiment=quickstart", "cluster.pools.engines=1", "data.train.params.words=3"], rules=()
    )
    assert config.cluster.pools == {"main": 2, "engines": 1}
    assert config.data.train.params["words"] == 3
    config = load_run_config(["experiment=quickstart", "cluster.pools={training: 2, engines: 1}"], rules=())
    assert config.cluster.pools == {"training": 2, "engines": 1}


def test_values_that_hold_signs_of_the_grammar_work_when_quoted_and_survive_a_reload() -> None:
    for value in ("runs/epoch=9-step=8.ckpt", "runs/a@b%c#d", "runs/[x]"):
        config = load_run_config(["experiment=quickstart", f'trainer.resume="{value}"'])
        assert config.trainer.resume == value
        assert yaml.safe_load(resolved_yaml(config))["trainer"]["resume"] == value


@pytest.mark.parametrize("value", ["runs/epoch=9-step=8.ckpt", "runs/a@b%c#d", "runs/[x"])
def test_values_that_need_quotes_are_shown_with_them(value: str) -> None:
    assert faults("experiment=quickstart", f"trainer.resume={value}") == {
        "trainer.resume": f"trainer.resume={value} cannot be read (quote it: 'trainer.resume=\"{value}\"')"
    }


def test_the_resolved_yaml_reads_back_as_the_same_configuration() -> None:
    config = load_run_config(["experiment=quickstart_ppo", "algorithm.overlong.max_length=8"], rules=())
    text = resolved_yaml(config)
    assert "controller: adaptive" in text
    again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.create(text)))
    assert again == config


UNKNOWN = {
    "actor.optim.lrr=1": "actor.optim.lr",
    "trainer.total_epoch=3": "trainer.total_epochs",
    "total_steps=3": "trainer.total_steps",
    "actor.temperature=3": "rollout.sampling.temperature or rollout.validation.temperature",
    "rolout=hf": "rollout",
    "clip=3": "algorithm.policy_loss.clip or algorithm.value_loss.clip",
    "+trainer.total_step=3": "trainer.total_steps",
}
"""Override -> the key that is nearest."""


def test_unknown_keys_are_refused_with_the_nearest_one() -> None:
    assert list(faults("experiment=quickstart", *UNKNOWN).values()) == [
        f"{override.lstrip('+')} is not a key of the configuration (did you mean {near}?)"
        for override, near in UNKNOWN.items()
    ]


WRONG = {
    "trainer.total_steps=1.5": "must be an integer or null (without this it is 170)",
    "actor.optim.lr=fast": "must be a number (without this it is 0.0002)",
    "trainer.val_before_train=maybe": "must be true or false",
    "model.dtype=float16": "must be one of float32, bfloat16 (without this it is float32)",
    "seed=1,2": "holds several values",
    "data.train.size=???": "must be given",
    "profile.steps=[first]": "must be a list such as [1, 2]",
    "profile.phases=[x]": "must be a list such as [log_probs], of log_probs, values, experience, update",
    "run.name=${nowhere}": "refers to what is not there",
    "algorithm.correction.reject=[{lo: 3}]": "Key 'lo' not in 'RejectConfig'",
}
"""Override -> what is said of it."""
WRONG_TOO = {
    "trainer.total_steps=abc": "must be an integer or null (without this it is 170)",
    "model=null": "must be a section with the keys path, random_weights, family, dtype, fp32_head",
    "~seed": "cannot be removed",
}
"""Of the same keys."""


@pytest.mark.parametrize("overrides", [WRONG, WRONG_TOO])
def test_wrong_values_are_refused_with_what_the_keys_may_hold(overrides: dict[str, str]) -> None:
    found = faults("experiment=quickstart", *overrides)
    assert found.keys() == {override.partition("=")[0].lstrip("~") for override in overrides}
    for override, rule in overrides.items():
        assert rule in found[override.partition("=")[0].lstrip("~")]


def test_unknown_choices_are_refused_with_the_known_ones() -> None:
    known = {"experiment": EXPERIMENTS, "rollout": GROUPS["rollout"], "algorithm": GROUPS["algorithm"]}
    assert faults(*(f"{group}=nothing" for group in known)) == {
        group: f"{group}=nothing is not there (use one of {', '.join(choices)})" for group, choices in known.items()
    }


def test_everything_wrong_comes_in_one_report() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            [
                "experiment=quickstart",
                "actor.optim.lrr=1",
                "trainer.total_steps=abc",
                "seed=1,2",
                "actor.parallelism.tensor=3",
                "batching.mini_batch_prompts=5",
                "model.path=no/such/folder",
            ],
            rules=(check_config, check_files),
        )
    keys = {violation.key for violation in caught.value.violations}
    assert keys == {
        "actor.optim.lrr",
        "trainer.total_steps",
        "seed",
        "actor.parallelism",
        "actor.parallelism.tensor",
        "batching.mini_batch_prompts",
        "model.path",
    }
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == len(caught.value.violations)


def test_loading_writes_nothing_and_stays_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load_run_config(["experiment=quickstart"])
    assert Path(os.getcwd()) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_loading_twice_gives_equal_and_separate_configurations() -> None:
    first, second = (load_run_config(["experiment=quickstart"]) for _ in range(2))
    assert first == second
    first.cluster.pools["main"] = 7
    assert second.cluster.pools == {"main": 2}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            "rollout: {samplin: {top_p: 0.5}}",
            ["experiment/mine.yaml=rollout.samplin ", "did you mean rollout.sampling?"],
        ),
        ("trainer: {total_steps: many}", ["experiment/mine.yaml=trainer.total_steps ", "'many'"]),
        (
            "defaults: [override /data: nothing]",
            ["data=nothing is not there; ", "experiment=mine asks for it", "spell_backward"],
        ),
        ("trainer: [", ["experiment/mine.yaml=line 3 is not YAML"]),
    ],
)
def test_a_fault_in_a_file_names_the_file_and_comes_with_those_of_the_command_line(
    tmp_path: Path, content: str, parts: list[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    found = faults(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine", "seeed=1")
    assert found.pop("seeed").endswith("(did you mean seed?)")
    (message,) = found.values()
    for part in parts:
        assert part in message


def test_experiments_are_found_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [quickstart, _self_]\nrun: {name: mine}\n"
    )
    config = load_run_config([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"])
    assert config.run.name == "mine"
    assert config.batching.ppo_epochs == 2
