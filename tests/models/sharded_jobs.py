"""Jobs of the tests of checkpoint keys; each runs on every rank."""

from dataclasses import dataclass

import torch

from megappo.config.lora import LoraConfig
from megappo.config.model import ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.models.architecture import read_architecture
from megappo.models.build import Head, build_model
from megappo.models.sharded_state import sharded_weights


@dataclass
class Part:
    """What a rank says of one key."""

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    is_main: bool


@dataclass
class RankParts:
    """Of a real model and of one without memory."""

    real: list[Part]
    meta: list[Part]
    meta_devices: set[str]


def parts_of(folder: str, layout: ParallelismConfig, head: Head, lora: LoraConfig | None) -> RankParts:
    """Build the model twice and list its parts."""
    architecture = read_architecture(folder)
    found: list[list[Part]] = []
    devices: set[str] = set()
    for on_meta in (False, True):
        chunks = build_model(
            architecture, model=ModelConfig(), parallelism=layout, head=head, backend=CPU, lora=lora, on_meta=on_meta
        )
        if on_meta:
            devices = {parameter.device.type for chunk in chunks for parameter in chunk.parameters()}
        parts = sharded_weights(chunks)
        assert all(isinstance(part.data, torch.Tensor) for part in parts.values())
        found.append(
            [
                Part(
                    key=part.key,
                    global_shape=tuple(part.global_shape),
                    global_offset=tuple(part.global_offset),
                    local_shape=tuple(part.local_shape),
                    is_main=part.replica_id == 0,
                )
                for part in parts.values()
            ]
        )
    return RankParts(real=found[0], meta=found[1], meta_devices=devices)
