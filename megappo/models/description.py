"""`model.json`: what the weights (and the optimizer's state) in a folder of Megatron's are of."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megappo.checkpoint.reading import read_object, readable
from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.parallelism import ParallelismConfig
from megappo.errors import CheckpointError
from megappo.models.architecture import ModelArchitecture

MODEL_FILE = "model.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelDescription:
    """What a folder fits, and under which layout it was written."""

    role: str
    """`actor`: a language model; `critic` and `reward_model`: value models."""
    architecture: dict[str, Any]  # Any: the fields of ModelArchitecture
    dtype: str
    lora: dict[str, Any] | None  # Any: the fields of LoraConfig
    """The adapters, beside which only a value head is stored; None: all weights are."""
    optimizer: str | None
    """Whose state is stored (`ModelOptimizer.kind`); None: weights alone."""
    parallelism: dict[str, Any]  # Any: the fields of ParallelismConfig
    """Of the ranks that wrote it. It loads under any other."""
    world_size: int

    @classmethod
    def of(
        cls,
        role: str,
        architecture: ModelArchitecture,
        *,
        dtype: Dtype,
        parallelism: ParallelismConfig,
        world_size: int,
        lora: LoraConfig | None = None,
        optimizer: str | None = None,
    ) -> "ModelDescription":
        """Describe a model of this process's run."""
        described = cls(
            role=role,
            architecture=asdict(architecture),
            dtype=dtype.value,
            lora=None if lora is None else asdict(lora),
            optimizer=optimizer,
            parallelism=asdict(parallelism),
            world_size=world_size,
        )
        # As it is after a way through the file: tuples are lists there.
        return cls(**json.loads(described.to_json()))

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1)

    def check_fits(self, saved: "ModelDescription", folder: Path) -> None:
        """Refuse a folder of another model, type of numbers, optimizer or adapters; the layout may be any.

        Raises:
            CheckpointError: names what differs, of both.
        """
        wanted, found = self._content(), saved._content()
        differing = [key for key in wanted if found[key] != wanted[key]]
        if differing:
            of_checkpoint = {key: found[key] for key in differing}
            of_run = {key: wanted[key] for key in differing}
            raise CheckpointError(
                f"{folder} does not fit this run: it has {of_checkpoint}, the run has {of_run} "
                "(resume with what the checkpoint has, or start a new run from exported weights)"
            )

    def layout_differences(self, saved: "ModelDescription") -> dict[str, tuple[Any, Any]]:
        """Return what of the layout differs, there and here; nothing: every rank does here what it did there."""
        there, here = (each.parallelism | {"processes": each.world_size} for each in (saved, self))
        return {key: (there.get(key), here[key]) for key in here if there.get(key) != here[key]}

    def _content(self) -> dict[str, Any]:  # Any: values of several fields
        flat = asdict(self)
        for key in ("parallelism", "world_size"):
            del flat[key]
        return {key: value for key, value in flat.items() if key != "architecture"} | flat["architecture"]


def read_description(folder: Path) -> ModelDescription:
    """Return what a folder says of itself. Raises CheckpointError."""
    file = folder / MODEL_FILE
    with readable(file):
        described = ModelDescription(**read_object(file))
        types = {field.name: field.type for field in fields(ModelDescription)}
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(described, name), kinds):
                raise TypeError(f"{name} is {getattr(described, name)!r}, must be {types[name]}")
        Dtype(described.dtype)
        if described.lora is not None:
            LoraConfig(**described.lora)
        if "family" not in described.architecture:
            raise KeyError("architecture.family")
        return described


_KINDS = {
    "role": str,
    "architecture": dict,
    "dtype": str,
    "lora": dict | None,
    "optimizer": str | None,
    "parallelism": dict,
    "world_size": int,
}
"""What a file must hold; nothing checks a folder that a conversion wrote but this."""
