"""Rules about how models are trained: optimizer, schedule, adapters, recomputation."""

from collections.abc import Iterable, Iterator
from enum import Enum

from megappo.config.layout_rules import needs_critic
from megappo.config.lora import lora_on_experts, lora_violations
from megappo.config.memory import RecomputeConfig, RecomputeGranularity, RecomputeMethod
from megappo.config.model_shape import ModelShape
from megappo.config.optim import OptimConfig, OptimizerName, ScheduleKind
from megappo.config.pipeline_rules import chunk_layers, divisors, pipeline_violations
from megappo.config.run import RunConfig
from megappo.errors import Violation

# Not `layernorm`: Megatron recomputes it with Transformer Engine alone (tensor_parallel/random.py:589), whose layers
# have the norms inside their matrix products.
_RECOMPUTABLE = ("core_attn", "mlp", "moe")
_LEAVE_OUT = "leave it out"


def optimizers(config: RunConfig) -> Iterator[tuple[str, OptimConfig]]:
    """Yield (section, settings) of every optimizer of this run and of `megappo sft`."""
    yield "actor", config.actor.optim
    yield "sft", config.sft.optim
    if needs_critic(config):
        yield "critic", config.critic.optim


def learning_rate_schedules_are_complete(config: RunConfig) -> list[Violation]:
    """A falling schedule says when it ends, after its warm-up; the rate does not end above its peak."""
    violations: list[Violation] = []
    for section, optim in optimizers(config):
        falls = optim.schedule is not ScheduleKind.constant
        if falls and (optim.decay_steps is None or 0 < optim.decay_steps <= optim.warmup_steps):
            violations.append(
                Violation(
                    key=f"{section}.optim.decay_steps",
                    value=optim.decay_steps,
                    rule=f"must be given with schedule={optim.schedule.name}, above warmup_steps={optim.warmup_steps}",
                    remedy="the optimizer step at which min_lr is reached, or schedule=constant",
                )
            )
        violations += _final_decay(section, optim)
        if optim.min_lr > optim.lr:
            violations.append(
                Violation(
                    key=f"{section}.optim.min_lr",
                    value=optim.min_lr,
                    rule=f"must not be above {section}.optim.lr={optim.lr}",
                    remedy="use 0",
                )
            )
    return violations


def _final_decay(section: str, optim: OptimConfig) -> list[Violation]:
    """The final decay belongs to wsd, and fits between warm-up and end."""
    key, steps = f"{section}.optim.final_decay_steps", optim.final_decay_steps
    if optim.schedule is not ScheduleKind.wsd:
        if steps is None:
            return []
        rule, remedy = f"has no use with schedule={optim.schedule.name}", "remove it, or use schedule=wsd"
        return [Violation(key=key, value=steps, rule=rule, remedy=remedy)]
    longest = (optim.decay_steps or 0) - optim.warmup_steps
    if longest <= 0 or (steps is not None and steps <= longest):
        return []
    rule = f"must be given with schedule=wsd, at most decay_steps - warmup_steps = {longest}"
    return [Violation(key=key, value=steps, rule=rule, remedy=f"use {max(1, longest // 10)} for the last tenth")]


def optimizer_settings_are_in_range(config: RunConfig) -> list[Violation]:
    """Betas and momentum are in [0, 1); momentum is SGD's, splitting is Adam's; weight decays are not negative."""
    violations: list[Violation] = []
    for section, optim in optimizers(config):
        for name, value in (("beta1", optim.beta1), ("beta2", optim.beta2), ("momentum", optim.momentum)):
            if not 0 <= value < 1:
                key = f"{section}.optim.{name}"
                violations.append(Violation(key=key, value=value, rule="must be in [0, 1)", remedy="use 0.9 or 0.999"))
        if optim.momentum and optim.name is not OptimizerName.sgd:
            violations.append(
                Violation(
                    key=f"{section}.optim.momentum",
                    value=optim.momentum,
                    rule=f"has no use with name={optim.name.name}",
                    remedy=f"remove it ({optim.name.name} has beta1), or use name=sgd",
                )
            )
        if optim.distributed and optim.name is not OptimizerName.adam:
            violations.append(
                Violation(
                    key=f"{section}.optim.distributed",
                    value=True,
                    rule=f"needs name=adam: Megatron splits no other optimizer (name={optim.name.name})",
                    remedy="use name=adam, or distributed=false",
                )
            )
        violations += [
            Violation(
                key=f"{section}.optim.weight_decay_of[{pattern}]",
                value=decay,
                rule="must not be negative",
                remedy="use 0 for no decay",
            )
            for pattern, decay in optim.weight_decay_of.items()
            if not decay >= 0
        ]
    return violations


