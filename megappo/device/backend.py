"""Which device and which collectives: CPU with gloo or CUDA with NCCL. Nothing else in the tree decides this."""

import os
import resource
from dataclasses import dataclass

import torch

from megappo.config.cluster import DeviceKind
from megappo.errors import CapabilityError


@dataclass(kw_only=True, slots=True, frozen=True)
class Backend:
    """One device kind with its collective library."""

    kind: str
    """`cpu` or `cuda`."""
    dist_backend: str
    """`gloo` or `nccl`."""

    def device(self, local_rank: int = 0) -> torch.device:
        """Return the device of a process; local_rank counts the devices that this process can see."""
        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def device_name(self) -> str:
        """Return what this process's device is called: CUDA's name of the GPU, or `cpu`."""
        return torch.cuda.get_device_name() if self.kind == "cuda" else "cpu"

    def device_bytes(self) -> int | None:
        """Return the memory of this process's device; None on CPU, where processes share that of the machine."""
        return torch.cuda.get_device_properties(0).total_memory if self.kind == "cuda" else None

    def peak_memory_bytes(self) -> int:
        """Return the most memory that this process has held: of tensors on its GPU, or on CPU all of it."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def prepare_megatron(self) -> None:
        """Make Megatron-core usable on this device; call once per process before building a model. Safe to repeat.

        On CPU this installs `megatron_cpu` and takes the number of torch threads from OMP_NUM_THREADS where it is set
        (torch reads it only when it is imported). On CUDA Megatron runs as it is.
        """
        if self.kind == "cuda":
            # One hardware queue: sequence parallelism relies on the order of collectives and GEMMs
            # (megatron tensor_parallel/layers.py:713 warns without it).
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            return
        from megappo.device import megatron_cpu

        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit():
            torch.set_num_threads(int(threads))
        megatron_cpu.install()

    def release_cached_memory(self) -> None:
        """Give device memory that torch keeps for later back to the device, for the other processes on it."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()


CPU = Backend(kind="cpu", dist_backend="gloo")
CUDA = Backend(kind="cuda", dist_backend="nccl")


def resolve_backend(kind: DeviceKind) -> Backend:
    """Return the back end asked for; `auto` is CUDA where torch sees a GPU.

    Raises:
        CapabilityError: CUDA was asked for and torch sees none.
    """
    if kind is DeviceKind.cpu or (kind is DeviceKind.auto and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        built = torch.version.cuda or "CPU only"
        raise CapabilityError(
            f"cluster.device=cuda needs a GPU, and torch {torch.__version__} (built for: {built}) sees none "
            "(use cluster.device=cpu, or install a CUDA build of torch and check nvidia-smi and CUDA_VISIBLE_DEVICES)"
        )
    return CUDA
