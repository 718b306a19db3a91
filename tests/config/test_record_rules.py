"""What may be asked of records of steps."""

import pytest

from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.record import RecordConfig, RecordTrigger
from megappo.config.rules import check_config
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config, resolved_yaml, restore_run_config
from megappo.errors import ConfigError


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (RecordConfig(steps=[0]), "record.steps=0 must be positive (the first step is 1)"),
        (RecordConfig(steps=[9]), "record.steps=9 is after the last step: trainer.total_steps=5 (use steps up to 5)"),
        (RecordConfig(steps=[2, 2]), "record.steps=2 is named 2 times (name it once)"),
        (RecordConfig(max_records=3), "record.max_records=3 has no use with record.when=[] (leave it out"),
        (RecordConfig(when=[RecordTrigger.parity], max_records=0), "record.max_records=0 must be positive"),
        (RecordConfig(weights=True), "record.weights=True has no use with record.steps=[] and record.when=[]"),
        (RecordConfig(when=[RecordTrigger.parity]), "record.when=parity never happens: rollout.parity.warn and"),
    ],
)
def test_a_wrong_value_is_one_violation(record: RecordConfig, message: str, config: RunConfig) -> None:
    config.record, config.trainer.total_steps = record, 5
    if "never happens" in message:
        config.rollout.parity = ParityConfig(warn=ParityLimits(), stop=ParityLimits())
    (found,) = check_config(config)
    assert str(found).startswith(message)


def test_what_can_be_recorded_breaks_no_rule(config: RunConfig) -> None:
    config.record = RecordConfig(steps=[1, 3], when=list(RecordTrigger), weights=True, max_records=1)
    assert check_config(config) == []


def test_a_stored_configuration_comes_back_with_changes() -> None:
    config = load_run_config(["experiment=quickstart_ppo", "record.steps=[3,7]", "record.when=[parity]"])
    restored = restore_run_config(resolved_yaml(config))
    assert restored == config
    changed = restore_run_config(resolved_yaml(config), ["actor.parallelism.tensor=2", "model.dtype=bfloat16"])
    assert changed.actor.parallelism.tensor == 2 and changed.model.dtype.name == "bfloat16"
    with pytest.raises(ConfigError, match=r"actor.tensor=2 is not a key .*\n.*model.dtype=half must be one of"):
        restore_run_config(resolved_yaml(config), ["actor.tensor=2", "model.dtype=half"])
    with pytest.raises(ConfigError, match=r"actor.speed=\? cannot be read: .*\(use the megappo that wrote it\)"):
        restore_run_config("actor: {speed: 3}")
