"""Hugging Face weights into a Megatron model: every rank reads the slices it holds, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.errors import CheckpointError
from megappo.models.architecture import ModelArchitecture
from megappo.models.families import FAMILIES
from megappo.models.parameters import hugging_face_shapes, mapped_parameters
from megappo.weights.name_map import OUTPUT, VALUE_HEAD, MappedParameter, hugging_face_names
from megappo.weights.safetensors_io import HuggingFaceWeights
from megappo.weights.transforms import merge


def load_hf_weights(model_chunks: Sequence[MegatronModule], architecture: ModelArchitecture, path: str | Path) -> None:
    """Fill the parameters of this rank from a Hugging Face folder. A value head that the folder lacks stays at zero.

    Raises:
        CheckpointError: tensors are missing, have another shape, or belong to no parameter; all are listed.
    """
    with HuggingFaceWeights(path) as weights:
        _check_names(weights, architecture)
        problems: list[str] = []
        for chunk in model_chunks:
            for parameter, mapped in mapped_parameters(chunk):
                if mapped.hugging_face == [VALUE_HEAD] and VALUE_HEAD not in weights.names():
                    continue
                problems += _load_parameter(parameter, mapped, weights, architecture)
    if problems:
        raise CheckpointError(
            f"{path} does not fit its config.json:\n" + "\n".join(f"  {problem}" for problem in problems)
        )


def _check_names(weights: HuggingFaceWeights, architecture: ModelArchitecture) -> None:
    """Refuse a folder that lacks tensors or holds others; every rank comes to the same result."""
    table = FAMILIES.get(architecture.family).names
    known = hugging_face_names(table, architecture.num_layers)
    # A critic's folder has a value head and no output layer, a policy's the other way round; either head starts one.
    optional = {VALUE_HEAD, OUTPUT}
    missing = sorted(known - optional - weights.names())
    unknown = sorted(weights.names() - known)
    lines = []
    if missing:
        lines.append(f"missing tensors: {_listed(missing)}")
    if unknown:
        lines.append(f"tensors of no known parameter: {_listed(unknown)}")
    if lines:
        raise CheckpointError(
            f"{weights.path} is not a {architecture.family} model of {architecture.num_layers} layers: "
            + "; ".join(lines)
            + " (the folder must hold exactly the tensors of its config.json)"
        )


def _listed(names: list[str], limit: int = 20) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


@torch.no_grad()
def _load_parameter(
    parameter: torch.nn.Parameter,
    mapped: MappedParameter,
    weights: HuggingFaceWeights,
    architecture: ModelArchitecture,
) -> list[str]:
    """Fill one parameter. Returns what does not fit."""
    absent = [name for name in mapped.hugging_face if name not in weights.names()]
    if absent:
        return [f"{', '.join(absent)} is missing"]
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    expected = hugging_face_shapes(parameter, mapped, architecture)
    wrong = [
        f"{name} has shape {weights.shape(name)}, must have {shape}"
        for name, shape in zip(mapped.hugging_face, expected)
        if weights.shape(name) != shape
    ]
    if wrong:
        return wrong
    parts = [weights.read(name, mapped.partition, rank=rank, size=size) for name in mapped.hugging_face]
    parameter.copy_(merge(mapped.transform, parts, num_groups=architecture.num_key_value_heads // size))
    return []
