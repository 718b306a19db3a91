"""Rules of the section `record`."""

from megappo.config.parity import ParityLimits
from megappo.config.record import RecordConfig, RecordTrigger
from megappo.config.run import RunConfig
from megappo.errors import Violation


def recorded_steps_are_run(config: RunConfig) -> list[Violation]:
    """Steps count from 1 to the last one, and each is named once."""
    steps, last = config.record.steps, config.trainer.total_steps
    violations: list[Violation] = []
    for step in dict.fromkeys(steps):
        if step < 1:
            rule, remedy = "must be positive", "the first step is 1"
        elif last is not None and step > last:
            rule, remedy = f"is after the last step: trainer.total_steps={last}", f"use steps up to {last}"
        elif steps.count(step) > 1:
            rule, remedy = f"is named {steps.count(step)} times", "name it once"
        else:
            continue
        violations.append(Violation(key="record.steps", value=step, rule=rule, remedy=remedy))
    return violations


def record_settings_are_used(config: RunConfig) -> list[Violation]:
    """How to record is said only where something is recorded."""
    record, default = config.record, RecordConfig()
    unused: list[tuple[str, object, str, str]] = []
    if record.max_records != default.max_records and not record.when:
        unused.append(("max_records", record.max_records, "record.when=[]", "set record.when=[non_finite]"))
    if record.weights and not record.when and not record.steps:
        unused.append(("weights", True, "record.steps=[] and record.when=[]", "set record.steps=[1]"))
    return [
        Violation(key=f"record.{name}", value=value, rule=f"has no use with {why}", remedy=f"leave it out, or {remedy}")
        for name, value, why, remedy in unused
    ]


def recorded_parity_has_limits(config: RunConfig) -> list[Violation]:
    """A difference is worth a record when it is beyond some limit."""
    parity, none = config.rollout.parity, ParityLimits()
    if RecordTrigger.parity not in config.record.when or parity.warn != none or parity.stop != none:
        return []
    rule = "never happens: rollout.parity.warn and rollout.parity.stop have no limit"
    return [Violation(key="record.when", value="parity", rule=rule, remedy="set rollout.parity.warn.mean=0.05")]
