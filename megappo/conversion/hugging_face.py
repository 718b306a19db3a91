"""A Hugging Face folder: checked whole before anything is written of it, and written file by file, tensor by tensor."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from megappo.config.model import Dtype
from megappo.conversion.stored import StoredTensor, stored_tensors
from megappo.errors import CheckpointError, listed
from megappo.models.architecture import ModelArchitecture, read_architecture
from megappo.models.weight_shapes import weights_of
from megappo.weights.buckets import BucketMeta, TensorMeta, torch_dtype
from megappo.weights.layouts import ModelWeights
from megappo.weights.name_map import EMBEDDING, OUTPUT, VALUE_HEAD, Partition
from megappo.weights.safetensors_file import write_safetensors
from megappo.weights.safetensors_io import HuggingFaceWeights

_DERIVED = ".rotary_emb.inv_freq"
"""Old Llama folders hold this buffer; it follows from the config."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_COMPARED_ROWS = 1024
"""Rows of the two ends of a tied model that are compared at a time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HuggingFaceModel:
    """A folder whose weights are what its config.json says."""

    path: Path
    weights: HuggingFaceWeights
    architecture: ModelArchitecture
    model: ModelWeights
    tensors: list[StoredTensor]
    dtypes: frozenset[torch.dtype]
    """Of its tensors."""

    @property
    def role(self) -> str:
        """Return actor, or critic where it ends with a value head."""
        return "critic" if self.model.has_value_head else "actor"

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies beside the weights."""
        return has_tokenizer(self.path)

    def own_dtype(self) -> Dtype:
        """Return the type of all of its tensors.

        Raises:
            CheckpointError: they have several, or one that no model is trained in.
        """
        known = {torch_dtype(dtype.value): dtype for dtype in Dtype}
        if len(self.dtypes) == 1 and (dtype := known.get(next(iter(self.dtypes)))) is not None:
            return dtype
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
        choices = " or ".join(f"--dtype {dtype.value}" for dtype in Dtype)
        raise CheckpointError(f"{self.path} holds tensors of type {names} (say which type to write: {choices})")

    def read(self, name: str, partition: Partition, *, rank: int, size: int) -> torch.Tensor:
        """Return a part of a tensor, as `HuggingFaceWeights.read`."""
        return self.weights.read(name, partition, rank=rank, size=size)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def open_hugging_face(path: Path) -> HuggingFaceModel:
    """Open a folder and check all of it but the numbers. A value head makes it a critic.

    Raises:
        CheckpointError: the folder or a file of it cannot be read, or its tensors are not those of its config.json:
            all that are missing, unknown, not in the index or of another shape are named.
        CapabilityError: a family or a feature that is not supported.
    """
    architecture = read_architecture(path)
    weights = HuggingFaceWeights(path)
    model = weights_of(architecture, has_value_head=VALUE_HEAD in weights.names())
    tensors = stored_tensors(model)
    problems = [*_name_problems(weights, tensors, model), *_shape_problems(weights, tensors)]
    if not problems and model.tied_embeddings and OUTPUT in weights.names() and not _is_tied(weights):
        problems.append(f"tie_word_embeddings is true, but {OUTPUT} differs from {EMBEDDING}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} is not the {architecture.family} model of its config.json:\n{lines}")
    names = [name for tensor in tensors for name in tensor.hugging_face]
    return HuggingFaceModel(
        path=path,
        weights=weights,
        architecture=architecture,
        model=model,
        tensors=tensors,
        dtypes=frozenset(weights.dtype(name) for name in names),
    )


def _name_problems(weights: HuggingFaceWeights, tensors: Sequence[StoredTensor], model: ModelWeights) -> Iterator[str]:
    expected = {name for tensor in tensors for name in tensor.hugging_face}
    allowed = expected | ({OUTPUT} if model.tied_embeddings and not model.has_value_head else set())
    if missing := sorted(expected - weights.names()):
        yield f"missing tensors: {listed(missing)} ({len(missing)} in all)"
    unknown = sorted(name for name in weights.names() - allowed if not name.endswith(_DERIVED))
    if unknown:
        yield f"tensors of no known parameter: {listed(unknown)} ({len(unknown)} in all)"
    if ghosts := weights.ghost_names():
        yield f"tensors that the index names in a file that lacks them: {listed(ghosts)} ({len(ghosts)} in all)"
    if stray := [name for name in weights.stray_names() if not name.endswith(_DERIVED)]:
        yield f"tensors in a file that the index does not name there: {listed(stray)} ({len(stray)} in all)"


def _shape_problems(weights: HuggingFaceWeights, tensors: Sequence[StoredTensor]) -> Iterator[str]:
    """Yield what has another shape."""
    there = weights.names() - set(weights.ghost_names())
    for tensor in tensors:
        for name, shape in zip(tensor.hugging_face, tensor.shapes):
            if name in there and (found := tuple(weights.shape(name))) != shape:
                yield f"{name} has shape {list(found)}, must have {list(shape)}"


def _is_tied(weights: HuggingFaceWeights) -> bool:
    """Whether the output layer is the embedding bit by bit: else one of the two would be dropped silently."""
    ends = [weights.read(name, Partition.replicated, rank=0, size=1) for name in (EMBEDDING, OUTPUT)]
    if ends[0].shape != ends[1].shape or ends[0].dtype is not ends[1].dtype:
        return False
    return all(torch.equal(first, last) for first, last in zip(*(end.split(_COMPARED_ROWS) for end in ends)))


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightFile:
    """One file of a folder that is written."""

    sources: list[tuple[StoredTensor, int]]
    """Of each tensor in it: the tensor of the checkpoint, and which of its Hugging Face tensors it is."""
    metas: list[TensorMeta]

    @property
    def num_bytes(self) -> int:
        return sum(meta.num_bytes for meta in self.metas)

    @property
    def bucket(self) -> BucketMeta:
        """What the index says of it."""
        return BucketMeta(
            names=[meta.name for meta in self.metas],
            shapes=[meta.shape for meta in self.metas],
            dtype=self.metas[0].dtype,
            num_bytes=self.num_bytes,
        )


def plan_files(tensors: Sequence[StoredTensor], dtype: Dtype, max_bytes: int) -> list[WeightFile]:
    """Fill files in the order of the layers, up to `max_bytes` each; a larger tensor has a file of its own."""
    files: list[WeightFile] = []
    filled = 0
    for tensor in tensors:
        for index, (name, shape) in enumerate(zip(tensor.hugging_face, tensor.shapes)):
            meta = TensorMeta(name=name, shape=list(shape), dtype=dtype.value)
            if not files or filled + meta.num_bytes > max_bytes:
                files.append(WeightFile(sources=[], metas=[]))
                filled = 0
            files[-1].sources.append((tensor, index))
            files[-1].metas.append(meta)
            filled += meta.num_bytes
    return files


def write_file(
    path: Path, file: WeightFile, read: Callable[[StoredTensor], Sequence[torch.Tensor]], report: Callable[[int], None]
) -> None:
    """Write one file; `read` gives the Hugging Face tensors of one of a checkpoint. Raises CheckpointError."""

    def tensors() -> Iterator[torch.Tensor]:
        for tensor, sources in groupby(file.sources, key=lambda source: source[0]):
            parts = read(tensor)
            for _, index in sources:
                yield parts[index]
                report(parts[index].nbytes)

    write_safetensors(path, file.metas, tensors())
