"""Rules about devices: pools, the layout of each model over its pool, and the model's sizes."""

from collections.abc import Iterator

from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS
from megappo.config.expert_rules import expert_violations
from megappo.config.model_shape import ModelShape
from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import divisors, pipeline_violations
from megappo.config.precision_rules import layers_are_local
from megappo.config.reward_rules import asks_reward_model, model_rewards
from megappo.config.run import RunConfig
from megappo.errors import Violation


def needs_critic(config: RunConfig) -> bool:
    """Whether the configured estimator reads values (one from outside the package may, so its rules hold, too)."""
    name = config.algorithm.advantage.name
    declaration = ESTIMATOR_DECLARATIONS.get(name)
    return ":" in name if declaration is None else declaration.needs_values


def trained_models(config: RunConfig) -> Iterator[tuple[str, ParallelismConfig, str]]:
    """Yield (role, layout, pool) of every model that this run trains."""
    yield "actor", config.actor.parallelism, config.cluster.actor
    if needs_critic(config):
        yield "critic", config.critic.parallelism, config.cluster.critic


def engines_share_devices(config: RunConfig) -> bool:
    """Whether the rollout engines are on the devices of a model that is trained; servers that run already are not."""
    return not config.rollout.urls and config.cluster.rollout in {pool for _, _, pool in trained_models(config)}


def roles(config: RunConfig) -> list[str]:
    """Return the roles that this run places on a pool."""
    used = ["actor", "rollout"]
    if needs_critic(config):
        used.append("critic")
    if model_rewards(config) or asks_reward_model(config):
        used.append("reward")
    return used


def pool_of_each_role_exists(config: RunConfig) -> list[Violation]:
    """Every role names a pool of cluster.pools."""
    pools = config.cluster.pools
    return [
        Violation(
            key=f"cluster.{role}",
            value=getattr(config.cluster, role),
            rule="is not a pool of cluster.pools",
            remedy=f"use one of {', '.join(pools)}, or add it with its number of devices" if pools else "add a pool",
        )
        for role in roles(config)
        if getattr(config.cluster, role) not in pools
    ]


def model_fits_its_pool(config: RunConfig) -> list[Violation]:
    """tensor * pipeline * context divides the pool's devices; what is left is data parallelism."""
    violations: list[Violation] = []
    for role, layout, pool in trained_models(config):
        devices = config.cluster.pools.get(pool)
        if not devices or layout.model_size <= 0 or devices % layout.model_size == 0:
            continue
        product = f"tensor {layout.tensor} * pipeline {layout.pipeline} * context {layout.context}"
        if layout.model_size > devices:
            rule = f"({product} ranks) is more than the {devices} devices of pool {pool!r}"
        else:
            rule = f"({product}) must divide the {devices} devices of pool {pool!r}"
        remedy = f"make the product one of {divisors(devices)}, or change cluster.pools.{pool}"
        violations.append(Violation(key=f"{role}.parallelism", value=layout.model_size, rule=rule, remedy=remedy))
    return violations


def experts_fit_their_pool(config: RunConfig) -> list[Violation]:
    """Experts are spread over all ranks of a pipeline stage, data-parallel ones included, so they divide these."""
    violations: list[Violation] = []
    for role, layout, pool in trained_models(config):
        devices = config.cluster.pools.get(pool)
        ranks = layout.expert * layout.expert_tensor
        # Where the model itself does not fit, that is the thing to say.
        if not devices or layout.model_size <= 0 or devices % layout.model_size or ranks <= 0:
            continue
        stage = devices // layout.pipeline
        if stage % ranks:
            violations.append(
                Violation(
                    key=f"{role}.parallelism.expert",
                    value=layout.expert,
                    rule=f"times {role}.parallelism.expert_tensor={layout.expert_tensor} must divide the {stage} ranks "
                    f"of a pipeline stage ({devices} devices of pool {pool!r} / {layout.pipeline} stages)",
                    remedy=f"make the product one of {divisors(stage)}, or change cluster.pools.{pool}",
                )
            )
    return violations


def engines_fit_their_pool(config: RunConfig) -> list[Violation]:
    """All rollout engines together need no more devices than their pool has."""
    devices = config.cluster.pools.get(config.cluster.rollout)
    needed = config.rollout.num_engines * config.rollout.tensor
    if not devices or needed <= devices:
        return []
    return [
        Violation(
            key="rollout.num_engines",
            value=config.rollout.num_engines,
            rule=f"times rollout.tensor {config.rollout.tensor} is more than the {devices} devices "
            f"of pool {config.cluster.rollout!r}",
            remedy=f"use fewer engines, or set cluster.pools.{config.cluster.rollout}={needed}",
        )
    ]


def sequence_parallel_needs_tensor_parallel(config: RunConfig) -> list[Violation]:
    """Sequence parallelism splits over the tensor-parallel ranks, so there must be several."""
    return [
        Violation(
            key=f"{role}.parallelism.sequence",
            value=True,
            rule=f"needs {role}.parallelism.tensor > 1",
            remedy=f"set {role}.parallelism.tensor=2 or {role}.parallelism.sequence=false",
        )
        for role, layout, _ in trained_models(config)
        if layout.sequence and layout.tensor <= 1
    ]


