"""The configuration of a replay: what decides numbers is that of the record, what decides where they are computed is
given anew."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megappo.balance.layout import RankLayout
from megappo.config.cluster import DeviceKind
from megappo.config.memory import OffloadConfig, RecomputeConfig
from megappo.config.model import LayerSpec
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.rules import check_replay
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml, restore_run_config
from megappo.errors import ConfigError, RecordError

_ROLES = ("actor", "critic")
_NEVER = 1_000_000_000


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplaySettings:
    """How a record is replayed."""

    config: RunConfig
    data: int
    """Data-parallel size of both roles."""
    changes_precision: bool
    """Whether models are built in another precision than those of the record."""

    def parallelism(self, role: str) -> ParallelismConfig:
        """Return the layout of a role's model."""
        return self.config.actor.parallelism if role == "actor" else self.config.critic.parallelism

    def layout(self, role: str) -> RankLayout:
        """Return the mesh of a role."""
        parallelism = self.parallelism(role)
        return RankLayout(
            tensor=parallelism.tensor,
            pipeline=parallelism.pipeline,
            context=parallelism.context,
            data=self.data,
            virtual_pipeline=parallelism.virtual_pipeline or 1,
        )


def make_settings(
    recorded: str, *, layout: Sequence[str], overrides: Sequence[str], device: DeviceKind
) -> ReplaySettings:
    """Return the settings of a replay: one process without any parallelism, unless something else is asked for.

    Args:
        recorded: the recorded configuration, YAML.
        layout: `tensor=2` for both roles, `actor.parallelism.tensor=2` for one, `data=2`.
        overrides: `key=value` of any other key.

    Raises:
        ConfigError: an override cannot be applied.
        RecordError: the data-parallel size is no positive number.
    """
    data, keys = _split_layout(layout)
    base = _on_this_machine(restore_run_config(recorded), device)
    config = restore_run_config(resolved_yaml(base), [*keys, *overrides])
    sizes = {"actor": config.actor.parallelism.model_size, "critic": config.critic.parallelism.model_size}
    pools = {role: size * data for role, size in sizes.items()}
    cluster = replace(config.cluster, pools=pools, actor="actor", critic="critic", rollout="actor", reward="actor")
    return ReplaySettings(
        config=replace(config, cluster=cluster),
        data=data,
        changes_precision=config.model.dtype is not base.model.dtype,
    )


def refuse_unfit(config: RunConfig) -> None:
    """Raise ConfigError when the models of a replay cannot be built; all broken rules are listed."""
    if violations := check_replay(config):
        raise ConfigError(violations)


def _split_layout(layout: Sequence[str]) -> tuple[int, list[str]]:
    """Return the data-parallel size, and the other axes as overrides."""
    data, keys = "1", list[str]()
    for item in layout:
        name, _, value = item.partition("=")
        if name == "data":
            data = value
        elif name.startswith(tuple(f"{role}." for role in _ROLES)):
            keys.append(item)
        else:
            keys += [f"{role}.parallelism.{item}" for role in _ROLES]
    if not data.isdecimal() or int(data) < 1:
        raise RecordError(f"--layout data={data} must be a positive number (use 1 or more)")
    return int(data), keys


def _on_this_machine(config: RunConfig, device: DeviceKind) -> RunConfig:
    """Return the configuration without what only moves or hides work: layouts, offloading, recomputation, overlap."""
    layers = config.model.layer_spec
    if device is DeviceKind.cpu and layers is LayerSpec.transformer_engine:
        layers = LayerSpec.auto
    return replace(
        config,
        model=replace(config.model, random_weights=False, recompute=RecomputeConfig(), layer_spec=layers),
        actor=replace(
            config.actor,
            parallelism=ParallelismConfig(),
            offload=OffloadConfig(),
            optim=_patient(config.actor.optim),
        ),
        critic=replace(
            config.critic,
            parallelism=ParallelismConfig(),
            offload=OffloadConfig(),
            optim=_patient(config.critic.optim),
        ),
        cluster=replace(config.cluster, device=device),
    )


def _patient(optim: OptimConfig) -> OptimConfig:
    """Return the optimizer without overlap, and one that no number of skipped steps ends: those are looked for."""
    return replace(
        optim,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        overlap_bucket_params=None,
        max_skipped_steps=_NEVER,
    )
