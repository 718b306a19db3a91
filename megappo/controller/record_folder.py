"""The folder of a recorded step: `<run>/records/step_000012/`, all that `megappo replay` needs but the weights.

    record.json     why, layouts, metrics of each phase, where the weights are; size and checksum of the other files,
                    and its own
    fields.npz      numbers of every token and sequence, in the order of the shards
    sequences.json  what the controller knew of each sequence, in the same order
    requests.json   what actor and critic were told to do in the update
    config.yaml     the resolved configuration
    versions.json   of the packages that matter
    parity.json     the worst sequences in words, where engine and trainer disagree (`controller.parity_dump`)
    weights/        Hugging Face folders of actor and critic before the update, where they were asked for

A folder without `.writing` behind its name is whole. Shapes: N packed tokens, B sequences.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from megappo import __version__
from megappo.balance.layout import RankLayout
from megappo.batch.fields import arrays_of
from megappo.batch.requests import MiniBatch, TokenSelection, UpdateRequest, Whitening
from megappo.batch.stages import Experience, TokenField
from megappo.checkpoint.health import file_problem
from megappo.checkpoint.manifest import FileRecord, digest_of, record_files
from megappo.checkpoint.reading import read_arrays, read_object, readable
from megappo.controller.ports import SequenceInfo
from megappo.errors import RecordError
from megappo.observability.metrics import Metrics, pack, unpack
from megappo.observability.run_directory import write_atomically
from megappo.observability.versions import VERSIONS_FILE, package_versions
from megappo.rewards.types import Reward

FORMAT = 2
WEIGHTS = "weights"
"""Folder of exported weights inside a record."""
_RECORD, _FIELDS, _SEQUENCES, _REQUESTS = "record.json", "fields.npz", "sequences.json", "requests.json"
_CONFIG = "config.yaml"


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsReference:
    """Where the weights are that one role computed with before the update."""

    start: str
    """Folder of the weights that the run began with."""
    is_exported: bool
    """Whether the record holds them, in `weights/<role>/`."""
    checkpoint: str | None
    """Folder of the checkpoint that holds them, if one was made and kept; None: the run makes none."""
    checksums: dict[str, str] | None
    """Of each tensor, by its Hugging Face name; None: they were others by the time the record was due."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRecord:
    """One step as it was."""

    step: int
    reasons: list[str]
    """Why it was recorded."""
    is_whole: bool
    """Whether all sequences of the step are here; else they are the worst of the parity monitor."""
    sequences: list[SequenceInfo]
    """[B]."""
    rewards: list[Reward]
    """[B]."""
    greedy_scores: dict[int, float]
    """Group id -> score of the greedy answer, where one was asked for."""
    experience: Experience
    token_rewards: TokenField
    current: np.ndarray
    """[B] bool, whether the actor's weights before the update sampled the sequence."""
    shards: list[list[int]]
    """Sequence ids."""
    kl_coef: float
    """Of KL in reward, in this step."""
    requests: dict[str, list[UpdateRequest]]
    """Role -> request of each data rank; empty where no update came."""
    metrics: dict[str, Metrics]
    """Phase (experience, critic, actor) -> its metrics."""
    layouts: dict[str, RankLayout]
    weights: dict[str, WeightsReference]
    """By role."""
    config: str
    """YAML."""

    @property
    def version(self) -> int:
        """Version of the weights before the update."""
        return self.step - 1


def write_record(aside: Path, final: Path, record: StepRecord, *, extra: Mapping[str, str]) -> None:
    """Write a record into the existing folder `aside`, and move it to its place once it is whole.

    Args:
        extra: file name -> text, of files beside those of the record.

    Raises:
        OSError: the disk refuses.
    """
    written = [aside / name for name in (_FIELDS, _SEQUENCES, _REQUESTS, _CONFIG, VERSIONS_FILE, *extra)]
    arrays = {f"experience.{name}": value for name, value in arrays_of(record.experience).items()}
    arrays |= {"token_rewards": record.token_rewards.values, "current": record.current}
    np.savez(aside / _FIELDS, allow_pickle=False, **arrays)
    sequences = [info._asdict() | asdict(reward) for info, reward in zip(record.sequences, record.rewards, strict=True)]
    texts = {
        _SEQUENCES: _dump(sequences),
        _REQUESTS: _dump({role: [asdict(part) for part in parts] for role, parts in record.requests.items()}),
        _CONFIG: record.config,
        VERSIONS_FILE: _dump(package_versions()),
        **extra,
    }
    for name, text in texts.items():
        (aside / name).write_text(text, encoding="utf-8")
    about: dict[str, Any] = {  # Any: JSON
        "format": FORMAT,
        "step": record.step,
        "reasons": record.reasons,
        "is_whole": record.is_whole,
        "greedy_scores": record.greedy_scores,
        "shards": record.shards,
        "kl_coef": record.kl_coef,
        "metrics": {phase: pack(found) for phase, found in record.metrics.items()},
        "layouts": {role: asdict(layout) for role, layout in record.layouts.items()},
        "weights": {role: asdict(reference) for role, reference in record.weights.items()},
        "files": [asdict(file) for file in record_files(aside, written)],
    }
    # As it will be read: keys are text, and what is not finite, too.
    content = json.loads(_dump(about))
    write_atomically(aside / _RECORD, _dump(content | {"digest": digest_of(content)}))
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)


