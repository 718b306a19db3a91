"""Rules about how an engine cuts a model; the same before a run and where a hand-over is planned."""

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.config.model_shape import ModelShape
from megappo.config.pipeline_rules import divisors
from megappo.config.run import RunConfig
from megappo.errors import Violation


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineCuts:
    """Sizes of a model that tensor parallelism of an engine cuts."""

    num_attention_heads: int
    num_key_value_heads: int
    ffn_hidden_size: int | None
    """None: there is no dense layer."""
    expert_ffn_hidden_size: int | None
    """None: there are no experts."""


def engine_violations(tensor: int, cuts: EngineCuts, *, trainer: Mapping[str, int]) -> list[Violation]:
    """Return the reasons why engines of `tensor` ranks cannot hold the model, or get it from this trainer.

    SGLang cuts query heads and features evenly; key/value heads are cut evenly, or replicated evenly where there are
    fewer of them than ranks (sglang 0.5.23, srt/layers/linear.py:1139). A shard of the trainer must be a whole part
    of an engine's shard or the other way round.

    Args:
        trainer: `tensor` and, with experts, `expert_tensor` of the actor's layout.
    """
    if tensor < 1:
        return []  # refused as a value
    sizes = {
        "model.num_attention_heads": cuts.num_attention_heads,
        "model.intermediate_size": cuts.ffn_hidden_size,
        "the features of an expert": cuts.expert_ffn_hidden_size,
    }
    violations = [
        _violation(tensor, f"must divide {name}={size}", f"use {divisors(size)}")
        for name, size in sizes.items()
        if size and size % tensor
    ]
    heads = cuts.num_key_value_heads
    if heads % tensor and tensor % heads:
        rule = f"must divide model.num_key_value_heads={heads} or be a multiple of it"
        violations.append(_violation(tensor, rule, f"use {divisors(heads)}, or a multiple of {heads}"))
    for name, size in trainer.items():
        if size >= 1 and size % tensor and tensor % size:
            rule = f"must divide actor.parallelism.{name}={size} or be a multiple of it: else shards of the two overlap"
            violations.append(_violation(tensor, rule, f"use {divisors(size)}, or a multiple of {size}"))
    return violations


def engines_hold_model(config: RunConfig, shape: ModelShape) -> list[Violation]:
    """The ranks of an engine share the model, and get it from the ranks of the actor."""
    layout, experts = config.actor.parallelism, shape.experts
    trainer = {"tensor": layout.tensor} | ({"expert_tensor": layout.expert_tensor} if experts else {})
    cuts = EngineCuts(
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        ffn_hidden_size=shape.ffn_hidden_size,
        expert_ffn_hidden_size=experts.ffn_hidden_size if experts else None,
    )
    violations = engine_violations(config.rollout.tensor, cuts, trainer=trainer)
    if config.rollout.engine == "sglang" and experts is not None and shape.ffn_hidden_size is not None:
        violations.append(
            Violation(
                key="rollout.engine",
                value=config.rollout.engine,
                rule="gives experts to every layer of a mixture (SGLang 0.5.23, srt/models/qwen3_moe.py:878), and some "
                "layers of the model have none (mlp_only_layers, decoder_sparse_step)",
                remedy="use rollout=hf, or a model that has experts in all layers",
            )
        )
    return violations


def _violation(tensor: int, rule: str, remedy: str) -> Violation:
    return Violation(key="rollout.tensor", value=tensor, rule=rule, remedy=remedy)