def optimizer_settings_are_used(config: RunConfig) -> list[Violation]:
    """A setting that the chosen optimizer, schedule or reduction does not read stays at its default."""
    violations: list[Violation] = []
    default = OptimConfig()
    for section, optim in optimizers(config):
        key, unread = f"{section}.optim", dict[str, str]()
        if optim.schedule is ScheduleKind.constant:
            unread |= dict.fromkeys(("decay_steps", "min_lr"), "schedule=constant")
        if optim.schedule is not ScheduleKind.wsd:
            unread["final_decay_shape"] = f"schedule={optim.schedule.name}"
        if optim.name is OptimizerName.sgd:
            unread |= dict.fromkeys(("beta1", "beta2", "eps"), "name=sgd")
        if not optim.overlap_grad_reduce:
            unread["overlap_bucket_params"] = "overlap_grad_reduce=false"
        violations += [
            Violation(key=f"{key}.{name}", value=value, rule=f"has no use with {key}.{unread[name]}", remedy=_LEAVE_OUT)
            for name, value in _changed(optim, default, unread)
        ]
    return violations


def _changed(section: object, default: object, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yield those of the keys of a section, with their values, that differ from its defaults."""
    for name in names:
        value: object = getattr(section, name)
        if value != getattr(default, name):
            yield name, value.name if isinstance(value, Enum) else value


def overlap_has_what_it_needs(config: RunConfig) -> list[Violation]:
    """Parameters are gathered only by the distributed optimizer, whose buckets exist only with overlapped reduction."""
    violations: list[Violation] = []
    for section, optim in optimizers(config):
        if optim.overlap_param_gather and not (optim.distributed and optim.overlap_grad_reduce):
            prefix = f"{section}.optim"
            violations.append(
                Violation(
                    key=f"{prefix}.overlap_param_gather",
                    value=True,
                    rule=f"needs {prefix}.distributed=true and {prefix}.overlap_grad_reduce=true",
                    remedy="set both, or leave it false",
                )
            )
    return violations


def adapters_have_targets(config: RunConfig) -> list[Violation]:
    """Adapters lie beside matrices that there are."""
    violations = list(lora_violations(config.actor.lora, key="actor.lora"))
    if needs_critic(config):
        violations += lora_violations(config.critic.lora, key="critic.lora")
    return violations


def adapters_fit_model(config: RunConfig, shape: ModelShape, *, role: str) -> list[Violation]:
    """Experts take no adapters."""
    lora = config.actor.lora if role == "actor" else config.critic.lora
    return lora_on_experts(lora, has_experts=shape.experts is not None, key=f"{role}.lora")


def random_models_are_trained_whole(config: RunConfig) -> list[Violation]:
    """Beside the random weights that `megappo sft` starts from there is nothing for an adapter to add to."""
    if config.sft.random_model is None or config.actor.lora is None:
        return []
    return [
        Violation(
            key="actor.lora",
            value="given",
            rule="cannot train a model made from nothing (sft.random_model)",
            remedy="give it to `megappo train` only",
        )
    ]


def recompute_names_what_it_can(config: RunConfig) -> list[Violation]:
    """Selective recomputation names modules of the layer, full recomputation counts layers; neither takes what the
    other reads, and without recomputation nothing is taken."""
    recompute = config.model.recompute
    key, granularity = "model.recompute.modules", recompute.granularity
    readers = {
        "method": RecomputeGranularity.full,
        "num_layers": RecomputeGranularity.full,
        "modules": RecomputeGranularity.selective,
    }
    unread = [name for name, reader in readers.items() if granularity is not reader]
    violations = [
        Violation(
            key=f"model.recompute.{name}",
            value=value,
            rule=f"has no use with model.recompute.granularity={granularity.name}",
            remedy=f"{_LEAVE_OUT}, or use granularity={readers[name].name}",
        )
        for name, value in _changed(recompute, RecomputeConfig(), unread)
    ]
    if violations or granularity is not RecomputeGranularity.selective:
        return violations
    if not recompute.modules:
        remedy = f"name some of {', '.join(_RECOMPUTABLE)}, or use granularity=none"
        return [Violation(key=key, value="[]", rule="must not be empty", remedy=remedy)]
    unknown = [name for name in recompute.modules if name not in _RECOMPUTABLE]
    return [
        Violation(
            key=key,
            value=name,
            rule="is no module that can be recomputed alone",
            remedy=f"use {', '.join(_RECOMPUTABLE)}, or granularity=full",
        )
        for name in unknown
    ]


def recompute_fits_layers(config: RunConfig, shape: ModelShape, *, role: str) -> list[Violation]:
    """Full recomputation counts layers of a stage, or of its chunks."""
    recompute, layout = config.model.recompute, (config.actor if role == "actor" else config.critic).parallelism
    if recompute.granularity is not RecomputeGranularity.full or recompute.num_layers < 1:
        return []
    if layout.pipeline < 1 or pipeline_violations(layout, shape.num_hidden_layers, key=role):
        return []  # refused for itself
    uniform = recompute.method is RecomputeMethod.uniform
    what = "a chunk of a stage" if layout.virtual_pipeline else "a stage"
    for layers in chunk_layers(layout, shape.num_hidden_layers):
        if uniform and layers % recompute.num_layers:
            rule = f"must divide the {layers} layers of {what} of {role} with method=uniform"
        elif recompute.num_layers > layers:
            rule = f"must be at most the {layers} layers of {what} of {role}"
        else:
            continue
        remedy = f"use {divisors(layers) if uniform else f'1 to {layers}'}"
        return [Violation(key="model.recompute.num_layers", value=recompute.num_layers, rule=rule, remedy=remedy)]
    return []
