"""The whole run configuration."""

from dataclasses import dataclass, field

from megappo.config.algorithm import AlgorithmConfig
from megappo.config.batching import BatchingConfig
from megappo.config.checkpoint import CheckpointConfig
from megappo.config.cluster import ClusterConfig
from megappo.config.data import DataConfig
from megappo.config.lora import LoraConfig
from megappo.config.memory import OffloadConfig
from megappo.config.model import ModelConfig
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.profile import ProfileConfig, TraceConfig
from megappo.config.record import RecordConfig, TrackingConfig
from megappo.config.restart import RestartConfig
from megappo.config.reward import RewardConfig
from megappo.config.rm import RewardModelConfig, RmConfig
from megappo.config.rollout import RolloutConfig, WeightSyncConfig
from megappo.config.supervised import SftConfig
from megappo.config.trainer import ControllerKind, RunSection, TrainerConfig
from megappo.config.validation import ValidationConfig
from megappo.config.watchdog import WatchdogConfig


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """The policy's training workers."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig | None = None
    """Train adapters instead of the weights, for example {rank: 16}; the reference policy is then the model without
    them, which needs no copy. None: train all weights."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The value model's training workers; started only if the advantage estimator needs values."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig | None = None
    """Train adapters and the value head instead of all weights."""
    path: str | None = None
    """Starting weights; None: model.path. The value head starts at zero."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run, resolved. Nothing below the command line sees anything else."""

    run: RunSection = field(default_factory=RunSection)
    seed: int = 0
    controller: ControllerKind = ControllerKind.synchronous
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rm: RmConfig = field(default_factory=RmConfig)
