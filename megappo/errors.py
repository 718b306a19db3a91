"""Every error a user can meet. Each message names what was given, the rule it breaks and the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass

_LISTED = 8

INTERRUPTED = 130
"""Exit code of a command that was interrupted (128 + SIGINT, as shells have it)."""


class MegappoError(Exception):
    """Base of all errors that megappo raises on purpose. The command line prints them without a traceback."""

    exit_code = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class Violation:
    """One broken rule: `key=value rule (remedy)`, for example
    `actor.parallelism.tensor=3 must divide model.num_attention_heads=4 (use 1, 2 or 4)`."""

    key: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} {self.rule} ({self.remedy})"


class ConfigError(MegappoError):
    """The run configuration breaks one or more rules; all of them are listed at once."""

    exit_code = 2

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__("\n".join(f"config error: {violation}" for violation in violations))

    def __reduce__(self) -> tuple[type, tuple[list[Violation]]]:
        return type(self), (self.violations,)


class DataError(MegappoError):
    """A data source, tokenizer or reward was given something it cannot use; names file and line where there is one."""

    exit_code = 2


class CheckpointError(MegappoError):
    """A checkpoint or model folder cannot be used as it is asked for: it is missing, damaged, or does not fit."""

    exit_code = 2


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or not as they were written; nothing was loaded."""


class StorageError(CheckpointError):
    """A checkpoint or model folder cannot be read or written although nothing is wrong with what was asked for: the
    disk refuses, or a process failed."""

    exit_code = 1


class CapabilityError(MegappoError):
    """A requested feature is not available on this back end; says why and what to use instead."""

    exit_code = 2


class EngineError(MegappoError):
    """A rollout engine failed, died or did not answer in time; names the engine, the phase and its last log lines."""


class RequestError(EngineError):
    """A generate request that no engine can serve (its tokens, its sampling): the request is at fault, not the engine,
    so it is never sent again."""


class WorkerError(MegappoError):
    """A training or reward worker failed or died; names the role, rank, node and its last log lines."""


class RewardError(MegappoError):
    """A reward raised, hung, or returned no finite number, and the run is not to go on without the score."""


class NonFiniteError(MegappoError):
    """Training produced too many non-finite steps in a row."""


class ParityError(MegappoError):
    """Engine and trainer give the same tokens other log-probs than `rollout.parity.stop` allows; names step, numbers,
    worst sequences, the record and what to try."""


class RecordError(MegappoError):
    """A recorded step cannot be read or replayed; names the file or field, what is wrong and the remedy."""

    exit_code = 2


def listed(names: Sequence[str]) -> str:
    """Return the first few of many names, for a message."""
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
