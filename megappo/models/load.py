"""Hugging Face weights into a Megatron model: every rank reads the slices it holds, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.errors import CheckpointError
from megappo.models.architecture import ModelArchitecture
from megappo.models.families import FAMILIES
from megappo.models.parameters import hugging_face_shapes, mapped_parameters, shards_of
from megappo.weights.name_map import (
    EMBEDDING,
    OUTPUT,
    VALUE_HEAD,
    MappedParameter,
    Partition,
    Transform,
    hugging_face_names,
)
from megappo.weights.safetensors_io import HuggingFaceWeights
from megappo.weights.transforms import merge

_DERIVED = ".rotary_emb.inv_freq"
"""Old Llama folders hold this buffer; it follows from the config."""


def load_hf_weights(model_chunks: Sequence[MegatronModule], architecture: ModelArchitecture, path: str | Path) -> None:
    """Fill the parameters of this rank from a Hugging Face folder. A value head that the folder lacks stays at zero.

    Raises:
        CheckpointError: tensors are missing, have another shape, belong to no parameter, or contradict
            `tie_word_embeddings`; all are listed.
    """
    with HuggingFaceWeights(path) as weights:
        _check_names(weights, architecture)
        problems = _check_tie(weights) if architecture.tied_embeddings else []
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
    experts = architecture.experts
    known = hugging_face_names(
        table,
        architecture.num_layers,
        num_experts=experts.num_experts if experts else 0,
        dense_layers=experts.dense_layers if experts else (),
    )
    # A critic's folder has a value head and no output layer, a policy's the other way round; either head starts one.
    optional = {VALUE_HEAD, OUTPUT}
    missing = sorted(known - optional - weights.names())
    unknown = sorted(name for name in weights.names() - known if not name.endswith(_DERIVED))
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


def _check_tie(weights: HuggingFaceWeights) -> list[str]:
    """Refuse a tied model with an output layer of its own: one of the two would be dropped silently."""
    if OUTPUT not in weights.names():
        return []
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    embedding, output = (weights.read(name, Partition.column, rank=rank, size=size) for name in (EMBEDDING, OUTPUT))
    if torch.equal(embedding, output):
        return []
    return [f"tie_word_embeddings is true, but {OUTPUT} differs from {EMBEDDING}"]


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
    shards = shards_of(mapped)
    expected = hugging_face_shapes(parameter, mapped, architecture)
    wrong = [
        f"{name} has shape {weights.shape(name)}, must have {shape}"
        for name, shape in zip(mapped.hugging_face, expected)
        if weights.shape(name) != shape
    ]
    if wrong:
        return wrong
    parts = [weights.read(name, mapped.partition, rank=shards.rank, size=shards.size) for name in mapped.hugging_face]
    merged = merge(mapped.transform, parts, num_groups=architecture.num_key_value_heads // shards.size)
    if mapped.transform is Transform.vocabulary:
        parameter[: len(merged)].copy_(merged)
        parameter[len(merged) :].zero_()
    else:
        parameter.copy_(merged)
    return []
