"""Jobs that build trainers and count what they hold; each runs on every rank."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.offload import _gradient_buffers
from megappo.train.trainer import ModelTrainer


@dataclass(kw_only=True)
class Built:
    """One model to build."""

    folder: str
    layout: ParallelismConfig
    optim: OptimConfig
    dtype: Dtype = Dtype.float32
    lora: LoraConfig | None = None
    is_critic: bool = False


def bytes_held(cases: list[Built]) -> list[dict[str, int]]:
    """Build each model, take a step with gradients of zero, and count the bytes of this rank."""
    return [_bytes_of(_trainer(case), has_adapters=case.lora is not None) for case in cases]


def _trainer(case: Built) -> ModelTrainer:
    config = RunConfig()
    config.model.path, config.model.random_weights, config.model.dtype = case.folder, True, case.dtype
    for section in (config.actor, config.critic):
        section.parallelism, section.optim, section.lora = case.layout, case.optim, case.lora
    config.algorithm.kl.in_loss.coef = 0.0 if case.is_critic else 0.1  # a reference policy
    return CriticTrainer(config, backend=CPU) if case.is_critic else ActorTrainer(config, backend=CPU)


def _bytes_of(trainer: ModelTrainer, *, has_adapters: bool) -> dict[str, int]:
    trainer.optimizer.zero_grad()
    assert trainer.optimizer.step().applied
    parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    state = [owned.tensors for owned in trainer.optimizer.owned()]
    moments = [tensor for tensors in state for name, tensor in tensors.items() if name != "fp32_param"]
    masters = [tensor for tensors in state for name, tensor in tensors.items() if name == "fp32_param"]
    reference = getattr(getattr(trainer, "_reference", None), "_kept", [])
    return {
        "weights": _storage_bytes(frozen if has_adapters else parameters),
        "adapters": _storage_bytes(trained) if has_adapters else 0,
        "gradients": _storage_bytes(buffer for chunk in trainer.chunks for buffer in _gradient_buffers(chunk)),
        "master_weights": sum(tensor.nbytes for tensor in masters),
        "moments": sum(tensor.nbytes for tensor in moments),
        "largest_parameter": max(parameter.nbytes for parameter in parameters),
        "reference": sum(tensor.nbytes for tensor in reference),
    }


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
