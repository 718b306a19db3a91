"""Worlds of processes: the default one, Megatron's model-parallel groups in it, and named groups beside it."""

import ipaddress
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend as TorchBackend,
)
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)

from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import Backend
from megappo.errors import CapabilityError

_named_groups: dict[str, dist.ProcessGroup] = {}


def init_distributed(
    *, rank: int, world_size: int, address: str, port: int, backend: Backend, timeout_s: float, local_rank: int = 0
) -> None:
    """Join the default world and prepare Megatron for its devices; returns once all ranks are there.

    Args:
        address, port: where rank 0 listens.
        local_rank: which of the devices that this process sees it uses (CUDA only).
    """
    backend.prepare_megatron()
    if backend.kind == "cuda":
        torch.cuda.set_device(backend.device(local_rank))
    timeout = timedelta(seconds=timeout_s)
    store = open_store(address, port, world_size=world_size, is_first=rank == 0, timeout=timeout)
    dist.init_process_group(backend.dist_backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def init_model_parallel(parallelism: ParallelismConfig, *, seed: int, timeout_s: float = 1800.0) -> None:
    """Cut the default world into Megatron's groups and seed Megatron's random streams.

    Rank order is Megatron's: tensor fastest, then context, data, pipeline.

    Args:
        timeout_s: longest wait in a collective of these groups and of the default one.

    Raises:
        CapabilityError: the world cannot be cut this way.
    """
    world_size = dist.get_world_size()
    if world_size % parallelism.model_size:
        raise CapabilityError(
            f"{world_size} processes cannot hold models of tensor {parallelism.tensor} x pipeline "
            f"{parallelism.pipeline} x context {parallelism.context} = {parallelism.model_size} processes "
            "(use a multiple of that)"
        )
    stage = world_size // parallelism.pipeline
    if stage % (parallelism.expert * parallelism.expert_tensor):
        raise CapabilityError(
            f"expert {parallelism.expert} x expert_tensor {parallelism.expert_tensor} must divide the {stage} "
            f"processes of a pipeline stage ({world_size} processes / pipeline {parallelism.pipeline})"
        )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        parallelism.tensor,
        parallelism.pipeline,
        parallelism.virtual_pipeline,
        context_parallel_size=parallelism.context,
        expert_model_parallel_size=parallelism.expert,
        expert_tensor_parallel_size=parallelism.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]  # only becomes a timedelta
    )
    # The default group was given what a start may take; from now on it waits as long as the others.
    _set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    seed_random_streams(seed)


def seed_random_streams(seed: int) -> None:
    """Seed the device's random numbers and Megatron's named streams of this rank."""
    from megatron.core import parallel_state, tensor_parallel

    # Stages draw different numbers (Megatron's training/initialize.py adds 100 per stage).
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * stage, force_reset_rng=True)


def destroy() -> None:
    """Leave all groups and the default world; safe to call twice."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for name in list(_named_groups):
        destroy_named_group(name)
    if dist.is_initialized():
        dist.destroy_process_group()


def init_named_group(
    *, name: str, address: str, port: int, world_size: int, rank: int, backend: Backend, timeout_s: float
) -> dist.ProcessGroup:
    """Join a group of processes that share no default world, such as a trainer and the ranks of an engine.

    The same meeting as in SGLang's `init_custom_process_group` (srt/utils/common.py): keys under the group's name in a
    TCP store at rank 0's address. Returns once all members are there. Collectives name ranks of this group.

    Raises:
        CapabilityError: a group of this name exists.
    """
    if name in _named_groups:
        raise CapabilityError(f"process group {name!r} exists already (destroy it first, or take another name)")
    timeout = timedelta(seconds=timeout_s)
    store = open_store(address, port, world_size=world_size, is_first=rank == 0, timeout=timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        TorchBackend(backend.dist_backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]  # a str at run time
        backend_options=None,
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    # torch.distributed maps the ranks of a group to ranks of the default world; here they are their own.
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    _named_groups[name] = group
    return group


def open_store(address: str, port: int, *, world_size: int, is_first: bool, timeout: timedelta) -> TCPStore:
    """Open the store where a group meets. The first rank's listens at that address only, where torch's own would at all
    of them; under the name of a host, which may mean another address on another host, it does as torch's."""
    if not is_first or not _is_number(address):
        return TCPStore(address, port, world_size, is_first, timeout, multi_tenant=True)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
        return TCPStore(address, port, world_size, True, timeout, master_listen_fd=listener.detach())
    finally:
        listener.close()


def _is_number(address: str) -> bool:
    """Whether an address is one, not the name of a host."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def named_group(name: str) -> dist.ProcessGroup:
    """Return the group made by `init_named_group`. Raises KeyError if there is none."""
    return _named_groups[name]


def is_named(group: dist.ProcessGroup) -> bool:
    """Whether a group was made by `init_named_group`: its ranks are its own, not those of the default world."""
    return group in _named_groups.values()


def destroy_named_group(name: str) -> None:
    """Leave a named group; nothing happens when there is none."""
    group = _named_groups.pop(name, None)
    if group is not None:
        dist.destroy_process_group(group)
