"""The plan of a run: batches, placement, memory and hand-over. Joins what the layers below know."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megappo.cli.check_model import engine_padding, planned_model
from megappo.cli.inspect_weights import plan_of_run
from megappo.config.layout_rules import trained_models
from megappo.config.model_shape import read_model_config, shape_of
from megappo.config.reward_rules import REWARD_MODEL
from megappo.config.run import RunConfig
from megappo.models.architecture import read_architecture
from megappo.planning.batch import StepBatch, step_batch
from megappo.planning.cluster import ClusterDescription
from megappo.planning.engine_memory import EngineMemory, cache_fault, engine_memory
from megappo.planning.memory import MemoryPlan, plan_memory
from megappo.planning.parameters import PlannedModel
from megappo.planning.phases import RunMemory
from megappo.planning.placement import Placement, place, roles_of_run
from megappo.planning.training_memory import ELEMENT_BYTES, RankMemory, TrainedModel, memory_of_ranks
from megappo.weights.plan_figures import describe_plan

Figures = dict[str, Any]  # Any: values of a JSON object


@dataclass(kw_only=True, slots=True)
class RunPlan:
    """All of it."""

    cluster: ClusterDescription
    batch: StepBatch
    placement: Placement
    memory: MemoryPlan
    ranks: dict[str, list[RankMemory]]
    """Role -> bytes of every rank of a model that Megatron holds."""
    models: dict[str, PlannedModel]
    engine: EngineMemory | None
    hand_over: Figures
    """As `megappo inspect weights` prints it."""
    notes: list[str] = field(default_factory=list)

    @property
    def cache_fault(self) -> str | None:
        """What is wrong with a KV cache that holds no sequence of the longest; None: nothing, or not known."""
        return None if self.engine is None else cache_fault(self.engine, longest=self.batch.longest_tokens)


def plan_run(config: RunConfig, cluster: ClusterDescription, *, with_cache: bool = True) -> RunPlan:
    """Return the plan of a run.

    Args:
        config: settled: the device is that of the cluster, model folders hold a config.json, all rules are kept.
        with_cache: count the engines' KV cache.

    Raises:
        CheckpointError, CapabilityError: a config.json cannot be used.
        ConfigError: engines do not suit the model.
    """
    notes: list[str] = []
    models = _models(config, notes)
    ranks = {role: memory_of_ranks(model) for role, model in models.items()}
    hand_over = plan_of_run(config)
    figures = describe_plan(hand_over, links={}, num_engines=config.rollout.num_engines)
    dtype = config.rollout.weight_dtype(config.model)
    engine = None
    if not config.rollout.urls:
        held = figures["routes"]["ipc"]["bytes_per_engine_rank"].values()
        padding = engine_padding(hand_over, element_bytes=ELEMENT_BYTES[dtype])
        engine = engine_memory(
            config.rollout,
            shape_of(read_model_config(Path(config.model.path))),
            dtype=dtype,
            weights=max(held) + (padding if config.rollout.engine == "sglang" else 0),
            device_bytes=cluster.memory_bytes,
            is_cuda=cluster.is_cuda,
            longest=config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens,
        )
    route: Figures = figures["routes"].get(config.weight_sync.transport, {}).get("peak_extra_bytes", {})
    placement = place(config, cluster)
    if engine is not None and not with_cache:
        engine = replace(engine, cache=0)
    run = RunMemory(
        config=config,
        is_cuda=cluster.is_cuda,
        trainers=ranks,
        engine=engine,
        trainer_buckets={int(rank): size for rank, size in route.get("trainer", {}).items()},
        engine_buckets=route.get("engine", 0),
    )
    return RunPlan(
        cluster=cluster,
        batch=step_batch(config),
        placement=placement,
        memory=plan_memory(run, placement, cluster.memory_bytes),
        ranks=ranks,
        models={role: model.model for role, model in models.items()},
        engine=engine,
        hand_over={"transport": config.weight_sync.transport} | figures,
        notes=notes + _not_counted(config),
    )


def _models(config: RunConfig, notes: list[str]) -> dict[str, TrainedModel]:
    """Return the models that Megatron holds, by role."""
    found: dict[str, TrainedModel] = {}
    for role, layout, pool in trained_models(config):
        is_critic = role == "critic"
        training = config.critic if is_critic else config.actor
        path = (config.critic.path if is_critic else None) or config.model.path
        found[role] = TrainedModel(
            model=planned_model(read_architecture(path), has_value_head=is_critic),
            layout=layout,
            devices=config.cluster.pools[pool],
            dtype=config.model.dtype,
            optim=training.optim,
            lora=training.lora,
        )
    scorer = config.reward_model
    if any(role.role == REWARD_MODEL for role in roles_of_run(config)):
        if scorer.path is None or not (Path(scorer.path) / "config.json").is_file():
            notes.append(f"reward_model.path={scorer.path} is not here: the reward model is not counted")
        else:
            found[REWARD_MODEL] = TrainedModel(
                model=planned_model(read_architecture(scorer.path), has_value_head=True),
                layout=scorer.parallelism,
                devices=config.cluster.pools[config.cluster.reward],
                dtype=config.model.dtype,
                optim=None,
            )
    return found


def _not_counted(config: RunConfig) -> list[str]:
    """Return notes on roles whose memory is not known."""
    notes: list[str] = []
    if any(role.role == "reward" for role in roles_of_run(config)):
        notes.append("models of rewards named `model` are placed and not counted: transformers loads them")
    if config.rollout.engine == "hf":
        notes.append("rollout.engine=hf: the cache of a batch, at most 2 GiB, is not counted")
    if config.rollout.urls:
        notes.append("rollout.urls: engines run elsewhere and are not counted")
    return notes
