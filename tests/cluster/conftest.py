"""One real Ray for all tests of this folder, and on it a rollout pool of scripted engines: faults by file, weights that
are only a version."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megappo.cluster import runtime
from megappo.cluster.placement import Placement
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.runtime import gather, start_ray
from megappo.config.cluster import ClusterConfig, DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import RecoveryConfig, RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw
from megappo.data.tokenizer import character_tokenizer
from megappo.data.types import Prompt

SAMPLES = 2
SAMPLING = SamplingConfig(max_new_tokens=20)
FAST = RecoveryConfig(backoff_s=0.1, health_interval_s=0.2, hang_timeout_s=2.0)
"""Deadlines that make a fault found within two seconds."""
NO_WAIT = "RAY_gcs_server_port_wait_time_s"
"""Ray's own key: how long it waits for the port of its first process. With 0 it does not start."""


@dataclass(kw_only=True)
class Engines:
    """A pool under test."""

    pool: RolloutPool
    folder: Path
    version: int = 0
    lines: list[str] = field(default_factory=list)
    """What a user was told."""
    next_group: int = 0

    def draws(self, lengths: list[int], *, start: int | None = None) -> list[Draw]:
        """Prompts that ask for so many tokens, under ids that are new."""
        first, self.next_group = self.next_group, self.next_group + len(lengths)
        return [
            Draw(
                group_id=group,
                prompt=Prompt(row=group, text="x", tokens=[start or 3 + group % 40, length], answer=None, source="s"),
                sequence_ids=[group * SAMPLES + sample for sample in range(SAMPLES)],
            )
            for group, length in enumerate(lengths, start=first)
        ]

    def fault(self, engine: int, what: str) -> None:
        (self.folder / f"fault-{engine}").write_text(what)

    def pid(self, engine: int) -> int:
        return int((self.folder / f"pid-{engine}").read_text())

    def hand_over(self, version: int) -> None:
        """Give all engines in service a version, as a push does."""
        self.version = version
        for engine in self.pool.in_service():
            self.restore(engine, lambda: True)
        self.pool.admit(self.pool.lives())

    def restore(self, engine: int, still_wanted: Callable[[], bool]) -> bool:
        """Give an engine the current version, as `RayWeightSync.restore` does."""
        if not still_wanted():
            return False
        for call in (("begin_weights", self.version), ("close_weights", {})):
            gather([self.pool.call(engine, *call)], phase="hand-over", timeout_s=30.0)
        return True

    def wait_for_all(self, count: int) -> None:
        """Wait until so many engines are in service."""
        deadline = time.monotonic() + 180.0
        while len(self.pool.in_service()) < count:
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.1)

    def tokens_of(self, sequence_ids: list[int]) -> dict[int, list[int]]:
        """Pack sequences in two shards and return the responses in them."""
        middle = len(sequence_ids) // 2
        shards = self.pool.pack([sequence_ids[:middle], sequence_ids[middle:]])
        found: dict[int, list[int]] = {}
        for shard in shards:
            for batch in ray.get(shard.pieces):
                for number, sequence_id in enumerate(batch.sequence_ids):
                    inside = slice(batch.offsets[number], batch.offsets[number + 1])
                    assert int(sequence_id) not in found, "packed twice"
                    found[int(sequence_id)] = batch.tokens[inside][batch.response_mask[inside]].tolist()
        return found


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer("abcdefghijklmnopqrstuvwxyz").save_pretrained(folder)
    return folder


class FirstTry(logging.Handler):
    """Hears that Ray did not start, and lets it wait from then on."""

    heard = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.heard += record.getMessage()
        os.environ.pop(NO_WAIT, None)


@pytest.fixture(scope="session")
def first_try() -> FirstTry:
    """What was heard of the first try to start `ray_here`."""
    return FirstTry()


@pytest.fixture(scope="module")
def ray_here(first_try: FirstTry) -> None:
    """Ray, which runs on for the tests of the next module, too. It starts at the second try."""
    if ray.is_initialized():
        return
    runtime.logger.addHandler(first_try)
    os.environ[NO_WAIT] = "0"
    start_ray(ClusterConfig(), num_cpus=8)
    runtime.logger.removeHandler(first_try)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ray ends with the last test of this folder: others would not want its processes beside them."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        ray.shutdown()


def start_engines(
    folder: Path,
    tokenizer_folder: Path,
    *speeds: float,
    at_once: int | None = 8,
    recovery: RecoveryConfig = FAST,
    restarts_wait: bool | None = None,
    **more: Any,  # of RolloutConfig
) -> tuple[Engines, Placement]:
    """Start scripted engines of these speeds, and give them version 1."""
    (folder / "script.json").write_text(json.dumps({"speed": speeds, "at_once": at_once}))
    config = RunConfig(
        model=ModelConfig(path=str(tokenizer_folder)),
        rollout=RolloutConfig(
            engine="tests.fakes.scripted_engine:ScriptedEngine",
            num_engines=len(speeds),
            sampling=SAMPLING,
            recovery=recovery,
            **more,
        ),
        # A name of its own: pools of several tests live at the same time.
        cluster=ClusterConfig(pools={folder.name: len(speeds)}, rollout=folder.name),
    )
    placement = Placement(config.cluster, roles={"rollout": folder.name}, gpu=False)
    lines: list[str] = []
    slots = placement.slots("rollout", len(speeds))
    pool = RolloutPool(
        config, slots=slots, device=DeviceKind.cpu, log_dir=folder, note=lines.append, restarts_wait=restarts_wait
    )
    made = Engines(pool=pool, folder=folder, lines=lines)
    pool.finish_start(pool.start(), timeout_s=120.0)
    pool.restore_with(made.restore)
    made.hand_over(1)
    return made, placement


Start = Callable[..., Engines]


@pytest.fixture
def engines(ray_here: None, tokenizer_folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Start engines for one test; see `start_engines`."""
    started: list[tuple[Engines, Placement]] = []

    def start(*speeds: float, **settings: Any) -> Engines:
        started.append(start_engines(tmp_path, tokenizer_folder, *speeds, **settings))
        return started[-1][0]

    yield start
    for made, placement in started:
        made.pool.stop()
        placement.remove()


@pytest.fixture(scope="module")
def _pair(ray_here: None, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    recovery = replace(FAST, max_restarts=100, max_backoff_s=0.1)
    folder = tmp_path_factory.mktemp("pair")
    made, placement = start_engines(folder, tokenizer_folder, 100.0, 100.0, recovery=recovery, request_timeout_s=5.0)
    yield made
    made.pool.stop()
    placement.remove()


@pytest.fixture
def pair(_pair: Engines) -> Engines:
    """Two engines that tests share: both are there, nothing was told and nothing counted when a test begins."""
    _pair.pool.restore_with(_pair.restore)
    _pair.wait_for_all(2)
    list(_pair.pool.generate(_pair.draws([1] * 8), SAMPLING, seed=0))
    _pair.pool.take_metrics()
    _pair.lines.clear()
    return _pair
