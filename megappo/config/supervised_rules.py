"""Rules about supervised training, for any section of it (`sft`, `rm`)."""

from pathlib import Path

from megappo.config import file_rules, layout_rules, precision_rules, training_rules
from megappo.config.data import SharedPrompt
from megappo.config.run import RunConfig
from megappo.config.supervised import SupervisedConfig
from megappo.errors import Violation


def supervised_run_can_be_made(
    config: RunConfig, settings: SupervisedConfig, section: str, *, loss: str
) -> list[Violation]:
    """The folder of the run has a name, and what is measured and kept can be.

    Args:
        section: where the settings are in the configuration.
        loss: name of the loss among the metrics; that of held-out rows is `val_loss` of the same area.
    """
    violations: list[Violation] = []
    if not Path(settings.output).name:
        rule, remedy = "must name a folder of the run's own", "for example runs/sft"
        violations.append(Violation(key=f"{section}.output", value=settings.output or "''", rule=rule, remedy=remedy))
    if settings.test_freq > 0 and config.data.validation is None:
        rule, remedy = "needs rows to measure the loss on", "set data.validation, or leave it at -1"
        violations.append(Violation(key=f"{section}.test_freq", value=settings.test_freq, rule=rule, remedy=remedy))
    if settings.test_freq > 0 and config.data.on_shared is not SharedPrompt.keep:
        rule, remedy = f"is not looked for by `megappo {section}`", f"set it to keep, or {section}.test_freq=-1"
        violations.append(Violation(key="data.on_shared", value=config.data.on_shared.value, rule=rule, remedy=remedy))
    return violations + _kept_checkpoints_exist(config, settings, section, loss)


def _kept_checkpoints_exist(config: RunConfig, settings: SupervisedConfig, section: str, loss: str) -> list[Violation]:
    """Steps to keep are saved, and the metric of the best one is measured."""
    saved, every, best = settings.save_freq, config.checkpoint.keep_every, config.checkpoint.keep_best
    if saved <= 0:
        return []
    violations: list[Violation] = []
    if every is not None and every % saved:
        rule = f"must be a multiple of {section}.save_freq={saved}"
        remedy = f"use {saved * max(1, round(every / saved))}"
        violations.append(Violation(key="checkpoint.keep_every", value=every, rule=rule, remedy=remedy))
    if best is None:
        return violations
    area = loss.partition("/")[0]
    is_held_out = best.startswith(f"{area}/val_")
    if not best.startswith(f"{area}/") or (is_held_out and settings.test_freq <= 0):
        without = f" with {section}.test_freq=-1" if is_held_out else ""
        rule = f"is never measured by `megappo {section}`{without}"
        remedy = f"use {loss} or, with {section}.test_freq, {area}/val_loss, and checkpoint.best_mode=min"
        violations.append(Violation(key="checkpoint.keep_best", value=best, rule=rule, remedy=remedy))
    return violations


def model_to_train_fits(config: RunConfig) -> list[Violation]:
    """The model that `megappo sft` starts from is there; its sizes suit layout, adapters and the longest row."""
    violations: list[Violation] = []
    remedy = "give a Hugging Face folder: model.path=FOLDER"
    shape = file_rules.read_shape("model.path", config.model.path, remedy, violations)
    if shape is not None:
        violations += layout_rules.layout_divides_model(config, shape, role="actor")
        violations += training_rules.recompute_fits_layers(config, shape, role="actor")
        violations += training_rules.adapters_fit_model(config, shape, role="actor")
        violations += precision_rules.fp8_divides_features(config, shape, role="actor")
        violations += rows_fit_positions(config.sft, "sft", positions=shape.max_position_embeddings)
    return violations


def rows_fit_positions(settings: SupervisedConfig, section: str, *, positions: int | None) -> list[Violation]:
    """A row may not be longer than the model's positions."""
    longest = settings.max_tokens
    if longest is None or positions is None or longest <= positions:
        return []
    rule = f"is more than model.max_position_embeddings={positions}"
    remedy = f"use at most {positions}, or null for that"
    return [Violation(key=f"{section}.max_tokens", value=longest, rule=rule, remedy=remedy)]


def one_source_is_trained_on(config: RunConfig, section: str) -> list[Violation]:
    """Several sources are mixed for prompts only."""
    if not config.data.train_sources:
        return []
    named = ", ".join(config.data.train_sources)
    rule = f"are not read by `megappo {section}`, which trains on one source"
    remedy = "set data.train, whose path may be a glob over several files"
    return [Violation(key="data.train_sources", value=named, rule=rule, remedy=remedy)]
