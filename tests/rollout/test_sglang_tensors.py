"""What an SGLang server makes of experts, against what one that was asked holds (a Qwen3-MoE on a CPU: the checksum of
its w13 is that of each expert's gate and up projection one after the other)."""

import pytest

from megappo.config.cluster import DeviceKind
from megappo.rollout.sglang_tensors import ServerShape, held_by_server
from megappo.weights.checksums import HeldPart


def parts_of(
    names: dict[str, list[int]], *, ranks: int, device: DeviceKind = DeviceKind.cpu
) -> dict[str, list[HeldPart]]:
    server = ServerShape(ranks=ranks, num_key_value_heads=2, device=device, tied_head=False)
    return {tensor.name: list(tensor.parts) for tensor in held_by_server(names, server)}


@pytest.mark.parametrize(
    ("block", "gate", "up", "down"),
    [("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2")],
)
def test_the_experts_of_a_layer_are_two_tensors_cut_over_the_ranks(block: str, gate: str, up: str, down: str) -> None:
    prefix = f"model.layers.3.{block}.experts"
    shapes = {
        f"{prefix}.{expert}.{matrix}.weight": [8, 128] if matrix == down else [128, 8]
        for expert in (10, 9)
        for matrix in (up, gate, down)
    }

    def part(expert: int, matrix: str, dim: int) -> HeldPart:
        return HeldPart(name=f"{prefix}.{expert}.{matrix}.weight", dim=dim, start=64, stop=128)

    found = parts_of(shapes, ranks=2)
    assert sorted(found) == [f"{prefix}.{name}_weight@{rank}" for name in ("w13", "w2") for rank in (0, 1)]
    assert found[f"{prefix}.w13_weight@1"] == [part(expert, matrix, 0) for expert in (9, 10) for matrix in (gate, up)]
    assert found[f"{prefix}.w2_weight@1"] == [part(expert, down, 1) for expert in (9, 10)]


def test_experts_that_sglang_reorders_or_pads_are_not_compared() -> None:
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert parts_of({name: [8, 64]}, ranks=1, device=DeviceKind.cuda) == {}
    assert parts_of({name: [8, 96]}, ranks=2) == {}
    assert len(parts_of({name: [8, 64]}, ranks=2)) == 2
