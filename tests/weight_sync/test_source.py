"""Which tensors of a hand-over are compared, and which are told not to be."""

from megappo.weight_sync.source import comparable, uncompared
from megappo.weights.checksums import HeldPart, HeldTensor


def held(name: str, *parts: str) -> HeldTensor:
    return HeldTensor(name=name, parts=tuple(HeldPart(name=part, dim=0, start=0, stop=2) for part in parts))


def test_a_tensor_is_compared_if_one_source_sends_all_its_parts_and_others_are_named() -> None:
    norm = held("norm@0", "layers.0.norm")
    experts = held("layers.0.experts.w2@0", "layers.0.experts.0.w2", "layers.0.experts.1.w2")
    together = [{"layers.0.norm", "layers.0.experts.0.w2", "layers.0.experts.1.w2", "layers.0.bias", "layers.12.bias"}]
    assert comparable([norm, experts], together) == [norm, experts]
    assert uncompared([norm, experts], together) == ["layers.*.bias"]
    apart = [{"layers.0.norm", "layers.0.experts.0.w2"}, {"layers.0.experts.1.w2"}]
    assert comparable([norm, experts], apart) == [norm]
    assert uncompared([norm], apart) == ["layers.*.experts.*.w2"]
