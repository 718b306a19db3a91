"""Rules about single values and about values of one section."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import cast

from megappo.config.layout_rules import needs_critic
from megappo.config.model import RandomModelConfig
from megappo.config.pipeline_rules import divisors
from megappo.config.run import RunConfig
from megappo.errors import Violation

_POSITIVE = (
    "batching.prompts_per_step batching.samples_per_prompt batching.ppo_epochs batching.mini_batch_prompts "
    "batching.micro_batch_tokens batching.min_micro_batches "
    "trainer.total_epochs trainer.total_steps record.max_records checkpoint.keep_last checkpoint.keep_every "
    "rollout.num_engines rollout.tensor rollout.sampling.max_new_tokens rollout.validation.max_new_tokens "
    "rollout.start_timeout_s rollout.request_timeout_s rollout.sglang.max_total_tokens "
    "rollout.sglang.mem_fraction_static rollout.sglang.max_running_requests "
    "rollout.parity.dump_tokens rollout.parity.dump_files "
    "rollout.recovery.health_interval_s rollout.recovery.hang_timeout_s "
    "rollout.tool_loop.max_turns rollout.tool_loop.max_observation_tokens rollout.tool_loop.tool_timeout_s "
    "rollout.tool_loop.timeout_s "
    "weight_sync.bucket_bytes weight_sync.timeout_s "
    "cluster.num_cpus cluster.start_timeout_s cluster.object_store_bytes "
    "cluster.call_timeout_s watchdog.warn_s "
    "data.max_prompt_tokens reward.workers reward.concurrency reward.timeout_s "
    "sft.epochs sft.max_steps sft.batch_size sft.batch_tokens sft.max_tokens sft.stop_loss "
    "sft.random_model.hidden_size sft.random_model.ffn_hidden_size sft.random_model.num_layers "
    "sft.random_model.num_attention_heads sft.random_model.num_key_value_heads "
    "sft.random_model.max_position_embeddings sft.random_model.vocab_multiple "
    "sft.random_model.init_std sft.random_model.embedding_std model.recompute.num_layers "
    "actor.lora.rank actor.lora.alpha critic.lora.rank critic.lora.alpha "
    + " ".join(
        f"{role}.parallelism.{axis}"
        for role in ("actor", "critic")
        for axis in (
            "tensor",
            "pipeline",
            "first_stage_layers",
            "last_stage_layers",
            "context",
            "expert",
            "expert_tensor",
            "virtual_pipeline",
        )
    )
    + " "
    + " ".join(
        f"{role}.optim.{key}"
        for role in ("actor", "critic", "sft")
        for key in ("lr", "eps", "decay_steps", "final_decay_steps", "overlap_bucket_params")
    )
).split()

_NOT_NEGATIVE = (
    "trainer.critic_warmup trainer.num_rollout_samples seed "
    "rollout.validation.temperature rollout.parity.dump rollout.partial.extra_prompts "
    "rollout.recovery.max_restarts rollout.recovery.backoff_s rollout.recovery.max_backoff_s weight_sync.retries "
    "restart.max restart.wait_s checkpoint.on_signal_s reward.retries tracking.close_timeout_s "
    + " ".join(
        f"{role}.optim.{key}"
        for role in ("actor", "critic", "sft")
        for key in ("min_lr", "weight_decay", "clip_grad", "warmup_steps", "max_skipped_steps", "momentum")
    )
).split()

_OBJECT_STORE_MINIMUM_BYTES = 75 * 1024**2

_FREQUENCIES = (
    "trainer.save_freq",
    "trainer.export_hf_freq",
    "trainer.test_freq",
    "sft.test_freq",
    "sft.save_freq",
    "trace.freq",
)


def value_of(config: RunConfig, key: str) -> object:
    """Return the value at a dotted key; None where an optional section on the way is off."""
    value: object = config
    for part in key.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return value


def numbers_are_finite(config: RunConfig) -> list[Violation]:
    """Every number is one: neither NaN nor infinite. Those of the algorithm section have rules of their own, since some
    of them bound others and may be infinite there."""
    sections = {entry.name: cast(object, getattr(config, entry.name)) for entry in fields(config)}
    found = [pair for name, section in sections.items() if name != "algorithm" for pair in _floats(section, name)]
    return [
        Violation(
            key=key,
            value=value,
            rule="is not a number" if math.isnan(value) else "must be finite",
            remedy="use a finite number",
        )
        for key, value in found
        if not math.isfinite(value)
    ]


def _floats(value: object, key: str) -> Iterator[tuple[str, float]]:
    """Yield (key, value) of every float at or below `key`."""
    if isinstance(value, float):
        yield key, value
    elif is_dataclass(value):
        for entry in fields(value):
            yield from _floats(cast(object, getattr(value, entry.name)), f"{key}.{entry.name}")
    elif isinstance(value, dict):
        for name, inner in cast(dict[object, object], value).items():
            yield from _floats(inner, f"{key}[{name}]")
    elif isinstance(value, list):
        for index, inner in enumerate(cast(list[object], value)):
            yield from _floats(inner, f"{key}[{index}]")


def sizes_are_positive(config: RunConfig) -> list[Violation]:
    """Counts, sizes, rates and time limits are above 0 (null where the key admits it)."""
    values = [(key, value_of(config, key)) for key in _POSITIVE]
    values += [(f"cluster.pools.{pool}", devices) for pool, devices in config.cluster.pools.items()]
    violations: list[Violation] = []
    for key, value in values:
        if isinstance(value, int | float) and not value > 0:
            remedy = "use 1 or more" if isinstance(value, int) else "use a number above 0"
            violations.append(Violation(key=key, value=value, rule="must be positive", remedy=remedy))
    return violations


def amounts_are_not_negative(config: RunConfig) -> list[Violation]:
    """Numbers of which 0 means none are not below 0."""
    violations: list[Violation] = []
    for key in _NOT_NEGATIVE:
        value = value_of(config, key)
        if isinstance(value, int | float) and not value >= 0:
            violations.append(Violation(key=key, value=value, rule="must not be negative", remedy="use 0 or more"))
    return violations


def frequencies_are_positive_or_off(config: RunConfig) -> list[Violation]:
    """A frequency is a number of steps, or -1 for never."""
    violations: list[Violation] = []
    for key in _FREQUENCIES:
        value = value_of(config, key)
        if isinstance(value, int) and value != -1 and value <= 0:
            violations.append(
                Violation(key=key, value=value, rule="must be a positive number of steps", remedy="use -1 for never")
            )
    return violations


def object_store_is_large_enough(config: RunConfig) -> list[Violation]:
    """A Ray that is started here refuses a store below its own minimum (ray/_private/ray_constants.py)."""
    size = config.cluster.object_store_bytes
    if config.cluster.address is not None or not 0 < size < _OBJECT_STORE_MINIMUM_BYTES:
        return []
    rule, remedy = "is less than Ray takes", f"use {_OBJECT_STORE_MINIMUM_BYTES} or more"
    return [Violation(key="cluster.object_store_bytes", value=size, rule=rule, remedy=remedy)]


def random_model_sizes_fit(config: RunConfig) -> list[Violation]:
    """The model that `megappo sft` makes can be made."""
    return [] if config.sft.random_model is None else random_model_violations(config.sft.random_model)


def random_model_violations(model: RandomModelConfig) -> list[Violation]:
    """Return the sizes that do not fit each other; the same where the model is made."""
    heads, groups, hidden = model.num_attention_heads, model.num_key_value_heads, model.hidden_size
    if min(heads, groups, hidden) < 1:
        return []  # refused as values
    violations: list[Violation] = []
    if hidden % (2 * heads):
        rule = f"must be a multiple of 2 * num_attention_heads={heads}: rotary embeddings turn pairs"
        remedy = f"use {-(-hidden // (2 * heads)) * 2 * heads}"
        violations.append(Violation(key="sft.random_model.hidden_size", value=hidden, rule=rule, remedy=remedy))
    if heads % groups:
        rule, remedy = f"must divide num_attention_heads={heads}", f"use {divisors(heads)}"
        violations.append(Violation(key="sft.random_model.num_key_value_heads", value=groups, rule=rule, remedy=remedy))
    return violations


def mini_batch_divides_step(config: RunConfig) -> list[Violation]:
    """A mini-batch is counted in prompts and divides the prompts of a step."""
    batching = config.batching
    size = batching.mini_batch_prompts
    if size is None or size <= 0 or batching.prompts_per_step <= 0 or batching.prompts_per_step % size == 0:
        return []
    samples = batching.samples_per_prompt
    return [
        Violation(
            key="batching.mini_batch_prompts",
            value=size,
            rule=f"prompts ({size * samples} sequences) must divide batching.prompts_per_step="
            f"{batching.prompts_per_step} prompts ({batching.sequences_per_step} sequences; "
            f"{batching.prompts_per_step} % {size} = {batching.prompts_per_step % size})",
            remedy="both are counted in prompts; null makes one mini-batch of the whole step",
        )
    ]


def training_samples_are_drawn(config: RunConfig) -> list[Violation]:
    """Training samples come from a distribution: temperature above 0."""
    violations: list[Violation] = []
    if config.rollout.sampling.temperature <= 0:
        violations.append(
            Violation(
                key="rollout.sampling.temperature",
                value=config.rollout.sampling.temperature,
                rule="must be above 0: log-probs are those of logits / temperature",
                remedy="use 1.0; temperature 0 (greedy) is for rollout.validation",
            )
        )
    return violations


def resume_is_a_choice_or_path(config: RunConfig) -> list[Violation]:
    """trainer.resume is auto, never, or a path; a bare word is a misspelt choice."""
    value = config.trainer.resume
    if value in ("auto", "never") or "/" in value:
        return []
    remedy = "write a folder here as ./NAME"
    return [Violation(key="trainer.resume", value=value, rule="must be auto, never or a path with a /", remedy=remedy)]


def run_name_is_a_folder_name(config: RunConfig) -> list[Violation]:
    """run.name becomes one folder inside run.dir."""
    name = config.run.name
    if name and name not in (".", "..") and "/" not in name and name == name.strip():
        return []
    remedy = "use letters, digits, - and _; run.dir says where"
    return [Violation(key="run.name", value=name, rule="must be the name of one folder", remedy=remedy)]


def critic_warmup_needs_a_critic(config: RunConfig) -> list[Violation]:
    """Warming up a critic that is not started would skip actor updates for nothing."""
    if config.trainer.critic_warmup <= 0 or needs_critic(config):
        return []
    return [
        Violation(
            key="trainer.critic_warmup",
            value=config.trainer.critic_warmup,
            rule=f"needs a critic, which algorithm.advantage.name={config.algorithm.advantage.name} does not use",
            remedy="set it to 0, or use advantage gae",
        )
    ]
