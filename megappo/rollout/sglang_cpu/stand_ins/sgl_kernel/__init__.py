"""Stands in for sglang-kernel, which exists for CUDA only on PyPI.

SGLang's CPU path on torch operators calls one function of it (sglang 0.5.23, srt/mem_cache/allocation.py:746). Other
`*_cpu` kernels are imported by name at module level by layers that are not used; they raise when called.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the cache slots of each request's new tokens into its row of the token pool, in place.

    Args:
        req_pool_indices: [B] row of each request.
        req_to_token: [rows, pool_len] cache slot of each token position.
        start_offset, end_offset: [B] positions filled, end exclusive.
        out_cache_loc: [sum of end - start] slots, request after request.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    if not name.endswith("_cpu"):
        raise ImportError(f"the CPU stand-in of sgl_kernel has no {name}")

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the CPU stand-in")

    missing.__name__ = name
    return missing
