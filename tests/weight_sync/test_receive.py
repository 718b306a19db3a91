"""The order of one hand-over, with an engine that writes down what it is asked."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from megappo.errors import EngineError
from megappo.weight_sync.receive import Load, Reception
from megappo.weights.buckets import BucketMeta
from megappo.weights.delivery import Delivery, GroupDelivery


def load(source: str, number: int, of: int, name: str) -> Load:
    bucket = BucketMeta(names=[name, f"{name}.bias"], shapes=[[1], [1]], dtype="float32", num_bytes=8)
    return Load(source=source, number=number, of=of, bucket=bucket, delivery=GroupDelivery(group=source))


LOADS = [load("weights-0", 1, 2, "a"), load("weights-0", 2, 2, "b"), load("weights-1", 1, 1, "c")]
SENT = {"a": "1", "b": "2"}


class RecordingEngine:
    """Takes a hand-over, one call at a time; `trouble` may fail or delay a call."""

    def __init__(self, trouble: Callable[[str], float] = lambda call: 0.0) -> None:
        self.log: list[str] = []
        self.trouble = trouble
        self.version = 0
        self.held = dict(SENT)
        self.busy = False

    async def _note(self, call: str) -> None:
        assert not self.busy, "one call at a time"
        self.busy = True
        try:
            await asyncio.sleep(self.trouble(call))
            self.log.append(call)
        finally:
            self.busy = False

    async def begin_weights(self) -> None:
        await self._note("begin")

    async def load_weights(self, bucket: BucketMeta, *, delivery: Delivery) -> None:
        assert isinstance(delivery, GroupDelivery)
        await self._note(f"load {delivery.group} {bucket.names[0]}")

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        await self._note(f"checksums {' '.join(names)}")
        return {name: self.held[name] for name in names if name in self.held}

    async def end_weights(self, version: int) -> None:
        await self._note("end")
        self.version = version

    async def weight_version(self) -> int:
        return self.version


def hand_over(engine: RecordingEngine, *, sent: dict[str, str] = SENT, timeout_s: float = 10.0) -> None:
    async def all_steps() -> None:
        reception = Reception(engine, 4, timeout_s=timeout_s)
        await reception.begin()
        await reception.load(LOADS)
        await reception.close(sent)

    asyncio.run(all_steps())


def failing_at(call: str) -> Callable[[str], float]:
    def trouble(asked: str) -> float:
        if asked == call:
            raise EngineError("engine x 1: it broke")
        return 0.0

    return trouble


@pytest.mark.parametrize(("sent", "verify"), [(SENT, ["checksums a b"]), ({}, [])])
def test_an_engine_gets_every_bucket_in_order_and_is_verified_before_it_goes_on(
    sent: dict[str, str], verify: list[str]
) -> None:
    engine = RecordingEngine()
    hand_over(engine, sent=sent)
    assert engine.log == ["begin", "load weights-0 a", "load weights-0 b", "load weights-1 c", *verify, "end"]


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("begin", "begin"),
        ("load weights-0 b", "source weights-0: bucket 2 of 2 (from b): load"),
        ("load weights-1 c", "source weights-1: bucket 1 of 1 (from c): load"),
        ("checksums a b", "verify"),
        ("end", "end"),
    ],
)
def test_a_failure_names_engine_source_bucket_and_phase_and_stops_the_hand_over(call: str, where: str) -> None:
    engine = RecordingEngine(failing_at(call))
    with pytest.raises(EngineError) as failure:
        hand_over(engine)
    assert str(failure.value) == f"weight hand-over 4: {where}: engine x 1: it broke"
    assert call not in engine.log and "end" not in engine.log


def test_a_late_engine_is_told_where_it_was_and_its_call_is_given_up() -> None:
    slow = RecordingEngine(lambda call: 60.0 if call == "load weights-0 a" else 0.0)
    with pytest.raises(EngineError, match=r"bucket 1 of 2 \(from a\): load: not done within 0.2 s"):
        hand_over(slow, timeout_s=0.2)
    assert slow.log == ["begin"]
    assert not slow.busy


def test_all_buckets_together_have_one_deadline() -> None:
    slow = RecordingEngine(lambda call: 0.3 if call.startswith("load") else 0.0)
    with pytest.raises(EngineError, match=r"bucket 2 of 2 \(from b\): load: not done within 0.5 s of the begin"):
        hand_over(slow, timeout_s=0.5)
    assert slow.log == ["begin", "load weights-0 a"]


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ({"a": "1", "b": "3"}, r"verify: 1 of 2 tensors differ from what was sent \(b\)"),
        ({"a": "1"}, r"verify: 1 of 2 tensors cannot be read back \(b\)"),
        ({"b": "1"}, r"differ from what was sent \(b\) and 1 of 2 tensors cannot be read back \(a\)"),
    ],
)
def test_an_engine_that_holds_something_else_does_not_go_on(held: dict[str, str], problem: str) -> None:
    engine = RecordingEngine()
    engine.held = held
    with pytest.raises(EngineError, match=problem):
        hand_over(engine)
    assert engine.log[-1] == "checksums a b"


def test_an_engine_that_answers_with_another_version_is_an_error() -> None:
    engine = RecordingEngine()

    async def keep_version(version: int) -> None:
        engine.version = 3

    engine.end_weights = keep_version  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="weight hand-over 4: version: the engine answers with 3"):
        hand_over(engine)
