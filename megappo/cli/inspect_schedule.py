"""`megappo inspect schedule`: who would compute what, for a list of lengths."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megappo.balance.micro_batches import micro_batch_bound, plan_micro_batches
from megappo.balance.partition import imbalance, partition
from megappo.balance.workload import TOKENS, Workload, workload_of_model
from megappo.errors import ConfigError, DataError, Violation

MAX_TOTAL = 2**53
"""Largest sum of lengths that costs can be counted for without rounding."""


def inspect_schedule(
    lengths_path: str,
    *,
    dp: int,
    max_tokens: int,
    equal_counts: bool = False,
    vpp_group: int = 1,
    model: str | None = None,
) -> int:
    """Print the schedule of the lengths in a JSON file as JSON; return the exit code.

    Args:
        lengths_path: JSON list of sequence lengths in tokens.
        dp: data-parallel ranks.
        max_tokens: hard cap of a micro-batch; a longer sequence runs alone.
        equal_counts: ranks get numbers of sequences that differ by at most one.
        vpp_group: micro-batches per rank are a multiple of this.
        model: Hugging Face config.json (or its folder) for the cost of attention; None: cost = tokens.

    Raises:
        ConfigError: a number is out of range.
        DataError: a file is missing or not what it should be.
    """
    _check_positive({"--dp": dp, "--max-tokens": max_tokens, "--vpp-group": vpp_group})
    lengths = _read_lengths(Path(lengths_path))
    workload = TOKENS if model is None else _read_workload(Path(model))
    json.dump(_schedule(lengths, workload, dp, max_tokens, equal_counts=equal_counts, vpp_group=vpp_group), sys.stdout)
    print()
    return 0


def _schedule(
    lengths: np.ndarray, workload: Workload, dp: int, max_tokens: int, *, equal_counts: bool, vpp_group: int
) -> dict[str, Any]:
    """Return the printed object: micro-batches of each rank, imbalance of the ranks' cost, and the number of
    micro-batches per rank below which no plan for these ranks can go."""
    costs = workload.costs(lengths)
    parts = partition(costs, dp, equal_counts=equal_counts)
    plan = plan_micro_batches(parts, lengths, max_tokens=max_tokens, multiple_of=vpp_group, cost=workload)
    ranks = [
        {
            "micro_batches": [
                {"indices": chosen, "tokens": int(lengths[chosen].sum()), "cost": float(costs[chosen].sum())}
                for chosen in rank
            ]
        }
        for rank in plan
    ]
    return {
        "ranks": ranks,
        "imbalance": imbalance([float(costs[part].sum()) for part in parts]),
        "micro_batches_bound": max(micro_batch_bound(lengths[part], max_tokens) for part in parts),
    }


def _check_positive(values: Mapping[str, int]) -> None:
    broken = [
        Violation(key=key, value=value, rule="must be at least 1", remedy="use 1 or more")
        for key, value in values.items()
        if value < 1
    ]
    if broken:
        raise ConfigError(broken)


def _read_lengths(path: Path) -> np.ndarray:
    """Return the lengths as int64 [B]. Raises DataError naming the entry that is not a length."""
    value = _read_json(path)
    if not isinstance(value, list):
        raise DataError(f"{path}: must be a JSON list of lengths in tokens, found {type(value).__name__}")
    for position, length in enumerate(value):
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise DataError(f"{path}: entry {position} is {length!r}, must be a whole number of tokens, 0 or more")
    if sum(value) > MAX_TOTAL:
        raise DataError(f"{path}: the lengths sum to {sum(value)}, must be at most {MAX_TOTAL} (exact in a float)")
    return np.array(value, dtype=np.int64)


def _read_workload(path: Path) -> Workload:
    file = path / "config.json" if path.is_dir() else path
    config = _read_json(file)
    if not isinstance(config, dict):
        raise DataError(f"{file}: must be a JSON object (the config.json of a Hugging Face model)")
    return workload_of_model(config)


def _read_json(path: Path) -> Any:  # Any: whatever the file holds; the callers check it
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {error}") from error
