"""The report of `megappo check` as a JSON object. Its keys are described in docs/check.md; SCHEMA counts changes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megappo.cli.check_plan import RunPlan
from megappo.planning.engine_memory import CACHE_REMEDY
from megappo.planning.memory import NOT_COUNTED, MemoryPlan
from megappo.planning.phases import Item, PhaseMemory

SCHEMA = 1

Printed = dict[str, Any]  # Any: values of a JSON object


def report_of(plan: RunPlan, *, missing: Sequence[str]) -> Printed:
    """Return the report.

    Args:
        missing: what is not on this machine, in words.
    """
    faults = [*plan.placement.faults]
    if plan.memory.verdict == "does not fit":
        faults.append(f"memory: {plan.memory.worst_line}")
    fault = plan.cache_fault
    if fault is not None:
        faults.append(f"{fault} ({CACHE_REMEDY})")
    return {
        "schema": SCHEMA,
        "cluster": _cluster(plan),
        "models": {role: _model(plan, role) for role in plan.models},
        "batch": asdict(plan.batch),
        "placement": _placement(plan),
        "memory": _memory(plan.memory) | {"engine": None if plan.engine is None else asdict(plan.engine)},
        "hand_over": plan.hand_over,
        "missing": list(missing),
        "notes": plan.notes,
        "verdict": {
            "runs": not faults,
            "memory": plan.memory.verdict,
            "faults": faults,
            "next": _next_steps(plan, faults, missing),
        },
    }


def _cluster(plan: RunPlan) -> Printed:
    cluster = plan.cluster
    return {
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "device": cluster.device,
        "device_bytes": cluster.memory_bytes,
        "devices": cluster.num_devices,
        "devices_used": sum(bool(device.seats) for device in plan.placement.devices),
    }


def _model(plan: RunPlan, role: str) -> Printed:
    return {
        "parameters": plan.models[role].num_elements,
        "ranks": [asdict(memory) for memory in plan.ranks[role]],
    }


def _placement(plan: RunPlan) -> Printed:
    return {
        "devices": [
            {
                "node": device.node,
                "device": device.index,
                "pool": device.pool,
                "seats": [asdict(seat) for seat in device.seats],
            }
            for device in plan.placement.devices
        ],
        "warnings": plan.placement.warnings,
        "faults": plan.placement.faults,
    }


def _memory(memory: MemoryPlan) -> Printed:
    worst = memory.worst
    node, index = worst.devices[0]
    return {
        "device_bytes": memory.device_bytes,
        "groups": [
            {
                "devices": [list(place) for place in group.devices],
                "labels": list(group.labels),
                "phases": {phase.phase.value: _phase(phase) for phase in group.phases},
            }
            for group in memory.groups
        ],
        "worst": {
            "node": node,
            "device": index,
            "labels": list(worst.labels),
            "phase": worst.fullest.phase.value,
            "bytes": worst.fullest.total,
            "free_bytes": None if memory.device_bytes is None else int(memory.free),
        },
        "host_bytes_per_node": {phase.value: size for phase, size in memory.host.items()},
        "levers": list(memory.levers),
        "not_counted": list(NOT_COUNTED),
    }


def _phase(phase: PhaseMemory) -> Printed:
    return {
        "bytes": phase.total,
        "items": [_item(item) for item in phase.items],
        "host_bytes": phase.host_total,
        "host_items": [_item(item) for item in phase.host],
    }


def _item(item: Item) -> Mapping[str, object]:
    return asdict(item)


def _next_steps(plan: RunPlan, faults: Sequence[str], missing: Sequence[str]) -> list[str]:
    if plan.memory.verdict == "does not fit":
        return [*plan.memory.levers]
    if faults:
        return ["mend what does not run (above), and check again"]
    steps: list[str] = []
    if missing:
        steps.append("bring what is missing (above): `megappo train` refuses to start without it")
    if plan.memory.verdict == "unknown":
        if plan.cluster.is_cuda:
            steps.append("name the device for a verdict about memory: --device h100, or --device-memory GIB")
    elif plan.memory.verdict == "tight":
        steps.append(
            f"leave more for activations: {plan.memory.levers[0] if plan.memory.levers else 'a larger device'}"
        )
    if plan.placement.warnings:
        steps.append("keep groups within nodes, or accept the network between them (warnings above)")
    return [*steps, "megappo train with the same overrides"]
