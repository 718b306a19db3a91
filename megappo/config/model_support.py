"""Which models can be trained: what a config.json may say, and what it must say.

One truth for the rules before a run (`file_rules`) and for what reads a model (`megappo.models.architecture`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megappo.config.model_families import MODEL_FAMILIES, ExpertKeys

Content = Mapping[str, Any]  # Any: a file may hold whatever its writer liked

ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kinds of rotary scaling with the numbers that they need. Their frequencies are constants: where they depend on the
length of a sequence (`dynamic`, `longrope`) the same token would have another log-prob in a longer one, and engines and
trainer disagree about which length counts."""

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFault:
    """One reason why a model cannot be trained: `problem (remedy)`."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} ({self.remedy})"


def model_faults(content: Content) -> list[ModelFault]:
    """Return all reasons why the model of a config.json cannot be trained."""
    faults = unsupported_features(content)
    is_known = content.get("model_type") in [*MODEL_FAMILIES]
    return [*faults, *missing_sizes(content)] if is_known else faults


def unsupported_features(content: Content) -> list[ModelFault]:
    """Return what of the model would be dropped silently, or computed otherwise: all of it, in the order of the file.

    Of an unknown family nothing else is said.
    """
    name = content.get("model_type")
    if not isinstance(name, str) or name not in MODEL_FAMILIES:
        known = ", ".join(sorted(MODEL_FAMILIES))
        remedy = f"use one of {known}; a new one is a name table and a registration, see megappo/models/families.py"
        return [ModelFault(problem=f"model_type={name!r} is not supported", remedy=remedy)]
    return [
        *_unsupported_values(content),
        *unsupported_rope(content),
        *_untrainable_router(content, MODEL_FAMILIES[name].experts),
    ]


def missing_sizes(content: Content) -> list[ModelFault]:
    """Return what a model of a supported family lacks, and sizes that no model can have."""
    faults: list[ModelFault] = []
    family = str(content.get("model_type"))
    needed = (*_SIZES, "rms_norm_eps")
    if missing := [key for key in needed if content.get(key) is None]:
        remedy = f"a {family} model needs {', '.join(needed)}"
        faults.append(ModelFault(problem=f"lacks {', '.join(missing)}", remedy=remedy))
    wrong = [key for key in (*_SIZES, *_OPTIONAL_SIZES) if content.get(key) is not None and not _is_size(content[key])]
    faults += [
        ModelFault(problem=f"{key}={content[key]!r} must be a whole number above 0", remedy="mend the file")
        for key in wrong
    ]
    epsilon = content.get("rms_norm_eps")
    if epsilon is not None and not _is_above_0(epsilon):
        problem = f"rms_norm_eps={epsilon!r} must be a number above 0"
        faults.append(ModelFault(problem=problem, remedy="mend the file"))
    if not missing and not wrong:
        faults += _contradictions(content)
        faults += _missing_experts(content, MODEL_FAMILIES[family].experts)
    return [*faults, *missing_of_rope(content)]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def head_dim(content: Content) -> int:
    """Return the size of one head, which need not be hidden_size / num_attention_heads."""
    return content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]


def key_value_heads(content: Content) -> int:
    """Return the number of key/value heads."""
    return content.get("num_key_value_heads") or content["num_attention_heads"]


def num_experts(content: Content) -> int | None:
    """Return the experts of a sparse layer; None: config.json names none. transformers 5 and 4 spell it differently."""
    return content.get("num_local_experts", content.get("num_experts"))


def dense_layers(content: Content) -> list[int]:
    """Return the layers without experts of a family that can have some (`mlp_only_layers`, `decoder_sparse_step`)."""
    step: int = content.get("decoder_sparse_step") or 1
    named: list[int] = content.get("mlp_only_layers") or []
    layers = range(content["num_hidden_layers"])
    return [layer for layer in layers if layer in named or (layer + 1) % step or num_experts(content) == 0]


def _unsupported_values(content: Content) -> Iterator[ModelFault]:
    """Yield features with a value that is not computed."""
    found: dict[str, tuple[object, object]] = {
        "hidden_act": (content.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(content.get("attention_bias", False)), False),
        "mlp_bias": (bool(content.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(content.get("use_sliding_window", False)), False),
        "quantization_config": (content.get("quantization_config"), None),
        "router_jitter_noise": (content.get("router_jitter_noise") or 0.0, 0.0),
    }
    if "use_sliding_window" not in content:
        found["sliding_window"] = (content.get("sliding_window"), None)
    for key, (value, supported) in found.items():
        if value != supported:
            remedy = f"only {supported!r}; use a model without it"
            yield ModelFault(problem=f"{key}={value!r} is not supported", remedy=remedy)


def rope_settings(content: Content) -> Content:
    """Return the rotary settings: transformers 5 writes `rope_parameters`, transformers 4 `rope_scaling`."""
    settings: object = content.get("rope_parameters") or content.get("rope_scaling")
    return cast(Content, settings) if isinstance(settings, dict) else {}


def rope_kind(content: Content) -> str:
    """Return the kind of rotary scaling."""
    rope = rope_settings(content)
    return rope.get("rope_type", rope.get("type", "default"))


def original_positions(content: Content) -> object:
    """Return the context that a scaling starts from, looked for where transformers does."""
    key = "original_max_position_embeddings"
    return content.get(key) or rope_settings(content).get(key) or content.get("max_position_embeddings")


def unsupported_rope(content: Content) -> Iterator[ModelFault]:
    """Yield rotary settings that are not computed."""
    rope = rope_settings(content)
    nested = sorted(key for key, value in rope.items() if isinstance(value, dict))
    if nested:
        problem = f"rope_parameters of their own for {', '.join(nested)} are not supported"
        yield ModelFault(problem=problem, remedy="use a model with the same for all layers")
        return
    partial = rope.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        problem = f"partial_rotary_factor={partial!r} is not supported"
        yield ModelFault(problem=problem, remedy="only 1.0; use a model without it")
    if (kind := rope_kind(content)) not in ROPE_KINDS:
        remedy = f"only {', '.join(ROPE_KINDS)}: their frequencies do not depend on the length of a sequence"
        yield ModelFault(problem=f"rope scaling={kind!r} is not supported", remedy=remedy)


def missing_of_rope(content: Content) -> Iterator[ModelFault]:
    """Yield numbers that a rotary scaling lacks."""
    rope, kind = rope_settings(content), rope_kind(content)
    if not _is_above_0(theta := rope.get("rope_theta", content.get("rope_theta", 1.0))):
        yield ModelFault(problem=f"rope_theta={theta!r} must be a number above 0", remedy="mend the file")
    values = {key: rope.get(key) for key in ROPE_KINDS.get(kind, ())}
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = original_positions(content)
    missing = [key for key, value in values.items() if not isinstance(value, int | float)]
    if missing:
        remedy = f"it needs {', '.join(values)}"
        yield ModelFault(problem=f"rope scaling {kind!r} lacks {', '.join(missing)}", remedy=remedy)


def _contradictions(content: Content) -> Iterator[ModelFault]:
    """Yield sizes that do not fit each other."""
    heads, groups = content["num_attention_heads"], key_value_heads(content)
    if heads % groups:
        problem = f"num_key_value_heads={groups} must divide num_attention_heads={heads}"
        yield ModelFault(problem=problem, remedy="mend the file")
    if not content.get("head_dim") and content["hidden_size"] % heads:
        problem = f"num_attention_heads={heads} must divide hidden_size={content['hidden_size']} without head_dim"
        yield ModelFault(problem=problem, remedy="mend the file, or name head_dim")
    elif head_dim(content) % 2:
        problem = f"head_dim={head_dim(content)} must be even: rotary embeddings turn pairs"
        yield ModelFault(problem=problem, remedy="mend the file")


def _untrainable_router(content: Content, keys: ExpertKeys | None) -> Iterator[ModelFault]:
    if keys is None or content.get("num_experts_per_tok") != 1 or not normalizes_probs(content, keys):
        return
    if not num_experts(content):
        return
    yield ModelFault(
        problem="num_experts_per_tok=1 gives the one expert of a token the weight 1 whatever the router says, so the "
        "router cannot be trained",
        remedy="use a model with more, or without normalised probabilities",
    )


def normalizes_probs(content: Content, keys: ExpertKeys) -> bool:
    """Whether the probabilities of a token's experts are scaled to sum to 1; no is the default of transformers."""
    return keys.normalize_probs is None or bool(content.get(keys.normalize_probs, False))


def _missing_experts(content: Content, keys: ExpertKeys | None) -> Iterator[ModelFault]:
    """Yield what a mixture of experts lacks, also where every layer is dense."""
    if keys is None:
        return
    wanted = {"num_local_experts": num_experts(content)}
    wanted |= {key: content.get(key) for key in ("num_experts_per_tok", keys.ffn_hidden_size)}
    if missing := [key for key, value in wanted.items() if value is None]:
        remedy = f"a mixture of experts needs {', '.join(wanted)}"
        yield ModelFault(problem=f"lacks {', '.join(missing)}", remedy=remedy)