def read_record(folder: Path) -> StepRecord:
    """Read a record and check that it is whole.

    Raises:
        RecordError: no record, another format, or a file is missing or damaged; names it.
    """
    about = _read_about(folder)
    with readable(folder / _RECORD, RecordError):
        return _record_of(folder, about)


def _record_of(folder: Path, about: dict[str, Any]) -> StepRecord:  # Any: JSON
    _check_files(folder, about["files"])
    found = read_arrays(folder / _FIELDS, RecordError)
    experience = Experience(
        **{name.removeprefix("experience."): array for name, array in found.items() if name.startswith("experience.")}
    )
    rows = json.loads((folder / _SEQUENCES).read_text(encoding="utf-8"))
    return StepRecord(
        step=about["step"],
        reasons=about["reasons"],
        is_whole=about["is_whole"],
        sequences=[SequenceInfo(**{name: row[name] for name in SequenceInfo._fields}) for row in rows],
        rewards=[Reward(score=float(row["score"]), parts=_floats(row["parts"])) for row in rows],
        greedy_scores={int(group): float(score) for group, score in about["greedy_scores"].items()},
        experience=experience,
        token_rewards=TokenField(
            offsets=experience.offsets, values=found["token_rewards"], sequence_ids=experience.sequence_ids
        ),
        current=found["current"],
        shards=about["shards"],
        kl_coef=float(about["kl_coef"]),
        requests={role: [_request(part) for part in parts] for role, parts in read_object(folder / _REQUESTS).items()},
        metrics={phase: unpack(numbers) for phase, numbers in about["metrics"].items()},
        layouts={role: RankLayout(**layout) for role, layout in about["layouts"].items()},
        weights={role: WeightsReference(**reference) for role, reference in about["weights"].items()},
        config=(folder / _CONFIG).read_text(encoding="utf-8"),
    )


def _read_about(folder: Path) -> dict[str, Any]:  # Any: JSON
    path = folder / _RECORD
    if not path.is_file():
        raise RecordError(
            f"{folder} is no record of a step: it holds no {_RECORD} (give a folder such as "
            "runs/NAME/records/step_000012; one that ends in .writing was never finished)"
        )
    about = read_object(path, RecordError)
    if about.get("format") != FORMAT:
        raise RecordError(
            f"{path} has format {about.get('format')!r}, this megappo {__version__} reads format {FORMAT} "
            f"(replay it with the megappo that wrote it: {folder / VERSIONS_FILE} says which)"
        )
    if about.pop("digest", None) != digest_of(about):
        raise RecordError(f"{path} is damaged: its digest is that of another content (copy the folder again)")
    return about


def _check_files(folder: Path, recorded: list[dict[str, Any]]) -> None:  # Any: JSON
    """Refuse a record of which a file is missing or not what was written."""
    for entry in recorded:
        problem = file_problem(folder, FileRecord(**entry), with_checksum=True)
        if problem is not None:
            raise RecordError(f"{folder}: {problem} (copy the folder again, or make another record)")


def is_whole_record(folder: Path) -> bool:
    """Whether a folder is a record of all sequences of its step."""
    try:
        return bool(_read_about(folder)["is_whole"])
    except RecordError:
        return False


def _request(part: Mapping[str, Any]) -> UpdateRequest:  # Any: JSON
    whitening, selection = part["whitening"], part["selection"]
    return UpdateRequest(
        mini_batches=[
            MiniBatch(
                micro_batches=mini_batch["micro_batches"],
                loss_weights={int(key): float(weight) for key, weight in mini_batch["loss_weights"].items()},
            )
            for mini_batch in part["mini_batches"]
        ],
        epochs=part["epochs"],
        whitening=None if whitening is None else Whitening(**_floats(whitening)),
        selection=None if selection is None else TokenSelection(**_floats(selection)),
    )


def _floats(numbers: Mapping[str, Any]) -> dict[str, float]:  # Any: JSON
    return {name: float(value) for name, value in numbers.items()}


def _dump(value: object) -> str:
    """Return JSON, which has no NaN and infinities: they are the strings that float() reads."""
    return json.dumps(_plain(value), allow_nan=False) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast(Mapping[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(list[object], value)]
    return value
