"""Rules about layers and number formats that only some devices have; the same before a run and where a model is built.

`cluster.device=auto` is settled at the start of a run, before any process starts, and the rules are asked again.
"""

import importlib.util
from collections.abc import Mapping

from megappo.config.cluster import DeviceKind
from megappo.config.model import Dtype, Fp8Recipe, LayerSpec
from megappo.config.model_shape import ModelShape
from megappo.config.run import RunConfig
from megappo.errors import Violation

NOT_INSTALLED = "is not installed"
"""How a rule ends that is broken on this machine, and need not be on another one."""


def transformer_engine_is_installed() -> bool:
    """Whether Transformer Engine can be imported (on a machine without CUDA its import raises)."""
    return importlib.util.find_spec("transformer_engine") is not None


def why_no_transformer_engine(*, on_cuda: bool) -> str | None:
    """Return why its layers cannot run on the device; None: they can."""
    if not on_cuda:
        return "has CUDA kernels only"
    return None if transformer_engine_is_installed() else NOT_INSTALLED


def layers_are_local(config: RunConfig) -> bool:
    """Whether Megatron's local layers are known to be what will be built (`auto` devices are not known yet)."""
    device, spec = config.cluster.device, config.model.layer_spec
    if spec is not LayerSpec.auto or device is DeviceKind.auto:
        return spec is LayerSpec.local
    return why_no_transformer_engine(on_cuda=device is DeviceKind.cuda) is not None


def transformer_engine_can_run(config: RunConfig) -> list[Violation]:
    """Layers that are asked for by name are there."""
    device = config.cluster.device
    if config.model.layer_spec is not LayerSpec.transformer_engine or device is DeviceKind.auto:
        return []
    reason = why_no_transformer_engine(on_cuda=device is DeviceKind.cuda)
    if reason is None:
        return []
    return [
        Violation(
            key="model.layer_spec",
            value="transformer_engine",
            rule=f"cannot be had: Transformer Engine {reason}",
            remedy="use local, or install transformer-engine[pytorch] on a machine with a GPU",
        )
    ]


def fp8_has_what_it_needs(config: RunConfig) -> list[Violation]:
    """Fp8 is Transformer Engine's: CUDA, its layers, 16-bit parameters."""
    model = config.model
    if model.fp8 is None:
        return []
    broken: list[tuple[str, str]] = []
    if config.cluster.device is DeviceKind.cpu:
        broken.append(("needs a GPU: fp8 matrix products are CUDA kernels", "set model.fp8=null"))
    elif model.layer_spec is LayerSpec.local:
        broken.append(("needs the layers of Transformer Engine", "set model.layer_spec=auto"))
    elif layers_are_local(config):
        remedy = "install transformer-engine[pytorch], or set model.fp8=null"
        broken.append((f"needs Transformer Engine, which {NOT_INSTALLED}", remedy))
    if model.dtype is not Dtype.bfloat16:
        broken.append((f"needs 16-bit parameters, not model.dtype={model.dtype.name}", "set model.dtype=bfloat16"))
    return [Violation(key="model.fp8", value=model.fp8.name, rule=rule, remedy=remedy) for rule, remedy in broken]


def fp8_divides_features(config: RunConfig, shape: ModelShape, *, role: str) -> list[Violation]:
    """A rank multiplies whole blocks of features in fp8."""
    layout = config.actor.parallelism if role == "actor" else config.critic.parallelism
    if config.model.fp8 is None or layout.tensor < 1:
        return []
    sizes = features_of_rank(
        tensor=layout.tensor,
        hidden_size=shape.hidden_size,
        queries=shape.num_attention_heads * shape.head_dim,
        keys=shape.num_key_value_heads * shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
    )
    return fp8_violations(config.model.fp8, sizes, key=f"{role}.parallelism.tensor", tensor=layout.tensor)


def features_of_rank(
    *, tensor: int, hidden_size: int, queries: int, keys: int, ffn_hidden_size: int | None
) -> dict[str, int]:
    """Return the features that a rank multiplies, by name.

    Args:
        queries, keys: features of all heads.
        ffn_hidden_size: None: there is no dense layer.
    """
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads * head_dim": queries // tensor,
        "num_key_value_heads * head_dim": keys // tensor,
    }
    return sizes if ffn_hidden_size is None else sizes | {"intermediate_size": ffn_hidden_size // tensor}


def fp8_violations(recipe: Fp8Recipe, sizes: Mapping[str, int], *, key: str, tensor: int) -> list[Violation]:
    """Return the sizes of `features_of_rank` that are no whole number of blocks."""
    multiple = 32 if recipe is Fp8Recipe.mxfp8 else 16
    return [
        Violation(
            key=key,
            value=tensor,
            rule=f"leaves a rank {name}={size}, and model.fp8={recipe.name} multiplies blocks of {multiple} features",
            remedy="use a smaller one, or model.fp8=null",
        )
        for name, size in sizes.items()
        if size % multiple
    ]
