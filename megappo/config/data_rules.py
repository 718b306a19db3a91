"""Rules of the section `data`: sources are complete, named and read."""

import glob
import re
from dataclasses import fields
from pathlib import Path

from megappo.config.data import FILE_KINDS, SourceConfig
from megappo.config.run import RunConfig
from megappo.errors import Violation

_SOURCE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NEEDED = {"reasoning_gym": "task"} | dict.fromkeys(FILE_KINDS, "path")
"""Kind -> key that it reads."""
_READ_BY = {
    "path": FILE_KINDS,
    "split": ("datasets",),
    "task": ("reasoning_gym",),
    "params": ("reasoning_gym",),
    "seed": ("reasoning_gym",),
    "question_pattern": ("reasoning_gym",),
    "extra_columns": FILE_KINDS,
    "storage_options": FILE_KINDS,
}
"""Key -> kinds that read it; a function from outside may read any."""


def sources_are_complete(config: RunConfig) -> list[Violation]:
    """A source names what its kind reads."""
    return [
        Violation(
            key=f"{key}.{needed}",
            value="null",
            rule=f"must be given with {key}.kind={source.kind}",
            remedy=f"add {key}.{needed}=..., or pick a data file with data=NAME",
        )
        for key, source in config.data.by_key().items()
        if (needed := _NEEDED.get(source.kind)) is not None and getattr(source, needed) is None
    ]


def source_numbers_are_in_range(config: RunConfig) -> list[Violation]:
    """Sizes and weights are above 0, `skip` is not below, and `size` counts from the first row, `skip` included."""
    violations: list[Violation] = []
    for key, source in config.data.by_key().items():
        if source.size is not None and source.size <= 0:
            rule, remedy = "must be positive", "use 1 or more"
            violations.append(Violation(key=f"{key}.size", value=source.size, rule=rule, remedy=remedy))
        if source.skip < 0:
            rule, remedy = "must not be negative", "use 0 or more"
            violations.append(Violation(key=f"{key}.skip", value=source.skip, rule=rule, remedy=remedy))
        if not source.weight > 0:
            rule, remedy = "must be positive", "leave a source out that shall give no prompts"
            violations.append(Violation(key=f"{key}.weight", value=source.weight, rule=rule, remedy=remedy))
        if source.size is not None and 0 < source.size <= source.skip:
            rule = f"must be above {key}.skip={source.skip}: the skipped rows count"
            remedy = f"use {source.skip} plus the number of rows wanted"
            violations.append(Violation(key=f"{key}.size", value=source.size, rule=rule, remedy=remedy))
    return violations


def sources_are_named_one_way(config: RunConfig) -> list[Violation]:
    """One source or several: what is named the other way would not be read."""
    data = config.data
    violations: list[Violation] = []
    if data.train_sources:
        unread = {"path": data.train.path, "task": data.train.task}
        violations += [
            _unread(f"data.train.{name}", value, "data.train_sources") for name, value in unread.items() if value
        ]
    if data.validation_sets and data.validation is not None:
        violations.append(_unread("data.validation", data.validation.place, "data.validation_sets"))
    violations += [
        Violation(
            key="data.train_sources",
            value=name or "''",
            rule="cannot be a part of a metric's name",
            remedy="use letters, digits, _ - and .",
        )
        for name in data.train_sources
        if not _SOURCE_NAME.fullmatch(name)
    ]
    return violations


def _unread(key: str, value: str, given: str) -> Violation:
    rule, remedy = f"is not read beside {given}", f"set {key}=null, or add the source to {given}"
    return Violation(key=key, value=value, rule=rule, remedy=remedy)


def source_settings_are_read(config: RunConfig) -> list[Violation]:
    """What is changed has an effect: kind, place and number of the sources read it."""
    data, default = config.data, SourceConfig()
    violations: list[Violation] = []
    for key, source in data.by_key().items():
        unread = {
            name: f"{key}.kind={source.kind}"
            for name, kinds in _READ_BY.items()
            if source.kind in _NEEDED and source.kind not in kinds
        }
        if source.kind in FILE_KINDS and "://" not in (source.path or ""):
            unread["storage_options"] = "a path that is no URL"
        if key not in {f"data.train_sources.{name}" for name in data.train_sources}:
            unread["weight"] = "one training source, or for validation"
        for name in (entry.name for entry in fields(SourceConfig) if entry.name in unread):
            value: object = getattr(source, name)
            if value != getattr(default, name):
                rule = f"has no use with {unread[name]}"
                violations.append(Violation(key=f"{key}.{name}", value=value, rule=rule, remedy="leave it out"))
    if data.curriculum_params and data.curriculum is None:
        key, value = "data.curriculum_params", data.curriculum_params
        violations.append(
            Violation(key=key, value=value, rule="has no use without data.curriculum", remedy="name the class there")
        )
    if data.curriculum is not None and ":" not in data.curriculum:
        rule, remedy = "is not there", "name a class: package.module:Class"
        violations.append(Violation(key="data.curriculum", value=data.curriculum, rule=rule, remedy=remedy))
    return violations


def validation_has_prompts(config: RunConfig) -> list[Violation]:
    """Validation needs data.validation."""
    if config.data.validating():
        return []
    wanted = [("trainer.test_freq", config.trainer.test_freq, -1)]
    wanted.append(("trainer.val_before_train", config.trainer.val_before_train, False))
    return [
        Violation(key=key, value=value, rule="needs data.validation", remedy=f"name a source there, or set {key}={off}")
        for key, value, off in wanted
        if value != off
    ]


def data_files_exist(config: RunConfig) -> list[Violation]:
    """The files of the data sources are there (a pattern matches at least one); those of a URL are seen when they are
    read."""
    return [
        Violation(
            key=f"{key}.path",
            value=source.path,
            rule="matches no file",
            remedy=f"paths are relative to {Path.cwd()}",
        )
        for key, source in config.data.by_key().items()
        if source.kind in FILE_KINDS
        and source.path
        and "://" not in source.path
        and not glob.glob(source.path, recursive=True)
    ]
