"""Which parameters decay, and how much: Megatron's parameter groups, one per weight decay."""

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megappo.config.optim import OptimConfig
from megappo.errors import ConfigError, Violation
from megappo.models.lora import adapter_parameters
from megappo.models.parameters import mapped_parameters


def weight_decay_overrides(config: OptimConfig, chunks: Sequence[DistributedDataParallel]) -> dict[ParamKey, Any]:
    """Return Megatron's override for each weight decay; parameters that share one become a group. All ranks call it.

    The override is named `wd_mult`, which is one of the names by which Megatron tells groups apart in a checkpoint.

    Raises:
        ConfigError: a pattern of `weight_decay_of` matches no parameter on any rank.
    """
    decays = {parameter: _default_decay(config, parameter) for chunk in chunks for parameter in chunk.parameters()}
    matched: set[str] = set()
    for parameter, pattern in _patterns_per_parameter(config, chunks):
        decays[parameter] = config.weight_decay_of[pattern]
        matched.add(pattern)
    _check_patterns(config, matched)
    return {_group_of(decays, decay): {"wd_mult": decay} for decay in sorted(set(decays.values()))}


def _trained_parameters(chunk: DistributedDataParallel) -> Iterator[tuple[torch.nn.Parameter, list[str]]]:
    """Yield the parameters that are not frozen with their Hugging Face (of adapters: PEFT) names."""
    for parameter, mapped in mapped_parameters(chunk):
        if parameter.requires_grad:
            yield parameter, mapped.hugging_face
    for parameter, name in adapter_parameters(chunk):
        yield parameter, [name]


def _patterns_per_parameter(
    config: OptimConfig, chunks: Sequence[DistributedDataParallel]
) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield the parameters that a pattern of `weight_decay_of` matches, with the first that does."""
    if not config.weight_decay_of:
        return
    for chunk in chunks:
        for parameter, names in _trained_parameters(chunk):
            for pattern in config.weight_decay_of:
                if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                    yield parameter, pattern
                    break


def _default_decay(config: OptimConfig, parameter: torch.nn.Parameter) -> float:
    """Biases and norms are the parameters of one dimension."""
    return config.weight_decay if parameter.ndim > 1 else 0.0


def _group_of(decays: dict[torch.nn.Parameter, float], decay: float) -> ParamKey:
    matches: Callable[[torch.nn.Parameter], bool] = lambda parameter: decays.get(parameter) == decay
    return ParamKey(predicate=ParamPredicate(name=f"weight decay {decay}", fn=matches))


def _check_patterns(config: OptimConfig, matched: set[str]) -> None:
    """Refuse patterns that match nothing; a stage may lack what another has."""
    if not config.weight_decay_of:
        return
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, matched)
    unmatched = sorted(set(config.weight_decay_of) - set().union(*everywhere))
    if unmatched:
        raise ConfigError(
            [
                Violation(
                    key="optim.weight_decay_of",
                    value=pattern,
                    rule="matches no Hugging Face name of a trained parameter",
                    remedy="look at the names in the model's safetensors index",
                )
                for pattern in unmatched
            ]
        )
