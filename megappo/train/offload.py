"""What a trainer keeps in device memory: weights, gradient buffers, optimizer state; in and out of it between phases.

A tensor that is out keeps its shape, its views and its place in Megatron's and torch's structures; only its storage is
empty. So nothing has to be rebuilt, and the same code runs on a CPU, where it copies between two places of memory.

Invariants (asserted by tests/train/test_offload.py):
1. Weights and optimizer state come back bitwise, whatever the optimizer and precision.
2. What is out occupies no memory on the device.
3. What is not configured to move never moves.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule

from megappo.config.memory import OffloadConfig
from megappo.device.backend import Backend
from megappo.observability.phases import in_phase
from megappo.train.optimizer import ModelOptimizer


class TrainerMemory:
    """Moves the tensors of one model on this rank; no rank waits for another."""

    def __init__(
        self,
        config: OffloadConfig,
        chunks: Sequence[MegatronModule],
        optimizer: ModelOptimizer | None,
        *,
        backend: Backend,
    ) -> None:
        """Args: optimizer: None: the model is not trained, and its weights are all there is."""
        self._config = config
        self._chunks = chunks
        self._optimizer = optimizer
        self._backend = backend
        self._params = _Storages(kept=True)
        self._grads = _Storages(kept=False)
        self._state = _Storages(kept=True)

    @in_phase("offload")
    def release(self, *, keep_params: bool = False) -> None:
        """Move out what the configuration names, the weights only unless `keep_params`."""
        params = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        if self._config.optimizer and self._optimizer is not None:
            state = [tensor for tensor in self._optimizer.state_tensors() if tensor.device == params[0].device]
            self._state.leave(state)
        if self._config.grads:
            self._grads.leave(buffer for chunk in self._chunks for buffer in _gradient_buffers(chunk))
        if self._config.params and not keep_params:
            self._params.leave(params)
        self._backend.release_cached_memory()

    def require_params(self) -> None:
        """Have the weights in device memory: before a forward pass, an export, a swap."""
        self._params.come_back()

    def require_all(self) -> None:
        """Have everything in device memory: before an update, a save, a load."""
        self._params.come_back()
        self._grads.come_back()
        self._state.come_back()


class _Storages:
    """Storages that leave device memory and come back."""

    def __init__(self, *, kept: bool) -> None:
        """`kept` says whether their content matters."""
        self._kept = kept
        self._out: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        """(storage, its size in bytes, its content on the host)."""

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Empty the storages of the tensors, of which several may share one."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            # Nothing is left in a storage that is out already, on its own or through another tensor.
            if size:
                self._out.append((storage, size, _copy_to_host(storage) if self._kept else None))
                storage.resize_(0)

    def come_back(self) -> None:
        """Fill the storages again; nothing happens when none is out."""
        for storage, size, content in self._out:
            storage.resize_(size)
            if content is not None:
                _bytes_of(storage).copy_(content)
        self._out = []


def _copy_to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the content as bytes [size] in host memory, page-locked where that makes the way back faster."""
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as a tensor of bytes [size]."""
    whole: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)  # Any: set_ is typed without storages
    return whole.set_(storage, 0, (storage.nbytes(),))


def _gradient_buffers(chunk: MegatronModule) -> list[torch.Tensor]:
    if not isinstance(chunk, DistributedDataParallel):
        return []
    wrapper: Any = chunk  # Any: pyright takes `buffers` for the method of torch's modules
    return [buffer.grad_data for buffer in wrapper.buffers + wrapper.expert_parallel_buffers]
