"""The report of `megappo check` for people."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from megappo.cli.check_plan import RunPlan
from megappo.planning.batch import RoleBatch, StepBatch
from megappo.planning.memory import NOT_COUNTED, DeviceGroup, Unit, human, sums_by_what, unit_of
from megappo.planning.placement import Device, Seat

_WIDTH = 132
"""Columns that the tables need."""
_SHOWN_GROUPS = 6
_DEVICES_IN_A_ROW = 8


def print_report(plan: RunPlan, report: dict[str, Any]) -> None:  # Any: values of a JSON object
    """Print everything to stdout."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _WIDTH)
    _print_cluster(console, plan)
    _print_batch(console, plan.batch)
    _print_placement(console, plan)
    _print_memory(console, plan)
    _print_hand_over(console, plan)
    for note in plan.notes:
        console.print(f"note: {note}")
    for missing in report["missing"]:
        console.print(f"not on this machine: {missing}")
    verdict = report["verdict"]
    for fault in verdict["faults"]:
        console.print(f"does not run: {fault}")
    console.print(f"verdict: {'can run' if verdict['runs'] else 'cannot run'}; memory: {verdict['memory']}")
    for step in verdict["next"]:
        console.print(f"next: {step}")


def _print_cluster(console: Console, plan: RunPlan) -> None:
    cluster = plan.cluster
    memory = "memory not known" if cluster.memory_bytes is None else f"{human(cluster.memory_bytes)} each"
    used = sum(bool(device.seats) for device in plan.placement.devices)
    console.print(
        f"cluster: {cluster.nodes} x {cluster.devices_per_node} {cluster.device}, {memory}; {used} of "
        f"{cluster.num_devices} devices used"
    )
    for role, model in plan.models.items():
        console.print(f"{role}: {model.num_elements:,} parameters")


def _print_batch(console: Console, batch: StepBatch) -> None:
    greedy = f", and {batch.greedy_answers} greedy answers" if batch.greedy_answers else ""
    console.print(
        f"\nstep: {batch.prompts} prompts x {batch.samples_per_prompt} samples = {batch.sequences} sequences{greedy}, "
        f"each of at most {batch.longest_tokens} tokens: {batch.tokens_at_most:,} tokens at most\n"
        f"shards: {batch.shards}; mini-batches: {batch.mini_batches}, of {batch.sequences_per_mini_batch} sequences; "
        f"epochs: {batch.epochs}; optimizer steps: {batch.optimizer_steps}"
    )
    table = Table(
        "model",
        "data ranks",
        "sequences per rank\nand mini-batch",
        "micro-batches per rank and\nmini-batch: longest, shortest",
        "micro-batches per rank\nof a forward pass",
        "longest sequences\nper micro-batch",
    )
    for role in batch.roles:
        table.add_row(*_batch_row(role))
    console.print(table)
    for reason in dict.fromkeys([*batch.reasons, *(reason for role in batch.roles for reason in role.reasons)]):
        console.print(f"- {reason}")


def _batch_row(role: RoleBatch) -> Iterable[str]:
    counts = (
        role.data_ranks,
        role.sequences_per_rank,
        f"{role.micro_batches}, {role.fewest_micro_batches}",
        role.forward_micro_batches,
        role.sequences_per_micro_batch,
    )
    return role.role, *map(str, counts)


def _print_placement(console: Console, plan: RunPlan) -> None:
    width = min(plan.cluster.devices_per_node, _DEVICES_IN_A_ROW)
    table = Table("node", *(f"device {index}" for index in range(width)), title="placement", show_lines=True)
    devices, per_node = plan.placement.devices, plan.cluster.devices_per_node
    nodes = [devices[start : start + per_node] for start in range(0, len(devices), per_node)]
    for _, alike in groupby(nodes, key=_pattern):
        shown = list(alike)
        kept = shown if len(shown) <= 2 else [shown[0], shown[-1]]
        for index, node in enumerate(kept):
            if index == 1 and len(shown) > 2:
                table.add_row(f"{shown[1][0].node}-{shown[-2][0].node}", *["..."] * width)
            for start in range(0, len(node), width):
                row = [_cell(device) for device in node[start : start + width]]
                table.add_row(str(node[0].node) if start == 0 else "", *row)
    console.print(table)
    for warning in plan.placement.warnings:
        console.print(f"warning: {warning}")


def _pattern(node: Sequence[Device]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(seat.role for seat in device.seats) for device in node)


def _cell(device: Device) -> str:
    if not device.seats:
        return "-"
    pool = f"[{device.pool}]" + (f" x {device.seats[0].share:g}" if len(device.seats) > 1 else "")
    return "\n".join([pool, *(_seat(seat) for seat in device.seats)])


def _seat(seat: Seat) -> str:
    place = " ".join(f"{axis}{index}" for axis, index in seat.coordinates.items())
    return f"{seat.role} {seat.rank}" + (f"\n {place}" if place else "")


