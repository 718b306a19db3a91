"""Run alone: tries what each CPU patch is for, just before and just after it is applied. Prints JSON.

Patches are applied in the order of `install`, so "before" says that the ones applied so far are not enough.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.fusions import fused_bias_swiglu  # noqa: E402
from megatron.core.optimizer import clip_grads, optimizer  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402

from megappo.device import megatron_cpu  # noqa: E402


def swiglu_is_plain() -> None:
    if hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable"):
        raise RuntimeError("compiled")


def new_functions_are_plain() -> None:
    from megatron.core import jit

    if jit.jit_fuser(len) is not len:
        raise RuntimeError("compiled")


def gradient_norm() -> None:
    group = dist.group.WORLD
    norm = clip_grads.get_grad_norm_fp32([torch.tensor([3.0, 4.0])], grad_stats_parallel_group=group)
    assert abs(norm - 5) < 1e-6


def named_random_streams() -> None:
    draws = []
    for _ in range(2):
        random.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        outside = torch.rand(1)
        tracker = random.get_cuda_rng_tracker()
        assert tracker is not None
        with tracker.fork():
            inside = torch.rand(1)
        draws.append((float(outside), float(inside), float(torch.rand(1))))
    assert draws[0] == draws[1] and len(set(draws[0])) == 3


def clipping() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8]), atol=1e-6)


STEPS: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
    ("disable_jit_fuser", megatron_cpu.disable_jit_fuser, new_functions_are_plain),
    ("unwrap_compiled_functions", megatron_cpu.unwrap_compiled_functions, swiglu_is_plain),
    ("redirect_cuda_calls", megatron_cpu.redirect_cuda_calls, gradient_norm),
    ("use_cpu_random_state", megatron_cpu.use_cpu_random_state, named_random_streams),
    ("name_cpu_tensors_as_cuda", megatron_cpu.name_cpu_tensors_as_cuda, clipping),
]


def outcome(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}.store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        results = {}
        for name, patch, attempt in STEPS:
            before = outcome(attempt)
            patch()
            results[name] = [before, outcome(attempt)]
        json.dump(results, sys.stdout)
        dist.destroy_process_group()