def virtual_pipeline_needs_stages(config: RunConfig) -> list[Violation]:
    """The interleaved schedule needs several stages and several chunks on each."""
    return [
        Violation(
            key=f"{role}.parallelism.virtual_pipeline",
            value=layout.virtual_pipeline,
            rule=f"must be at least 2 and needs {role}.parallelism.pipeline > 1",
            remedy=f"set {role}.parallelism.virtual_pipeline=null",
        )
        for role, layout, _ in trained_models(config)
        if layout.virtual_pipeline is not None and (layout.pipeline <= 1 or layout.virtual_pipeline <= 1)
    ]


def virtual_pipeline_has_micro_batches(config: RunConfig) -> list[Violation]:
    """The interleaved schedule runs micro-batches in groups of the number of stages: with fewer it would run empty ones
    in their place."""
    batching = config.batching
    sequences = (batching.mini_batch_prompts or batching.prompts_per_step) * batching.samples_per_prompt
    violations: list[Violation] = []
    for role, layout, pool in trained_models(config):
        if not layout.virtual_pipeline or layout.pipeline <= 1:
            continue
        why = f"and {role}.parallelism.virtual_pipeline runs them in groups of pipeline={layout.pipeline}"
        if batching.min_micro_batches is not None and 0 < batching.min_micro_batches < layout.pipeline:
            violations.append(
                Violation(
                    key="batching.min_micro_batches",
                    value=batching.min_micro_batches,
                    rule=f"is too few, {why}",
                    remedy=f"use {layout.pipeline} or more, or null",
                )
            )
        replicas = config.cluster.pools.get(pool, 0) // max(layout.model_size, 1)
        if replicas and 0 < sequences < layout.pipeline * replicas:
            violations.append(
                Violation(
                    key=f"{role}.parallelism.virtual_pipeline",
                    value=layout.virtual_pipeline,
                    rule=f"needs a micro-batch per stage: pipeline={layout.pipeline} of them on each of {replicas} "
                    f"data-parallel ranks, and a mini-batch has {sequences} sequences",
                    remedy="use larger mini-batches, or virtual_pipeline=null",
                )
            )
    return violations


def layout_divides_model(config: RunConfig, shape: ModelShape, *, role: str) -> list[Violation]:
    """Tensor parallelism divides the heads, pipeline stages (and their chunks) share the layers."""
    layout = config.actor.parallelism if role == "actor" else config.critic.parallelism
    key = f"{role}.parallelism"
    violations: list[Violation] = []
    for name in ("num_attention_heads", "num_key_value_heads"):
        size = getattr(shape, name)
        if layout.tensor > 0 and size % layout.tensor:
            violations.append(_must_divide(f"{key}.tensor", layout.tensor, f"model.{name}={size}", size))
    if shape.ffn_hidden_size and layout.tensor > 0 and shape.ffn_hidden_size % layout.tensor:
        name = f"model.intermediate_size={shape.ffn_hidden_size}"
        violations.append(_must_divide(f"{key}.tensor", layout.tensor, name, shape.ffn_hidden_size))
    violations += _context_divides_heads(config, layout, shape.num_attention_heads, key)
    violations += expert_violations(layout, shape.experts, key=key)
    return violations + pipeline_violations(layout, shape.num_hidden_layers, key=key)


def _context_divides_heads(config: RunConfig, layout: ParallelismConfig, heads: int, key: str) -> list[Violation]:
    """The local layer spec gives each context-parallel rank some of the heads of a tensor-parallel rank."""
    # Where the tensor-parallel size does not fit, that is the thing to say.
    if not layers_are_local(config) or layout.context < 2 or layout.tensor < 1 or heads % layout.tensor:
        return []
    heads_of_rank = heads // layout.tensor
    if heads_of_rank % layout.context == 0:
        return []
    name = f"the {heads_of_rank} attention heads of a tensor-parallel rank"
    return [_must_divide(f"{key}.context", layout.context, name, heads_of_rank)]


def sequences_fit_positions(config: RunConfig, shape: ModelShape) -> list[Violation]:
    """The longest prompt and response together fit into the model's positions."""
    responses = max(config.rollout.sampling.max_new_tokens, config.rollout.validation.max_new_tokens)
    positions = shape.max_position_embeddings
    if positions is None or config.data.max_prompt_tokens + responses <= positions:
        return []
    left = positions - responses
    remedy = f"use at most {left}" if left > 0 else "let rollout.sampling and rollout.validation make fewer new tokens"
    return [
        Violation(
            key="data.max_prompt_tokens",
            value=config.data.max_prompt_tokens,
            rule=f"plus {responses} new tokens is more than model.max_position_embeddings={positions}",
            remedy=remedy,
        )
    ]


def _must_divide(key: str, value: int, name: str, size: int) -> Violation:
    return Violation(key=key, value=value, rule=f"must divide {name}", remedy=f"use {divisors(size)}")
