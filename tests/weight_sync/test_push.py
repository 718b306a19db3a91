"""The order of a hand-over, with engines that write down what they are asked."""

import asyncio
from collections.abc import Callable

import pytest

from megappo.errors import EngineError
from megappo.weight_sync.push import StageSource, push_weights
from megappo.weights.buckets import BucketMeta


def bucket(name: str) -> BucketMeta:
    return BucketMeta(names=[name, f"{name}.bias"], shapes=[[1], [1]], dtype="float32", num_bytes=8)


STAGES = [
    StageSource(group="weights-0", buckets=[bucket("a"), bucket("b")]),
    StageSource(group="weights-1", buckets=[bucket("c")]),
]


class RecordingEngine:
    """Takes a hand-over, one call at a time; `trouble` may fail or delay a call."""

    def __init__(self, log: list[str], name: str, trouble: Callable[[str], float] = lambda call: 0.0) -> None:
        self.log = log
        self.name = name
        self.trouble = trouble
        self.version = 0
        self.busy = False

    async def _note(self, call: str) -> None:
        assert not self.busy, "one call at a time"
        self.busy = True
        try:
            await asyncio.sleep(self.trouble(call))
            self.log.append(f"{self.name} {call}")
        finally:
            self.busy = False

    async def begin_weights(self) -> None:
        await self._note("begin")

    async def load_weights(self, bucket: BucketMeta, *, group: str) -> None:
        await self._note(f"load {group} {bucket.names[0]}")

    async def end_weights(self, version: int) -> None:
        await self._note("end")
        self.version = version

    async def weight_version(self) -> int:
        return self.version


def push(*engines: RecordingEngine, timeout_s: float = 10.0) -> None:
    asyncio.run(push_weights(engines, STAGES, 4, timeout_s=timeout_s))


def failing_at(call: str) -> Callable[[str], float]:
    def trouble(asked: str) -> float:
        if asked == call:
            raise ConnectionError("engine x 1: it broke")
        return 0.0

    return trouble


def test_every_engine_gets_every_bucket_in_order_and_all_move_together() -> None:
    log: list[str] = []
    push(RecordingEngine(log, "x"), RecordingEngine(log, "y"))
    calls = ["begin", "load weights-0 a", "load weights-0 b", "load weights-1 c", "end"]
    assert [line[2:] for line in log] == [call for call in calls for _ in range(2)]
    assert [{line[0] for line in log[start : start + 2]} for start in range(0, 10, 2)] == [{"x", "y"}] * 5


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("begin", "begin"),
        ("load weights-0 b", "stage weights-0: bucket 2 of 2 (from b): load"),
        ("load weights-1 c", "stage weights-1: bucket 1 of 1 (from c): load"),
        ("end", "end"),
    ],
)
def test_a_failure_names_engine_stage_bucket_and_phase_and_stops_the_hand_over(call: str, where: str) -> None:
    log: list[str] = []
    with pytest.raises(EngineError) as failure:
        push(RecordingEngine(log, "x"), RecordingEngine(log, "y", failing_at(call)))
    assert str(failure.value) == f"weight hand-over 4: {where}: engine 1: engine x 1: it broke"
    assert all(not line.startswith("y") for line in log[log.index(f"x {call}") :])


def test_a_late_engine_is_named_and_its_call_is_given_up() -> None:
    log: list[str] = []
    slow = RecordingEngine(log, "y", lambda call: 60.0 if call == "load weights-0 a" else 0.0)
    with pytest.raises(EngineError, match=r"bucket 1 of 2 \(from a\): load: engine 1: not done within 0.2 s"):
        push(RecordingEngine(log, "x"), slow, timeout_s=0.2)
    assert log == ["x begin", "y begin", "x load weights-0 a"]
    assert not slow.busy


def test_an_engine_that_answers_with_another_version_is_named() -> None:
    engine = RecordingEngine([], "y")

    async def keep_version(version: int) -> None:
        engine.version = 3

    engine.end_weights = keep_version  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="weight hand-over 4: version: answered engine 1 with 3"):
        push(RecordingEngine([], "x"), engine)
