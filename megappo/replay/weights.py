"""Which weights a record is replayed with."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megappo.checkpoint.health import is_in_checkpoint
from megappo.checkpoint.manifest import MANIFEST
from megappo.checkpoint.names import step_name
from megappo.controller.record_folder import WEIGHTS, StepRecord
from megappo.errors import CheckpointError, RecordError, listed
from megappo.models.description import MODEL_FILE, read_description


class Origin(Enum):
    """Where weights come from."""

    start = "the weights that the run began with"
    export = "a Hugging Face folder"
    checkpoint = "a checkpoint"
    converted = "a converted folder"


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleWeights:
    """The weights of one role before the recorded update."""

    origin: Origin
    model: str
    """Hugging Face folder that the model is built from."""
    checkpoint: str | None = None
    """Folder of the role in a checkpoint, which is then loaded: weights and optimizer, or of a converted folder the
    weights."""

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the optimizer is as it was: read, or not used yet."""
        return self.origin in (Origin.start, Origin.checkpoint)

    def describe(self) -> str:
        """Return where they are, in words."""
        return f"{self.origin.value}, {self.checkpoint or self.model}"


def find_weights(record: StepRecord, folder: Path, role: str, *, given: Path | None, start: Path) -> RoleWeights:
    """Return the weights to replay a role with: those given, else what the record names.

    Args:
        folder: of the record.
        given: a Hugging Face folder, a checkpoint or the role's folder in one.
        start: Hugging Face folder of the weights that the run began with.

    Raises:
        RecordError: `given` is none of these, or nothing is given and what the record names is not here.
    """
    if given is not None:
        return _given(given, role, start)
    reference = record.weights[role]
    if reference.is_exported:
        return RoleWeights(origin=Origin.export, model=str(folder / WEIGHTS / role))
    checkpoints = [Path(reference.checkpoint)] if reference.checkpoint is not None else []
    # A run may have been moved as a whole.
    checkpoints.append(folder.resolve().parent.parent / "checkpoints" / step_name(record.step - 1))
    for checkpoint in checkpoints:
        if (checkpoint / role / MODEL_FILE).is_file():
            return RoleWeights(origin=Origin.checkpoint, model=str(start), checkpoint=str(checkpoint / role))
    if record.step == 1 and (start / "config.json").is_file():
        return RoleWeights(origin=Origin.start, model=str(start))
    looked = start if record.step == 1 else checkpoints[0]
    raise RecordError(
        f"{folder}: the {role}'s weights before step {record.step} are not here: there is no {looked} (give a Hugging "
        f"Face folder of them, or the checkpoint of step {record.step - 1}: --{option_of(role)} DIR; "
        "record.weights=true writes them into the record)"
    )


def option_of(role: str) -> str:
    """Return the name of the command-line option that gives a role's weights."""
    return "weights" if role == "actor" else f"{role}-weights"


def _given(given: Path, role: str, start: Path) -> RoleWeights:
    for folder in (given / role, given):
        if (folder / MODEL_FILE).is_file():
            is_whole = read_description(folder).optimizer is not None
            if is_whole and not is_in_checkpoint(folder):
                raise RecordError(
                    f"--{option_of(role)} {given} is one model of a checkpoint, without the {MANIFEST} beside it, "
                    f"which holds its checksums (give {folder.name}/ in the folder of its checkpoint)"
                )
            origin = Origin.checkpoint if is_whole else Origin.converted
            return RoleWeights(origin=origin, model=str(start), checkpoint=str(folder))
    if (given / "config.json").is_file() and next(given.glob("*.safetensors"), None) is not None:
        return RoleWeights(origin=Origin.export, model=str(given))
    raise RecordError(
        f"--{option_of(role)} {given} holds no weights of the {role} (give a Hugging Face folder with config.json and "
        f"*.safetensors, a checkpoint such as checkpoints/step_000011, the folder {role}/ in one, or one that megappo "
        "convert wrote)"
    )


def compare_with_record(
    checksums: Mapping[str, str], recorded: Mapping[str, str], non_finite: Mapping[str, int], *, role: str, where: str
) -> None:
    """Refuse weights that are not those that the record was made with.

    Args:
        checksums, recorded: tensor -> checksum, here and in the record.
        non_finite: tensor -> how many of its numbers are not finite, where any is.

    Raises:
        CheckpointError: names the tensors.
    """
    different = sorted(name for name in recorded if name in checksums and checksums[name] != recorded[name])
    faults = {
        "with other values": [
            f"{name} ({non_finite[name]} not finite)" if name in non_finite else name for name in different
        ],
        "missing": sorted(recorded.keys() - checksums.keys()),
        "not in the record": sorted(checksums.keys() - recorded.keys()),
    }
    found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in faults.items() if names]
    if found:
        raise CheckpointError(
            f"the {role}'s weights in {where} are not those that the record was made with: of {len(recorded)} tensors "
            f"{'; '.join(found)} (give the weights before the update of the recorded step, or --other-weights to see "
            "what these do)"
        )
