"""The parameters of a transformers model under the names that their tensors have in a model folder.

They are the same but for mixtures of experts: transformers 5 joins the matrices of all experts of a layer in memory,
gate and up projections side by side, while folders and other engines know every expert's own.

Shapes: E experts, F feed-forward size of an expert, H hidden size.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(kw_only=True, slots=True, frozen=True)
class _ExpertNames:
    """What a folder calls the parts of a sparse layer."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES = {"mixtral": _ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")}
"""By model_type, where they differ."""

_JOINED = re.compile(r"^(?P<layer>.+\.)mlp\.experts\.(?P<matrix>gate_up_proj|down_proj)$")


def folder_parameters(model: PreTrainedModel, *, remove_duplicate: bool = False) -> dict[str, torch.Tensor]:
    """Return views of the parameters, under the names of a model folder.

    Args:
        remove_duplicate: leave out second names of one parameter (a tied head).
    """
    names = _NAMES.get(model.config.get_text_config().model_type, _ExpertNames())
    return {
        name: view
        for joined, parameter in model.named_parameters(remove_duplicate=remove_duplicate)
        for name, view in _parts(joined, parameter, names)
    }


def _parts(joined: str, parameter: torch.Tensor, names: _ExpertNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that one parameter is made of: [E, 2F, H] joined gate and up, or [E, H, F] down projections."""
    match = _JOINED.match(joined)
    if match is None:
        yield joined.replace(".mlp.gate.", f".{names.block}.gate."), parameter
        return
    for expert, matrix in enumerate(parameter):
        prefix = f"{match['layer']}{names.block}.experts.{expert}"
        if match["matrix"] == "down_proj":
            yield f"{prefix}.{names.down}.weight", matrix
            continue
        gate, up = matrix.chunk(2)
        yield f"{prefix}.{names.gate}.weight", gate
        yield f"{prefix}.{names.up}.weight", up
