"""Before a run starts: can what it holds fit into the devices that it really has?"""

from collections.abc import Callable

import psutil

from megappo.cli.check_plan import plan_run
from megappo.config.layout_rules import roles
from megappo.config.run import RunConfig
from megappo.device.backend import Backend
from megappo.errors import ConfigError, Violation
from megappo.planning.cluster import GIB, ClusterDescription
from megappo.planning.engine_memory import CACHE_REMEDY
from megappo.planning.memory import MemoryPlan, human


def check_memory(config: RunConfig, backend: Backend, note: Callable[[str], None]) -> None:
    """Refuse a run that cannot fit into the memory of its GPUs; on a CPU only say so.

    The GPU of this process stands for all of them. Only what is certain is a reason: not activations, and not the KV
    cache, which an engine makes smaller where models took memory before it.

    Args:
        config: settled.

    Raises:
        ConfigError: with the fullest device and what would help.
    """
    device_bytes = backend.device_bytes()
    if not config.cluster.check_memory or (device_bytes is None and config.cluster.address is not None):
        return
    devices = sum(config.cluster.pools[pool] for pool in {getattr(config.cluster, role) for role in roles(config)})
    cluster = ClusterDescription(
        nodes=1,
        devices_per_node=devices,
        device=backend.kind,
        device_memory_gib=None if device_bytes is None else device_bytes / GIB,
    )
    plan = plan_run(config, cluster, with_cache=device_bytes is None)
    memory, fault = plan.memory, plan.cache_fault
    if memory.verdict == "does not fit":
        raise ConfigError([_does_not_fit(memory)])
    if fault is not None:
        raise ConfigError([_holds_no_sequence(config, fault)])
    if device_bytes is None:
        needed, there = _needed_here(memory), psutil.virtual_memory().total
        if needed > there:
            note(f"memory: all processes together need {human(needed)}, and this machine has {human(there)}")


def _does_not_fit(memory: MemoryPlan) -> Violation:
    return Violation(
        key="cluster.check_memory",
        value="true",
        rule=f"refuses this run: {memory.worst_line}",
        remedy=f"{'; '.join(memory.levers)}; `megappo check` prints all devices; false starts the run all the same",
    )


def _holds_no_sequence(config: RunConfig, fault: str) -> Violation:
    share = config.rollout.sglang.mem_fraction_static
    remedy = f"{CACHE_REMEDY}; cluster.check_memory=false starts the run all the same"
    return Violation(
        key="rollout.sglang.mem_fraction_static", value=share, rule=f"is too little: {fault}", remedy=remedy
    )


def _needed_here(memory: MemoryPlan) -> int:
    """Return the most bytes of all processes in one phase: on a CPU devices and host are the same memory."""
    phases = memory.groups[0].phases
    return max(
        memory.host[phase.phase] + sum(len(group.devices) * group.phases[index].total for group in memory.groups)
        for index, phase in enumerate(phases)
    )