def _print_memory(console: Console, plan: RunPlan) -> None:
    memory = plan.memory
    unit = unit_of(memory.worst.fullest.total)
    phases = [phase.phase.value for phase in memory.groups[0].phases]
    table = Table("devices (node.device)", *phases, title=f"{unit.name} per device and phase, as far as counted")
    groups = sorted(memory.groups, key=lambda group: -group.fullest.total)
    for group in groups[:_SHOWN_GROUPS]:
        table.add_row(_places(group), *(_in(unit, phase.total) for phase in group.phases))
    if len(groups) > _SHOWN_GROUPS:
        rest = sum(len(group.devices) for group in groups[_SHOWN_GROUPS:])
        table.add_row(f"{rest} more hold less", *["..."] * len(phases))
    console.print(table)
    for group in _fullest_of_pools(plan):
        _print_group(console, plan, group, unit)
    _print_engine(console, plan)
    if any(memory.host.values()):
        host = ", ".join(f"{phase.value} {human(size)}" for phase, size in memory.host.items() if size)
        console.print(f"host memory of the fullest node: {host}")
    console.print(f"not counted: {'; '.join(NOT_COUNTED)}")


def _fullest_of_pools(plan: RunPlan) -> list[DeviceGroup]:
    """Return the fullest device of each pool."""
    pools = {(device.node, device.index): device.pool for device in plan.placement.devices}
    fullest: dict[str | None, DeviceGroup] = {}
    for group in sorted(plan.memory.groups, key=lambda group: -group.fullest.total):
        fullest.setdefault(pools[group.devices[0]], group)
    return list(fullest.values())


def _print_group(console: Console, plan: RunPlan, group: DeviceGroup, unit: Unit) -> None:
    node, index = group.devices[0]
    title = f"node {node} device {index}: {', '.join(group.labels)}"
    table = Table(unit.name, *(phase.phase.value for phase in group.phases), title=title)
    sums = [sums_by_what(phase.items) for phase in group.phases]
    for name in dict.fromkeys(name for phase in sums for name in phase):
        table.add_row(name, *(_in(unit, phase[name]) if name in phase else "-" for phase in sums))
    table.add_section()
    table.add_row("sum", *(_in(unit, phase.total) for phase in group.phases))
    if plan.memory.device_bytes is not None:
        table.add_row("left", *(_in(unit, plan.memory.device_bytes - phase.total) for phase in group.phases))
    hosts = [sums_by_what(phase.host) for phase in group.phases]
    for name in dict.fromkeys(name for phase in hosts for name in phase):
        table.add_row(f"host: {name}", *(_in(unit, phase[name]) if name in phase else "-" for phase in hosts))
    console.print(table)


def _in(unit: Unit, size: int) -> str:
    return f"{size / unit.size:,.2f}"


def _print_engine(console: Console, plan: RunPlan) -> None:
    engine = plan.engine
    if engine is None:
        return
    if engine.tokens is None:
        console.print(f"KV cache: {engine.bytes_per_token:,} bytes per token and rank; its size: {engine.limit}")
        return
    console.print(
        f"KV cache of an engine: {engine.tokens:,} tokens ({engine.limit}; {engine.bytes_per_token:,} bytes per token "
        f"and rank), {engine.sequences} sequences of {plan.batch.longest_tokens} tokens at a time"
    )


def _print_hand_over(console: Console, plan: RunPlan) -> None:
    figures = plan.hand_over
    console.print(
        f"hand-over by {figures['transport']}: {figures['tensors']} tensors, {human(figures['bytes'])}; "
        f"buckets: {figures['calls']}, of at most {human(figures['bucket_bytes'])}"
    )
    table = Table("route", "to an engine rank", "most extra on a trainer rank", "on an engine rank")
    for name, route in figures["routes"].items():
        received = route["bytes_per_engine_rank"]
        most = max(received.values()) if isinstance(received, dict) else received
        extra = route["peak_extra_bytes"]
        marked = f"{name} (configured)" if name == figures["transport"] else name
        table.add_row(marked, *map(human, (most, max(extra["trainer"].values()), extra["engine"])))
    console.print(table)


def _places(group: DeviceGroup) -> str:
    """Return the devices of a group in short: `0.0-3, 1.0-7`."""
    parts: list[str] = []
    for node, held in groupby(group.devices, key=lambda place: place[0]):
        indices = [index for _, index in held]
        if indices == list(range(indices[0], indices[-1] + 1)) and len(indices) > 1:
            parts.append(f"{node}.{indices[0]}-{indices[-1]}")
        else:
            parts += [f"{node}.{index}" for index in indices]
    shown = parts[:4]
    return ", ".join(shown) + (f" and {len(group.devices)} in all" if len(parts) > len(shown) else "")
