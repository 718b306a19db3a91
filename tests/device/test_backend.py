"""Which back end a machine gets."""

import pytest
import torch

from megappo.config.cluster import DeviceKind
from megappo.device.backend import CPU, CUDA, resolve_backend
from megappo.errors import CapabilityError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@needs_no_gpu
@pytest.mark.parametrize("kind", [DeviceKind.auto, DeviceKind.cpu])
def test_a_machine_without_gpu_gets_cpu_and_gloo(kind: DeviceKind) -> None:
    backend = resolve_backend(kind)
    assert backend is CPU and backend.dist_backend == "gloo" and backend.device(3) == torch.device("cpu")


@needs_no_gpu
def test_cuda_without_gpu_is_refused_with_a_remedy() -> None:
    with pytest.raises(CapabilityError, match=r"cluster\.device=cuda needs a GPU.*use cluster\.device=cpu"):
        resolve_backend(DeviceKind.cuda)


def test_cuda_means_nccl_and_the_devices_that_a_process_sees() -> None:
    assert CUDA.dist_backend == "nccl" and CUDA.device(1) == torch.device("cuda", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_machine_with_gpu_gets_cuda_unless_cpu_is_asked_for() -> None:
    assert resolve_backend(DeviceKind.auto) is CUDA and resolve_backend(DeviceKind.cuda) is CUDA
    assert resolve_backend(DeviceKind.cpu) is CPU
