"""What an SGLang server (0.5.23) makes of the tensors of a model folder: which it joins, cuts over its ranks and pads.

Only what is known to lie in the server's memory as it came is listed. Experts are on a CPU alone: on CUDA SGLang
reorders them for some of its kernels. Not listed is what SGLang pads on a CPU (srt/configs/update_config.py:226): heads
where the ranks do not divide the key/value heads, and feed-forward networks and experts whose features are no multiple
of 32 times the ranks.

Shapes: H features in, F features out, V vocabulary, R ranks, E experts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.config.cluster import DeviceKind
from megappo.rollout.model_folder import TIED_HEAD, has_tied_head, read_key_value_heads, read_weight_shapes
from megappo.weights.checksums import HeldPart, HeldTensor
from megappo.weights.engine_shards import engine_name
from megappo.weights.layouts import EngineLayout
from megappo.weights.name_map import Size
from megappo.weights.transforms import shard_range

_JOINED = (
    (re.compile(r"\.q_proj\."), (".q_proj.", ".k_proj.", ".v_proj."), ".qkv_proj."),
    (re.compile(r"\.gate_proj\."), (".gate_proj.", ".up_proj."), ".gate_up_proj."),
)
_SECOND = re.compile(r"\.(k_proj|v_proj|up_proj)\.")
"""Is part of a joined tensor, named by its first part."""
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_KEYS = re.compile(r"\.[kv]_proj\.")
_HEADS = re.compile(r"\.self_attn\.([qkvo]_proj)\.")
_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")
_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_KNOWN = re.compile(r"(norm|router|mlp\.gate|block_sparse_moe\.gate)\.weight$")
"""Is held whole by every rank."""
_EXPERTS = re.compile(r"\.experts\.")


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerShape:
    """What decides how a server cuts its tensors."""

    ranks: int
    num_key_value_heads: int
    device: DeviceKind
    tied_head: bool
    """Whether the output layer is the embedding, and no tensor of its own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerTensors:
    """The tensors of a model folder, and what a server makes of them."""

    shapes: dict[str, list[int]]
    held: list[HeldTensor]


def read_server_tensors(folder: Path, *, ranks: int, device: DeviceKind) -> ServerTensors:
    """Return the tensors of a server that loads a folder. Raises CheckpointError where it holds no safetensors."""
    shapes = read_weight_shapes(folder)
    server = ServerShape(
        ranks=ranks,
        num_key_value_heads=read_key_value_heads(folder),
        device=device,
        tied_head=has_tied_head(folder),
    )
    return ServerTensors(shapes=shapes, held=held_by_server(shapes, server))


def held_by_server(shapes: Mapping[str, list[int]], server: ServerShape) -> list[HeldTensor]:
    """Return what is known of the tensors of all ranks, made of those of a model folder with these shapes."""
    held: list[HeldTensor] = []
    for name in sorted(shapes):
        if _SECOND.search(name) or not _is_known(name, shapes[name], server):
            continue
        parts, joined = [name], name
        for first, names, together in _JOINED:
            if first.search(name):
                parts = [first.sub(part, name) for part in names]
                joined = first.sub(together, name)
        held += [_on_rank(joined, parts, shapes, rank=rank, server=server) for rank in range(server.ranks)]
    return held + _held_experts(shapes, server)


def _held_experts(shapes: Mapping[str, list[int]], server: ServerShape) -> list[HeldTensor]:
    """Return what is known of the experts: of each layer w13 [E, 2 F / R, H], every expert's gate before its up
    projection, and w2 [E, H, F / R]."""
    if server.device is not DeviceKind.cpu:
        return []
    fused: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        together, expert = engine_name(name)
        if expert is not None:
            fused.setdefault(together, []).append((expert, name))  # by name, gate is before up and w1 before w3
    held: list[HeldTensor] = []
    for together, members in sorted(fused.items()):
        names, dim = [name for _, name in sorted(members)], int(together.endswith(".w2_weight"))
        if any(shapes[name][dim] % (32 * server.ranks) for name in names):
            continue
        for rank in range(server.ranks):
            parts = tuple(
                HeldPart(name=name, dim=dim, start=share.start, stop=share.stop)
                for name in names
                for share in [shard_range(shapes[name][dim], rank=rank, size=server.ranks)]
            )
            held.append(HeldTensor(name=f"{together}@{rank}", parts=parts))
    return held


def _is_known(name: str, shape: list[int], server: ServerShape) -> bool:
    if _EXPERTS.search(name) or (server.tied_head and name == TIED_HEAD):
        return False
    if server.device is DeviceKind.cpu and (cut := _cut_features(name, shape)) is not None:
        multiple = 32 * server.ranks
        return server.num_key_value_heads % server.ranks == 0 if _HEADS.search(name) else cut % multiple == 0
    return any(pattern.search(name) for pattern in (_VOCABULARY, _ROWS, _COLUMNS, _KNOWN))


def _cut_features(name: str, shape: list[int]) -> int | None:
    """Return how many features the ranks divide among them; None where they do not."""
    if _ROWS.search(name):
        return shape[0]
    return shape[1] if _COLUMNS.search(name) else None


def _on_rank(
    joined: str, names: list[str], shapes: Mapping[str, list[int]], *, rank: int, server: ServerShape
) -> HeldTensor:
    """Return what one rank holds of a tensor that is made of these."""
    parts = [_part(name, shapes[name], rank=rank, server=server) for name in names]
    padding = 0
    if _VOCABULARY.search(joined):
        rows = EngineLayout(tensor=server.ranks).padded_vocabulary(shapes[joined][0]) // server.ranks
        padding = rows - (parts[0].stop - parts[0].start)
    return HeldTensor(name=f"{joined}@{rank}", parts=tuple(parts), padding=padding)


def _part(name: str, shape: list[int], *, rank: int, server: ServerShape) -> HeldPart:
    """Return a rank's share of one tensor: rows [F / R, H] or [V / R, H], columns [F, H / R], or all of it."""
    dim = int(_COLUMNS.search(name) is not None)
    held = EngineLayout(tensor=server.ranks).part(
        _size_of(name), shape[dim], rank=rank, num_key_value_heads=server.num_key_value_heads
    )
    return HeldPart(name=name, dim=dim, start=held.start, stop=held.stop)


def _size_of(name: str) -> Size | None:
    """Return what the dimension is that the ranks cut, as far as it matters how; None: they do not."""
    if _VOCABULARY.search(name):
        return Size.vocabulary
    if _KEYS.search(name):
        return Size.keys
    return Size.ffn if _ROWS.search(name) or _COLUMNS.search(name) else None
