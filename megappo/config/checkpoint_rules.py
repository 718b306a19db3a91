"""Rules of the section `checkpoint`: every key that is changed has an effect, and what is to be kept can exist."""

import math
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum

from megappo.config.checkpoint import BestMode, CheckpointConfig, OnDamaged, deadline_seconds
from megappo.config.layout_rules import needs_critic
from megappo.config.run import RunConfig
from megappo.config.validation_rules import validation_metric_fault
from megappo.errors import Violation
from megappo.observability.metric_catalogue import CATALOGUE, undocumented

_VALIDATION = "val/"


def makes_checkpoints(config: RunConfig) -> bool:
    """Whether the run saves at all: every trainer.save_freq steps, or before its deadline."""
    return config.trainer.save_freq != -1 or config.checkpoint.save_before_deadline is not None


def checkpoint_settings_are_used(config: RunConfig) -> list[Violation]:
    """A run that makes no checkpoint, or asks for no best one, changes nothing of how. (`megappo sft` and `megappo rm`
    read the section, too.)"""
    checkpoint, default = config.checkpoint, CheckpointConfig()
    unread = dict[str, tuple[str, str]]()
    if not makes_checkpoints(config) and config.sft.save_freq == config.rm.save_freq == -1:
        off = ("trainer.save_freq=-1: no checkpoint is made", "leave it out, or set trainer.save_freq")
        unread = dict.fromkeys((entry.name for entry in fields(CheckpointConfig)), off)
        if config.trainer.resume == "auto":
            del unread["on_damaged"]
    elif checkpoint.keep_best is None:
        unread["best_mode"] = ("checkpoint.keep_best=null", "leave it out, or name a metric there")
    return [
        Violation(
            key=f"checkpoint.{name}",
            value=value.name if isinstance(value, Enum) else value,
            rule=f"has no use with {why}",
            remedy=remedy,
        )
        for name, (why, remedy) in unread.items()
        if (value := _value(checkpoint, name)) != _value(default, name)
    ]


def _value(checkpoint: CheckpointConfig, name: str) -> int | float | str | BestMode | OnDamaged | None:
    return getattr(checkpoint, name)


def deadline_is_a_time(config: RunConfig) -> list[Violation]:
    """checkpoint.save_before_deadline is hours, minutes and seconds."""
    text = config.checkpoint.save_before_deadline
    if text is None or deadline_seconds(text) is not None:
        return []
    remedy = "write for example 23:30:00 ('23:30:00' with quotes in a file: YAML takes it for a number)"
    return [Violation(key="checkpoint.save_before_deadline", value=text, rule="must be HH:MM:SS", remedy=remedy)]


def kept_steps_are_saved(config: RunConfig) -> list[Violation]:
    """checkpoint.keep_every is a multiple of trainer.save_freq: other steps have no checkpoint."""
    every, saved = config.checkpoint.keep_every, config.trainer.save_freq
    if every is None or saved <= 0 or every % saved == 0:
        return []
    nearest = saved * max(1, round(every / saved))
    rule, remedy = f"must be a multiple of trainer.save_freq={saved}", f"use {nearest}"
    return [Violation(key="checkpoint.keep_every", value=every, rule=rule, remedy=remedy)]


def best_metric_is_measured(config: RunConfig) -> list[Violation]:
    """checkpoint.keep_best is the name of a metric that this run measures, as far as that is known."""
    name = config.checkpoint.keep_best
    if name is None:
        return []
    if undocumented([name]):
        names = [doc.name for docs in CATALOGUE.values() for doc in docs if "<" not in doc.name]
        near = get_close_matches(name, names, n=3)
        rule = "is no metric"
        remedy = f"did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists them"
    elif name.startswith(_VALIDATION) and (fault := validation_metric_fault(name, config)) is not None:
        rule, remedy = fault
    elif name.startswith("critic/") and not needs_critic(config):
        rule = f"is never measured: algorithm.advantage.name={config.algorithm.advantage.name} trains no critic"
        remedy = "use a metric of rewards or of the actor"
    else:
        return []
    return [Violation(key="checkpoint.keep_best", value=name, rule=rule, remedy=remedy)]


def checkpoint_notes(config: RunConfig) -> list[str]:
    """Return a line when few of the checkpoints can be the best."""
    name, saved, tested = config.checkpoint.keep_best, config.trainer.save_freq, config.trainer.test_freq
    if name is None or not name.startswith(_VALIDATION) or saved <= 0 or tested <= 0 or saved % tested == 0:
        return []
    return [
        f"checkpoint.keep_best={name} compares the checkpoints of steps with a validation: one in "
        f"{math.lcm(saved, tested) // saved}, since trainer.save_freq={saved} and trainer.test_freq={tested}"
    ]
