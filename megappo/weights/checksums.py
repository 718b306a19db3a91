"""Checksums of weights on the way: a trainer computes them as its engines hold the tensors, engines read theirs back.

An engine may hold tensors otherwise than a model folder does: joined, cut over ranks, padded. `HeldTensor` says how.

The checksum is SGLang's (0.5.23, srt/managers/mm_utils.py:921), since SGLang tells nothing else of what it holds: on
a CPU the first 8 bytes of SHA-256, on CUDA a 64-bit sum of mixed words (kernels/ops/memory/gpu_tensor_hash.py).
Checksums of different devices do not compare.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from megappo.weights.buckets import BucketMeta, open_bucket

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32}
"""Of the size of an element."""
_WORD = 0xFFFFFFFF
_TILE_WORDS = 8192
_SLICE_TILES = 128
"""Tiles mixed at a time: temporaries of 8 MiB each."""
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Factor and rotation of the position, for each of the two halves."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldPart:
    """A run of rows or columns of one tensor, under its Hugging Face name."""

    name: str
    dim: int
    start: int
    stop: int


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldTensor:
    """A tensor as one rank of an engine holds it: parts one after the other along the first dimension.

    Example:
        HeldTensor(name="model.norm.weight@0", parts=(HeldPart(name="model.norm.weight", dim=0, start=0, stop=64),))
    """

    name: str
    """The engine's own, with the rank that holds it."""
    parts: tuple[HeldPart, ...]
    padding: int = 0
    """Rows of zeros behind them."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor, made of its parts."""
        if len(parts) == 1 and not self.padding:
            return parts[0]
        filler = parts[0].new_zeros(self.padding, *parts[0].shape[1:])
        return torch.cat([*parts, filler])


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's elements: 16 hexadecimal digits."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.is_cuda:
        return f"{word_sum(flat):016x}"
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def word_sum(flat: torch.Tensor) -> int:
    """Return the checksum that SGLang computes on CUDA, of `flat` [bytes] uint8 on any device."""
    missing = -len(flat) % 4
    words = (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(torch.int32)
    total = 0
    for start in range(0, len(words), _SLICE_TILES * _TILE_WORDS):
        total += _sum_of_tiles(words[start : start + _SLICE_TILES * _TILE_WORDS], start, num_words=len(words))
    return _finish(total & 0xFFFFFFFFFFFFFFFF) if len(words) else 0


def _sum_of_tiles(words: torch.Tensor, start: int, *, num_words: int) -> int:
    """Return the sum of the tiles' 64-bit values; `words` int32 begins with word `start` of `num_words`."""
    values = words.to(torch.int64) & _WORD
    places = (torch.arange(start, start + len(words), device=words.device)) & _WORD
    halves: list[torch.Tensor] = []
    for seed, (factor, turn) in zip(_SEEDS, _PLACES):
        turned = ((places << turn) | (places >> (32 - turn))) & _WORD
        mixed = _mix(values ^ ((places * factor + seed) & _WORD) ^ turned)
        tiles = torch.nn.functional.pad(mixed, (0, -len(words) % _TILE_WORDS)).view(-1, _TILE_WORDS).sum(1) & _WORD
        halves.append(_mix(tiles ^ (num_words * 4 & _WORD)))
    # In Python's integers: a sum of the upper halves may pass 63 bits.
    return (int(halves[0].sum()) << 32) + int(halves[1].sum())


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of 32-bit words in int64 (the end of MurmurHash3, Appleby 2011); products wrap, their low half
    stays right."""
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _WORD
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def _finish(value: int) -> int:
    """Mix the bits of a 64-bit number (the end of SplitMix64, Steele et al. 2014)."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def bit_sum(key: str, tensor: torch.Tensor) -> int:
    """Return a sum over the bits of a tensor (or some of its elements), as whole numbers, weighted by its name: added
    up over parts and tensors it is the same for every order and every cut."""
    words = tensor.detach().contiguous().view(_WHOLE_NUMBERS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64)) * (2 * crc32(key.encode()) + 1)


class SentChecksums:
    """Checksums of held tensors, computed from the buckets that pass.

    Parts of a tensor that is not complete wait in host memory: of few tensors where few are wanted, else about those
    of a layer (more where a plan of buckets puts the parts of one far from each other).
    """

    def __init__(self, wanted: Sequence[HeldTensor]) -> None:
        self._wanted: dict[str, list[HeldTensor]] = {}
        for tensor in wanted:
            for name in dict.fromkeys(part.name for part in tensor.parts):
                self._wanted.setdefault(name, []).append(tensor)
        self._waiting: dict[str, dict[int, torch.Tensor]] = {}
        self._found: dict[str, str] = {}

    def see(self, bucket: BucketMeta, flat: torch.Tensor) -> None:
        """Take what is wanted of a bucket that is being sent, `flat` [num_bytes] uint8."""
        for name, tensor in open_bucket(bucket, flat).items():
            for held in self._wanted.get(name, ()):
                self._take(held, name, tensor)

    def _take(self, held: HeldTensor, name: str, tensor: torch.Tensor) -> None:
        parts = {
            index: tensor.narrow(part.dim, part.start, part.stop - part.start)
            for index, part in enumerate(held.parts)
            if part.name == name
        }
        if len(parts) < len(held.parts):
            waiting = self._waiting.setdefault(held.name, {})
            waiting.update({index: part.to("cpu", copy=True) for index, part in parts.items()})
            if len(waiting) < len(held.parts):
                return
            parts = {index: part.to(tensor.device) for index, part in self._waiting.pop(held.name).items()}
        self._found[held.name] = checksum(held.join([parts[index] for index in range(len(held.parts))]))

    def result(self) -> dict[str, str]:
        """Return the checksums of all wanted tensors that were sent whole."""
        return self._found


def choose_held(held: Sequence[HeldTensor], version: int, count: int) -> list[HeldTensor]:
    """Return `count` of the tensors, others for each version, so that some versions cover all of them."""
    if count >= len(held):
        return list(held)
    start = version * count % len(held)
    return list(itertools.islice(itertools.cycle(held), start, start + count))
