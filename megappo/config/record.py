"""Where metrics go, and the supervised starting run."""

from dataclasses import dataclass, field

from megappo.config.model import RandomModelConfig
from megappo.config.optim import OptimConfig


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Trackers besides metrics.jsonl, which is always written."""

    mlflow: bool = True
    mlflow_uri: str | None = None
    """None: sqlite file `<run.dir>/<run.name>/mlflow.db`."""
    experiment: str = "megappo"


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """`megappo sft`: supervised cross-entropy on prompt/answer pairs of data.train."""

    output: str = "runs/sft"
    """Folder of the result; the Hugging Face model is in `<output>/model`."""
    random_model: RandomModelConfig | None = None
    """Start from random weights of this shape; None: start from model.path."""
    max_steps: int = 200
    batch_size: int = 64
    """Pairs per optimizer step."""
    stop_loss: float | None = None
    """Stop once the running mean (0.9) of the loss, nats per answer token, falls below this."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3, warmup_steps=10, weight_decay=0.01))
