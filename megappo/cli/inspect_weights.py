"""`megappo inspect weights`: how the weights of a run would get to its engines, and what that costs at least."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from megappo.cli.starting_model import write_starting_config
from megappo.config.file_rules import is_made_by_sft, model_folders_fit
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.errors import ConfigError, Violation
from megappo.models.architecture import ModelArchitecture, read_architecture
from megappo.models.weight_shapes import weights_of
from megappo.weights.layouts import EngineLayout, TrainerLayout
from megappo.weights.plan import WeightPlan, plan_weights
from megappo.weights.plan_figures import ROUTES, describe_plan, describe_tensors

_WIDTH = 120
"""Columns that the tables need."""


def inspect_weights(overrides: Sequence[str], *, link_gb_s: Sequence[str] = (), with_tensors: bool = False) -> int:
    """Print the hand-over plan of a run: JSON on stdout, a table on stderr; return the exit code.

    Args:
        overrides: as for `megappo train`.
        link_gb_s: ROUTE=SPEED in GB/s, for the least time of a route.
        with_tensors: add the table of all tensors to the JSON.

    Raises:
        ConfigError: the configuration, a link or the engines' layout is wrong.
        CheckpointError, CapabilityError: the model's config.json cannot be used.
    """
    links = _read_links(link_gb_s)
    config = load_run_config(overrides)
    plan = plan_of_run(config)
    figures = describe_plan(plan, links=links, num_engines=config.rollout.num_engines)
    printed: dict[str, Any] = {  # Any: values of a JSON object
        "transport": config.weight_sync.transport,
        "trainer": asdict(plan.trainer),
        "engines": {"count": config.rollout.num_engines, "tensor": plan.engine.tensor},
        **figures,
    }
    _print_table(printed)
    if with_tensors:
        printed["table"] = describe_tensors(plan)
    json.dump(printed, sys.stdout)
    print()
    return 0


def plan_of_run(config: RunConfig) -> WeightPlan:
    """Return the plan of the actor's weights. Raises as `inspect_weights`."""
    lora = config.actor.lora
    return plan_weights(
        weights_of(_architecture(config)),
        TrainerLayout.of(config.actor.parallelism, config.cluster.pools[config.cluster.actor]),
        bucket_bytes=config.weight_sync.bucket_bytes,
        dtype=config.rollout.weight_dtype(config.model).value,
        engine=EngineLayout(tensor=config.rollout.tensor),
        adapted=() if lora is None else tuple(lora.targets),
    )


def _architecture(config: RunConfig) -> ModelArchitecture:
    """Read config.json of the model folder, or make that of the model with which `megappo sft` would start."""
    random_model = config.sft.random_model
    if random_model is None or Path(config.model.path).exists() or not is_made_by_sft(config):
        if violations := model_folders_fit(config):
            raise ConfigError(violations)
        return read_architecture(config.model.path)
    with TemporaryDirectory() as folder:
        return read_architecture(write_starting_config(random_model, config.data, Path(folder)))


def _read_links(entries: Sequence[str]) -> dict[str, float]:
    links: dict[str, float] = {}
    violations: list[Violation] = []
    for entry in entries:
        route, _, speed = entry.partition("=")
        try:
            links[route] = float(speed)
        except ValueError:
            links[route] = 0.0
        if route not in ROUTES or not links[route] > 0:
            remedy = "write for example broadcast=50 ipc=900 disk=2"
            rule = f"is not ROUTE=SPEED with one of {', '.join(ROUTES)} and a number above 0"
            violations.append(Violation(key="--link-gb-s", value=entry, rule=rule, remedy=remedy))
    if violations:
        raise ConfigError(violations)
    return links


def _print_table(printed: dict[str, Any]) -> None:  # Any: values of a JSON object
    console = Console(stderr=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    fill = printed["fill"]
    console.print(
        f"{printed['tensors']} tensors, {_megabytes(printed['bytes'])} MB in {printed['calls']} buckets of at most "
        f"{_megabytes(printed['bucket_bytes'])} MB (no packing takes fewer than {printed['fewest_calls']}), "
        f"fill {'-' if fill is None else format(fill, '.3f')}; largest tensor "
        f"{_megabytes(printed['largest_tensor_bytes'])} MB"
    )
    sources = Table(
        "source", "stage", "experts of", "sender", "ranks", "MB", "gathered", "calls", "peak extra", "least s"
    )
    for index, source in enumerate(printed["sources"]):
        cells = (index, source["stage"], source["expert_rank"], source["sender"], source["ranks"])
        sizes = (source["bytes"], source["gathered_bytes"], source["peak_extra_bytes"])
        whole, gathered, peak = map(_megabytes, sizes)
        row = (*map(_text, cells), whole, gathered, source["calls"], peak, _seconds(source["least_s"]))
        sources.add_row(*map(str, row))
    routes = Table("route", "MB per engine rank", "calls", "peak extra MB: trainer", "engine", "least s")
    for name, route in printed["routes"].items():
        per_rank = route["bytes_per_engine_rank"]
        most = max(per_rank.values()) if isinstance(per_rank, dict) else per_rank
        peak = route["peak_extra_bytes"]
        cells = (_megabytes(most), route.get("calls", route.get("files")), _megabytes(max(peak["trainer"].values())))
        marked = f"{name} (configured)" if name == printed["transport"] else name
        routes.add_row(marked, *map(str, cells), _megabytes(peak["engine"]), _seconds(route["least_s"]))
    console.print(sources)
    console.print(routes)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4g}"
