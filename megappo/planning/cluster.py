"""The cluster that a run is meant for, which need not be the machine that reckons."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megappo.errors import ConfigError, Violation

GIB = 1024**3

MOST_DEVICES = 1_000_000
"""More are a slip of the pen, and would take hours to reckon."""
_MOST_GIB = 1024 * 1024

DEVICES: dict[str, float | None] = {
    "cpu": None,
    "a100-40": 39.0,
    "a100-80": 79.0,
    "h100": 79.0,
    "h200": 139.0,
    "b200": 178.0,
    "gb200": 184.0,
    "cuda": None,
}
"""GiB that CUDA reports of each kind of device, rounded down: less than the name says. `cuda` is any other GPU. A CPU's
processes share the memory of their machine, so none has an amount of its own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ClusterDescription:
    """Nodes of equal devices. The fields are also the keys of a description in a file."""

    nodes: int
    devices_per_node: int
    device: str
    """A name in `DEVICES`."""
    device_memory_gib: float | None = None
    """Memory of one device; None: what `DEVICES` says."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of one device; None: not known."""
        gib = DEVICES[self.device] if self.device_memory_gib is None else self.device_memory_gib
        return None if gib is None else int(gib * GIB)

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"


KEYS = tuple(field.name for field in fields(ClusterDescription))


def read_description(given: Mapping[str, Any], *, source: str) -> ClusterDescription:  # Any: what a YAML file holds
    """Return the description that a mapping holds.

    Args:
        source: where it is from, before the keys in messages: `--` for options, else the name of a file.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    violations = description_violations(given, source=source)
    if violations:
        raise ConfigError(violations)
    return ClusterDescription(**given)


def description_violations(given: Mapping[str, Any], *, source: str) -> list[Violation]:  # Any: as above
    """Return everything that is wrong with a description; arguments as `read_description`."""
    violations: list[Violation] = []

    def refuse(key: str, value: object, rule: str, remedy: str) -> None:
        name = f"--{key.replace('_gib', '').replace('_', '-')}" if source == "--" else f"{source}: {key}"
        violations.append(Violation(key=name, value=value, rule=rule, remedy=remedy))

    for key in given:
        if key not in KEYS:
            refuse(str(key), given[key], "is not a key of a cluster", f"use {', '.join(KEYS)}")
    for key in ("nodes", "devices_per_node"):
        if key not in given:
            refuse(key, "???", "must be given", "give a whole number, 1 or more")
        elif not _is_count(given[key]):
            refuse(key, given[key], "must be a whole number, 1 or more", "say how many there are")
    counts = [given.get(key) for key in ("nodes", "devices_per_node")]
    if all(map(_is_count, counts)) and given["nodes"] * given["devices_per_node"] > MOST_DEVICES:
        rule = f"with devices_per_node={given['devices_per_node']} is more than {MOST_DEVICES} devices"
        refuse("nodes", given["nodes"], rule, "describe a smaller cluster")
    device = given.get("device")
    if not isinstance(device, str) or device not in DEVICES:
        rule = "must be given" if device is None else "is not a known device"
        remedy = f"use one of {', '.join(DEVICES)}; another GPU is cuda with a memory of its own"
        refuse("device", "???" if device is None else device, rule, remedy)
    memory = given.get("device_memory_gib")
    if memory is not None and not _is_size(memory):
        rule = f"must be a number above 0 and at most {_MOST_GIB}"
        refuse("device_memory_gib", memory, rule, "give GiB, or leave it out")
    return violations


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_GIB


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
