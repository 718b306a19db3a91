"""Rules of the section `restart`: a run that is started again goes on from a checkpoint, so it makes some."""

from collections.abc import Callable

from megappo.config.run import RunConfig
from megappo.errors import Violation


def some_command_makes_checkpoints(config: RunConfig) -> list[Violation]:
    """restart.max needs the checkpoints of one of the commands that train; which one is run is not known here."""
    return [] if any(frequency != -1 for frequency in _frequencies(config).values()) else _nothing_to_go_on_from(config)


def checkpoints_of(command: str) -> Callable[[RunConfig], list[Violation]]:
    """Return the rule that this command makes them. `command`: train, sft or rm."""

    def this_command_makes_checkpoints(config: RunConfig) -> list[Violation]:
        if _frequencies(config)[command] != -1 or some_command_makes_checkpoints(config):
            return []
        return _nothing_to_go_on_from(config, command)

    return this_command_makes_checkpoints


def _frequencies(config: RunConfig) -> dict[str, int]:
    return {"train": config.trainer.save_freq, "sft": config.sft.save_freq, "rm": config.rm.save_freq}


def _nothing_to_go_on_from(config: RunConfig, command: str = "train") -> list[Violation]:
    if config.restart.max < 1:
        return []
    key = f"{'trainer' if command == 'train' else command}.save_freq"
    rule = f"has nothing to go on from: {key}=-1 makes no checkpoint"
    return [Violation(key="restart.max", value=config.restart.max, rule=rule, remedy=f"set {key}, or leave it out")]
