"""Checksums: against hashlib, against a word-by-word reckoning, and of tensors that engines put together."""

import hashlib

import pytest
import torch

from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.checksums import HeldPart, HeldTensor, SentChecksums, checksum, choose_held, word_sum

WORD = 0xFFFFFFFF


def slow_word_sum(data: bytes) -> int:
    """The sum of sglang 0.5.23, kernels/ops/memory/gpu_tensor_hash.py, in Python's integers."""

    def mix(word: int) -> int:
        word ^= word >> 16
        word = word * 0x85EBCA6B & WORD
        word ^= word >> 13
        word = word * 0xC2B2AE35 & WORD
        return word ^ word >> 16

    def turn(word: int, bits: int) -> int:
        return (word << bits | word >> (32 - bits)) & WORD

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]
    seeds = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & WORD)
    result = 0
    for start in range(0, len(words), 8192):
        tile = [0, 0]
        for index, word in enumerate(words[start : start + 8192], start=start):
            for half, (factor, bits) in enumerate(((0x27D4EB2D, 15), (0x165667B1, 13))):
                tile[half] += mix(word ^ ((index * factor + seeds[half]) & WORD) ^ turn(index, bits))
        high, low = (mix((half & WORD) ^ (len(words) * 4)) for half in tile)
        result += high << 32 | low
    result &= 2**64 - 1
    result ^= result >> 30
    result = result * 0xBF58476D1CE4E5B9 & 2**64 - 1
    result ^= result >> 27
    result = result * 0x94D049BB133111EB & 2**64 - 1
    return result ^ result >> 31


@pytest.mark.parametrize("size", [1, 4, 6, 4 * 8192, 4 * 8192 * 3 + 5])
def test_the_sum_of_words_is_the_one_that_sglang_computes_on_cuda(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert word_sum(data) == slow_word_sum(bytes(data.tolist()))


def test_the_sum_of_words_tells_order_length_and_one_bit_apart() -> None:
    data = torch.arange(200_000, dtype=torch.int32)
    variants = [data, data.flip(0), data[:-1], torch.cat([data, torch.zeros(1, dtype=torch.int32)]), data ^ (1 << 31)]
    changed = data.clone()
    changed[123_456] ^= 1
    assert len({word_sum(variant.view(torch.uint8)) for variant in (*variants, changed)}) == 6
    assert word_sum(data[:0].view(torch.uint8)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_on_a_cpu_is_of_the_bytes_in_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(24, dtype=torch.float32).to(dtype).view(4, 6)
    transposed = tensor.T.contiguous()
    raw = bytes(transposed.view(-1).view(torch.uint8).tolist())
    assert checksum(tensor.T) == hashlib.sha256(raw).hexdigest()[:16] != checksum(tensor)


def part(name: str, start: int, stop: int, dim: int = 0) -> HeldPart:
    return HeldPart(name=name, dim=dim, start=start, stop=stop)


def test_tensors_that_engines_join_cut_and_pad_are_put_together_from_several_buckets() -> None:
    state = {name: torch.randn(4, 3) for name in ("q", "k", "o", "rest")}
    buckets = [["k", "rest"], ["o"], ["q"]]
    wanted = [
        HeldTensor(name="qk@0", parts=(part("q", 0, 2), part("k", 0, 2))),
        HeldTensor(name="qk@1", parts=(part("q", 2, 4), part("k", 2, 4)), padding=1),
        HeldTensor(name="o@1", parts=(part("o", 1, 3, dim=1),)),
        HeldTensor(name="never sent", parts=(part("q", 0, 4), part("elsewhere", 0, 4))),
    ]
    sent = SentChecksums(wanted)
    for names in buckets:
        meta = BucketMeta(names=names, shapes=[[4, 3]] * len(names), dtype="float32", num_bytes=48 * len(names))
        flat = torch.cat([state[name].flatten() for name in names]).view(torch.uint8)
        assert set(open_bucket(meta, flat)) == set(names)
        sent.see(meta, flat)
        flat.zero_()  # the next bucket may lie in the same memory
    assert sent.result() == {
        "qk@0": checksum(torch.cat([state["q"][:2], state["k"][:2]])),
        "qk@1": checksum(torch.cat([state["q"][2:], state["k"][2:], torch.zeros(1, 3)])),
        "o@1": checksum(state["o"][:, 1:3]),
    }


def test_samples_are_others_each_time_and_cover_everything() -> None:
    held = [HeldTensor(name=str(index), parts=()) for index in range(10)]
    samples = [[tensor.name for tensor in choose_held(held, version, 4)] for version in range(5)]
    assert samples[:3] == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9", "0", "1"]]
    assert set().union(*samples[:3]) == {tensor.name for tensor in held}
    assert choose_held(held, 7, 10) == held
    assert choose_held(held, 7, 0) == []
