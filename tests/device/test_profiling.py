"""Profiles of phases by torch.profiler."""

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from megappo.config.profile import ProfileConfig, ProfiledPhase
from megappo.device.backend import CPU
from megappo.device.profiling import PhaseProfiler, profiler_of
from megappo.observability.phases import phase, remove_listener


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def make(config: ProfileConfig, folder: Path) -> PhaseProfiler:
    profiler = profiler_of(config, chosen=True, folder=folder, process="actor-0", backend=CPU)
    assert profiler is not None
    return profiler


def compute() -> None:
    with phase("forward", micro_batch=0):
        torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_phases_of_chosen_steps_are_profiled_each_into_its_file(tmp_path: Path) -> None:
    profiler = make(ProfileConfig(steps=[3], phases=[ProfiledPhase.update], shapes=True), tmp_path / "profiles")
    for step in (2, 3):
        profiler.begin_step(step)
        for name in ("log_probs", "update", "update"):
            with phase(name):
                compute()
        profiler.end_step()
    with phase("update"):
        compute()
    remove_listener(profiler)
    paths = sorted((tmp_path / "profiles").iterdir())
    assert [path.name for path in paths] == [
        "step_000003-update-2-actor-0.json.gz",
        "step_000003-update-actor-0.json.gz",
    ]
    for path in paths:
        found = {event.get("name"): event for event in events_of(path)}
        assert "aten::mm" in found and "forward" in found, "operations, and phases as ranges around them"
        assert found["aten::mm"]["args"]["Input Dims"][:2] == [[8, 8], [8, 8]]


def test_nothing_is_made_where_nothing_is_profiled(tmp_path: Path) -> None:
    none: dict[str, Any] = {"folder": tmp_path, "process": "actor-1", "backend": CPU}
    assert profiler_of(ProfileConfig(steps=[1]), chosen=False, **none) is None
    assert profiler_of(ProfileConfig(), chosen=True, **none) is None


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file where the folder should be")
    profiler = make(ProfileConfig(steps=[1]), tmp_path / "profiles")
    profiler.begin_step(1)
    with phase("update"):
        compute()
    remove_listener(profiler)
