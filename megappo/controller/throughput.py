"""What the trained models' phases of a step achieved: FLOP/s per device, and the share of what the device could do.

Useful FLOPs are those of `observability.flops`; the time is the phase's own, as the controller waits for it. A phase
that did not run has no figures, and utilisation is absent where the device's peak is not known (on a CPU).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megappo.config.memory import RecomputeConfig
from megappo.config.model import Dtype, ModelConfig
from megappo.config.run import RunConfig
from megappo.observability.device_peaks import MatmulFormat, peak_flops
from megappo.observability.flops import ModelFlops, PassSize, model_flops, pass_size
from megappo.observability.logging import get_logger
from megappo.observability.metrics import Metrics, mean

logger = get_logger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelThroughput:
    """Turns the passes and seconds of one trained model into rates."""

    flops: ModelFlops
    peak: float | None
    """FLOP/s that one device could do; None: not known."""
    num_devices: int
    """Devices that hold the model."""
    recompute: RecomputeConfig
    chunks: int
    """Pipeline stages times virtual stages."""
    _flagged: set[str] = field(default_factory=set[str], init=False, compare=False, repr=False)
    """Phases whose utilisation was above 1."""

    def forward(self, phase: str, size: PassSize, *, passes: int, seconds: float) -> Metrics:
        """Return the rates of a phase of forward passes."""
        return self._rates(phase, passes * self.flops.forward(size), seconds)

    def training(self, phase: str, size: PassSize, *, epochs: int, seconds: float) -> Metrics:
        """Return the rates of an update phase; `perf/hfu/...` only where activations are recomputed."""
        useful = epochs * self.flops.training(size)
        again = epochs * self.flops.recomputed(size, self.recompute, chunks=self.chunks)
        metrics = self._rates(phase, useful, seconds)
        if again and f"perf/mfu/{phase}" in metrics:
            metrics[f"perf/hfu/{phase}"] = mean(metrics[f"perf/mfu/{phase}"].total * (1 + again / useful), 1)
        return metrics

    def _rates(self, phase: str, flops: float, seconds: float) -> Metrics:
        if not flops or not seconds:
            return {}
        rate = flops / seconds / self.num_devices
        metrics = {f"perf/tflops_per_device/{phase}": mean(rate / 1e12, 1)}
        if self.peak is not None:
            metrics[f"perf/mfu/{phase}"] = mean(rate / self.peak, 1)
            self._flag(phase, rate / self.peak)
        return metrics

    def _flag(self, phase: str, utilisation: float) -> None:
        """Say once for each phase that its utilisation cannot be true."""
        if utilisation > 1 and phase not in self._flagged:
            self._flagged.add(phase)
            logger.warning(
                "perf/mfu/%s is %.3g, above 1: the device's peak (%.4g FLOP/s), the FLOPs counted from the model's "
                "config.json or the time of the phase is wrong",
                phase,
                utilisation,
                self.peak,
            )


def matmul_format(model: ModelConfig) -> MatmulFormat:
    """Return the format that the model's layers multiply in, which decides the peak they are held against."""
    if model.fp8 is not None:
        return MatmulFormat.float8
    return MatmulFormat.bfloat16 if model.dtype is Dtype.bfloat16 else MatmulFormat.float32


def make_throughput(
    config: RunConfig, *, role: str, model: Mapping[str, Any], num_devices: int, device_name: str | None
) -> ModelThroughput:
    """Return the rates of the actor or the critic.

    Args:
        role: actor or critic.
        model: config.json of its model (Any: what JSON holds).
        device_name: what all its devices are called; None: they differ.
    """
    training = config.actor if role == "actor" else config.critic
    layout = training.parallelism
    return ModelThroughput(
        flops=model_flops(model, value_head=role == "critic", lora=training.lora),
        peak=peak_flops(device_name, matmul_format(config.model)),
        num_devices=num_devices,
        recompute=config.model.recompute,
        chunks=layout.pipeline * (layout.virtual_pipeline or 1),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class StepThroughput:
    """The rates of a step."""

    actor: ModelThroughput
    critic: ModelThroughput | None
    num_devices: int
    """All devices of the run, those of the engines included."""

    def phases(
        self,
        lengths: np.ndarray,
        *,
        response_tokens: int,
        loss_tokens: int,
        log_prob_passes: int,
        epochs: int,
        seconds: Callable[[str], float],
    ) -> Metrics:
        """Return the rates of the phases of the trained models.

        Args:
            lengths: [B] tokens of the sequences that the step learns from, prompts included.
            log_prob_passes: forward passes of the log-probs phase.
            seconds: phase of the timer -> its time; 0 for one that did not run.
        """
        scored = pass_size(lengths, predictions=response_tokens)
        # Without loss tokens no mini-batch is run.
        trained = pass_size(lengths if loss_tokens else lengths[:0], predictions=loss_tokens)
        metrics = self.actor.forward("log_probs", scored, passes=log_prob_passes, seconds=seconds("log_probs"))
        metrics |= self.actor.training("actor_update", trained, epochs=epochs, seconds=seconds("update_actor"))
        if self.critic is not None:
            metrics |= self.critic.forward("values", scored, passes=1, seconds=seconds("values"))
            metrics |= self.critic.training("critic_update", trained, epochs=epochs, seconds=seconds("update_critic"))
        return metrics
