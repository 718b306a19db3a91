"""Hand-overs over Ray whose engines fail in the middle: tried again, taken out, brought back, and never half-way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megappo.cluster.placement import Placement
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.weight_sync import RayWeightSync
from megappo.config.cluster import ClusterConfig, DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import RolloutConfig, VerifyMode, WeightSyncConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.errors import WorkerError
from megappo.observability.metrics import values
from tests.cluster.conftest import FAST
from tests.fakes.weight_peers import NAMES, SendingTrainer

RECOVERY = replace(FAST, max_restarts=100, max_backoff_s=0.1)


@dataclass(kw_only=True)
class Peers:
    """A trainer, two engines, and what was told of them."""

    trainer: SendingTrainer
    pool: RolloutPool
    sync: RayWeightSync
    folder: Path
    version: int = 1

    def push(self) -> dict[str, float]:
        """Hand the next version over; returns the metrics."""
        self.version += 1
        self.trainer.train(self.version)
        return values(self.sync.push(self.version))

    def fault(self, engine: int, what: str) -> None:
        (self.folder / f"fault-{engine}").write_text(what)

    def wait_for_both(self) -> None:
        deadline = time.monotonic() + 180
        while len(self.pool.in_service()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def held(self, engine: int) -> str:
        """Return the last line of an engine's log about weights: what it holds, under which version."""
        logs = sorted(self.folder.glob(f"engine-{engine}*.log"), key=lambda path: path.stat().st_mtime)
        return [line for line in logs[-1].read_text().splitlines() if line.startswith("version ")][-1]

    def assert_holds(self, engine: int) -> None:
        numbers = {name: 10.0 * self.version + index for index, name in enumerate(NAMES)}
        assert self.held(engine) == f"version {self.version}: {numbers}"


def start(transport: str, root: Path, model: Path) -> tuple[Peers, Placement]:
    folder = root / transport
    folder.mkdir()
    (folder / "script.json").write_text('{"speed": [100.0, 100.0]}')
    config = RunConfig(
        model=ModelConfig(path=str(model)),
        rollout=RolloutConfig(engine="tests.fakes.weight_peers:HoldingEngine", num_engines=2, recovery=RECOVERY),
        weight_sync=WeightSyncConfig(transport=transport, timeout_s=4.0, verify=VerifyMode.full),
        cluster=ClusterConfig(pools={folder.name: 2}, rollout=folder.name),
    )
    placement = Placement(config.cluster, roles={"rollout": folder.name}, gpu=False)
    pool = RolloutPool(
        config, slots=placement.slots("rollout", 2), device=DeviceKind.cpu, log_dir=folder, note=lambda line: None
    )
    pool.finish_start(pool.start(), timeout_s=120.0)
    trainer = SendingTrainer(transport)
    sync = RayWeightSync(
        config,
        actor=trainer,  # type: ignore[arg-type]  # the part of it that hands weights over
        rollout=pool,
        backend=CPU,
        run_folder=folder,
    )
    pool.restore_with(sync.restore)
    return Peers(trainer=trainer, pool=pool, sync=sync, folder=folder), placement


@pytest.fixture(scope="module")
def started(
    ray_here: None, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Peers]]:
    root, model = tmp_path_factory.mktemp("peers"), tmp_path_factory.mktemp("model")
    for file in tokenizer_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text("{}")
    made: dict[str, tuple[Peers, Placement]] = {}

    def get(transport: str) -> Peers:
        if transport not in made:
            made[transport] = start(transport, root, model)
        peers = made[transport][0]
        peers.wait_for_both()
        return peers

    yield get
    for peers, placement in made.values():
        peers.pool.stop()
        placement.remove()


@pytest.fixture(params=["broadcast", "ipc", "disk"])
def peers(request: pytest.FixtureRequest, started: Callable[[str], Peers]) -> Peers:
    return started(request.param)


def test_every_version_reaches_every_engine_and_is_compared(peers: Peers) -> None:
    for _ in range(2):
        metrics = peers.push()
        assert metrics["weights/version"] == peers.version
        assert metrics["weights/bytes"] == 48
        assert metrics["perf/weight_sync_verified_tensors"] == 3
        assert metrics["perf/weight_sync_failed_attempts"] == 0
        for engine in range(2):
            peers.assert_holds(engine)
        assert peers.trainer.shared_mappings() == 0, "the memory of the last bucket is given up"


def test_a_failed_hand_over_is_tried_again_and_then_whole(peers: Peers) -> None:
    lives = [peers.pool.life(engine) for engine in range(2)]
    ended = peers.trainer.ended_exports()
    peers.fault(1, "break-once")
    metrics = peers.push()
    (peers.folder / "fault-1").unlink()
    assert metrics["perf/weight_sync_failed_attempts"] == 1
    assert peers.trainer.ended_exports() == ended + 2, "in the failed attempt, too"
    for engine in range(2):
        peers.assert_holds(engine)
    assert [peers.pool.life(engine) for engine in range(2)] == lives, "nobody was restarted"


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [
        ("die", 1),
        ("lose", 2),  # it takes them, and holds something else
        pytest.param("break", 2, marks=pytest.mark.slow),
        pytest.param("stuck", 1, marks=pytest.mark.slow),
        pytest.param("stop", 1, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_cannot_take_weights_is_restarted_while_the_others_go_on(
    started: Callable[[str], Peers], fault: str, attempts: int
) -> None:
    peers = started("broadcast")
    peers.push()
    life = peers.pool.life(1)
    peers.fault(1, fault)
    metrics = peers.push()
    assert metrics["perf/weight_sync_failed_attempts"] == attempts
    peers.assert_holds(0)
    peers.wait_for_both()
    assert peers.pool.life(1) == life + 1
    peers.sync.restore(1)
    for engine in range(2):
        peers.assert_holds(engine)
    peers.push()
    for engine in range(2):
        peers.assert_holds(engine)


@pytest.mark.slow
def test_what_failed_with_an_engine_that_is_gone_does_not_count_against_the_others(
    started: Callable[[str], Peers],
) -> None:
    peers = started("broadcast")
    peers.push()
    lives = peers.pool.lives()
    peers.fault(0, "break-later")
    peers.fault(1, "die")
    metrics = peers.push()
    (peers.folder / "fault-0").unlink()
    assert metrics["perf/weight_sync_failed_attempts"] == 2
    peers.assert_holds(0)
    peers.wait_for_both()
    assert peers.pool.lives() == {0: lives[0], 1: lives[1] + 1}


def test_an_engine_alone_gets_the_last_version_or_the_next_one_where_the_trainer_has_moved_on(peers: Peers) -> None:
    peers.push()
    peers.sync.restore(0)
    for engine in range(2):
        peers.assert_holds(engine)
    peers.trainer.train(peers.version + 1)
    peers.sync.restore(0)
    if not (peers.folder / "weights" / "VERSION.json").exists():  # nothing is stored
        peers.version += 1
    peers.assert_holds(0)
    peers.push()
    peers.assert_holds(0)


def test_a_failure_of_the_trainer_ends_the_hand_over_with_its_reason_and_restarts_nobody(peers: Peers) -> None:
    peers.push()
    lives = [peers.pool.life(engine) for engine in range(2)]
    peers.trainer.train(peers.version + 1, fails=True)
    with pytest.raises(WorkerError, match="the weights are gone"):
        peers.sync.push(peers.version + 1)
    assert [peers.pool.life(engine) for engine in range(2)] == lives
    peers.push()
    for engine in range(2):
        peers.assert_holds(engine)
