"""A checkpoint of one model, found and checked: of a run, or what a conversion wrote."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from megappo.checkpoint.differences import CONFIG_FILE
from megappo.checkpoint.health import Checksums, check, is_in_checkpoint, model_problems
from megappo.checkpoint.manifest import MANIFEST
from megappo.checkpoint.names import WRITING, checkpoints_in
from megappo.checkpoint.reading import readable
from megappo.config.lora import LoraConfig
from megappo.conversion.stored import StoredTensor, stored_adapters, stored_tensors
from megappo.conversion.torch_dist import StoredFolder
from megappo.errors import CheckpointError, DamagedCheckpointError, listed
from megappo.models.architecture import ModelArchitecture, read_architecture
from megappo.models.description import MODEL_FILE, ModelDescription, read_description
from megappo.models.weight_shapes import weights_of
from megappo.weights.layouts import ModelWeights
from megappo.weights.name_map import VALUE_HEAD

OPTIMIZER_PREFIX = "optimizer.state."
"""Begins the key of a tensor of an optimizer: then comes what it is, and the key of the weight (train.optimizer_state).
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelCheckpoint:
    """The folder of one role."""

    path: Path
    folder: StoredFolder
    description: ModelDescription
    side: Path
    """Hugging Face folder of the same model: config, tokenizer, and the weights beside adapters."""
    architecture: ModelArchitecture
    model: ModelWeights
    lora: LoraConfig | None

    @property
    def adapters(self) -> list[StoredTensor]:
        """Return the factors that it holds."""
        return [] if self.lora is None else stored_adapters(self.model, self.lora)

    @property
    def tensors(self) -> list[StoredTensor]:
        """Return the weights that it holds: all, or beside adapters those and a value head."""
        weights = stored_tensors(self.model)
        if self.lora is None:
            return weights
        return [tensor for tensor in weights if tensor.hugging_face == (VALUE_HEAD,)] + self.adapters

    def check_bytes(self) -> None:
        """Compare this process's share of the files with the checksums of the checkpoint; a converted folder has none.
        A torch archive does not tell that a bit of it is another. Raises DamagedCheckpointError."""
        if is_in_checkpoint(self.path):
            share = dist.get_rank(), dist.get_world_size()
            _refuse_damage(self.path, model_problems(self.path, Checksums.full, share=share))

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Read a whole tensor. Raises CheckpointError."""
        return self.folder.read(tensor.key, (0,) * len(tensor.shape), tensor.shape)


def open_checkpoint(path: Path, *, role: str | None = None, hf: Path | None = None) -> ModelCheckpoint:
    """Open a checkpoint and check all of it but the numbers.

    Args:
        path: of a whole checkpoint (`<run>/checkpoints/step_000040`) or of one model's folder in it, or a converted
            folder.
        role: actor, critic or reward_model; None: actor, or what a folder of one model is.
        hf: Hugging Face folder of the model; None: what lies beside the weights, or the starting model of the run.

    Raises:
        CheckpointError: the folder is none, is not whole, or is of another model than `hf`; tensors that are missing,
            unknown or of another shape are named.
    """
    own = _model_folder(path, role)
    description = read_description(own)
    if role is not None and description.role != role:
        raise CheckpointError(f"{own} holds a model of the role {description.role}, not {role}")
    side = hf or _side_folder(own, description.role)
    architecture = read_architecture(side)
    _check_architecture(description, architecture, own, side)
    checkpoint = ModelCheckpoint(
        path=own,
        folder=StoredFolder(own),
        description=description,
        side=side,
        architecture=architecture,
        model=weights_of(architecture, has_value_head=description.role != "actor"),
        lora=None if description.lora is None else LoraConfig(**description.lora),
    )
    _check_tensors(checkpoint)
    return checkpoint


def _model_folder(path: Path, role: str | None) -> Path:
    """Return the folder with the files of one model."""
    if path.name.endswith(WRITING):
        raise CheckpointError(f"{path} is being written, or was when its run ended (take a whole one beside it)")
    if not path.is_dir():
        beside = [found.name for found in checkpoints_in(path.parent).values()] if path.parent.is_dir() else []
        raise CheckpointError(f"{path} does not exist" + (f" (there are {listed(beside)})" if beside else ""))
    if not (path / MANIFEST).is_file() and is_in_checkpoint(path):
        _refuse_damage(path, model_problems(path, Checksums.small))
    if (path / MODEL_FILE).is_file():
        return path
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is no checkpoint: it holds neither {MANIFEST} nor {MODEL_FILE} "
            "(give a folder such as <run>/checkpoints/step_000040)"
        )
    health = check(path, Checksums.small)
    _refuse_damage(path, health.problems)
    own = path / (role or "actor")
    if not own.is_dir():
        assert health.manifest is not None
        raise CheckpointError(f"{path} holds no {own.name} (it holds {', '.join(health.manifest.roles)})")
    return own


def _refuse_damage(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise DamagedCheckpointError(f"{path} is damaged: {listed(problems)} (copy it again, or take another one)")


def _side_folder(own: Path, role: str) -> Path:
    """Return the Hugging Face folder that goes with a checkpoint: itself, or what its run started from."""
    if (own / "config.json").is_file():
        return own
    file = own.parent / CONFIG_FILE
    try:
        config: Any = yaml.safe_load(file.read_text(encoding="utf-8"))  # Any: a configuration as YAML holds it
        recorded = Path((None if role == "actor" else config[role]["path"]) or config["model"]["path"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{own} does not say which model it started from: {file} cannot be used: {error!r} (give --hf DIR)"
        ) from error
    if not (recorded / "config.json").is_file():
        raise CheckpointError(
            f"{own} started from {recorded}, which is not there, seen from {Path.cwd()} (give it as --hf DIR)"
        )
    return recorded


def _check_architecture(description: ModelDescription, architecture: ModelArchitecture, own: Path, side: Path) -> None:
    # As it is after a way through a file: tuples are lists there.
    wanted: Mapping[str, Any] = json.loads(json.dumps(asdict(architecture)))  # Any: fields of several types
    differing = [key for key in wanted if wanted[key] != description.architecture.get(key)]
    if differing:
        shown = "; ".join(f"{key}: {description.architecture.get(key)} and {wanted[key]}" for key in differing)
        raise CheckpointError(
            f"{own} is of another model than {side}: {shown} (give the folder it started from as --hf)"
        )


def _check_tensors(checkpoint: ModelCheckpoint) -> None:
    problems = list(_problems(checkpoint))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{checkpoint.path} does not hold the model of its {MODEL_FILE}:\n{lines}")


def _problems(checkpoint: ModelCheckpoint) -> Iterator[str]:
    found = checkpoint.folder.tensors()
    expected = {tensor.key: tensor.shape for tensor in checkpoint.tensors}
    if missing := [key for key in expected if key not in found]:
        yield f"missing tensors: {listed(missing)} ({len(missing)} in all)"
    known = set(expected)
    if checkpoint.description.optimizer is not None:
        known |= {key for key in found if weight_key(key) in expected}
    if unknown := sorted(set(found) - known):
        yield f"tensors of no known parameter: {listed(unknown)} ({len(unknown)} in all)"
    for key, shape in expected.items():
        if key in found and tuple(found[key].size) != shape:
            yield f"{key} has shape {list(found[key].size)}, must have {list(shape)}"


def weight_key(key: str) -> str | None:
    """Return the key of the weight that a tensor of an optimizer belongs to; None: it is none."""
    if not key.startswith(OPTIMIZER_PREFIX):
        return None
    return key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2]


def read_common(folder: Path) -> Mapping[str, Any]:  # Any: numbers
    """Return what a checkpoint holds once for all ranks. Raises CheckpointError."""
    file = folder / "common.pt"
    with readable(file):
        common = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(common, dict):
            raise TypeError(f"it holds {type(common).__name__}")
        return common
