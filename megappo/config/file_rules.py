"""Rules about files that a run starts from."""

from pathlib import Path

from megappo.config import engine_rules, layout_rules, precision_rules, training_rules
from megappo.config.model_shape import ModelShape, read_model_config, shape_of
from megappo.config.model_support import model_faults
from megappo.config.reward_rules import model_rewards
from megappo.config.run import RunConfig
from megappo.errors import Violation


def model_folders_fit(config: RunConfig) -> list[Violation]:
    """Every model folder exists, and its sizes suit the layout and the longest sequence."""
    violations: list[Violation] = []
    shape = read_shape("model.path", config.model.path, _missing_model_remedy(config), violations)
    if shape is not None:
        violations += layout_rules.layout_divides_model(config, shape, role="actor")
        violations += engine_rules.engines_hold_model(config, shape)
        violations += layout_rules.sequences_fit_positions(config, shape)
        violations += training_rules.recompute_fits_layers(config, shape, role="actor")
        violations += training_rules.adapters_fit_model(config, shape, role="actor")
        violations += precision_rules.fp8_divides_features(config, shape, role="actor")
    if not layout_rules.needs_critic(config):
        return violations
    if config.critic.path is not None:
        remedy = "give a Hugging Face folder, or null to start from model.path"
        shape = read_shape("critic.path", config.critic.path, remedy, violations)
    if shape is not None:
        violations += layout_rules.layout_divides_model(config, shape, role="critic")
        violations += training_rules.recompute_fits_layers(config, shape, role="critic")
        violations += training_rules.adapters_fit_model(config, shape, role="critic")
        violations += precision_rules.fp8_divides_features(config, shape, role="critic")
    return violations


def _missing_model_remedy(config: RunConfig) -> str:
    if is_made_by_sft(config):
        return "run `megappo sft` with the same experiment first, for example `megappo sft experiment=quickstart`"
    return "give a Hugging Face folder: model.path=FOLDER"


def is_made_by_sft(config: RunConfig) -> bool:
    """Whether the starting model is the one that `megappo sft` writes under this configuration."""
    return bool(config.model.path) and Path(config.model.path) == Path(config.sft.output) / "model"


def read_shape(key: str, folder: str, remedy: str, violations: list[Violation]) -> ModelShape | None:
    path = Path(folder)
    if not folder or not path.is_dir():
        rule = "is not a folder that exists"
    elif not (path / "config.json").is_file():
        rule = "holds no config.json"
    else:
        try:
            content = read_model_config(path)
        except (OSError, ValueError) as error:
            rule = f"has a config.json that cannot be used: {error}"
        else:
            faults = model_faults(content)
            violations += [
                Violation(key=key, value=folder, rule=f"cannot be trained: {fault.problem}", remedy=fault.remedy)
                for fault in faults
            ]
            return None if faults else shape_of(content)
    violations.append(Violation(key=key, value=folder or "''", rule=rule, remedy=remedy))
    return None


def reward_model_folder_exists(config: RunConfig) -> list[Violation]:
    """The reward model's folder is there."""
    rule, remedy = "is not a folder with a config.json", "give a Hugging Face folder of a sequence-classification model"
    return [
        Violation(key=f"{key}.model_path", value=term.model_path, rule=rule, remedy=remedy)
        for key, term in model_rewards(config).items()
        if term.model_path and not (Path(term.model_path) / "config.json").is_file()
    ]


def checkpoint_to_resume_exists(config: RunConfig) -> list[Violation]:
    """A checkpoint named by path is there."""
    resume = config.trainer.resume
    if "/" not in resume or Path(resume).is_dir():
        return []
    remedy = "give a checkpoint folder, or auto for the newest of this run"
    return [Violation(key="trainer.resume", value=resume, rule="is not a folder that exists", remedy=remedy)]
