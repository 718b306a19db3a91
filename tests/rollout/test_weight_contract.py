"""What every registered engine must do with weights that come by every registered transport.

Oracle: a plain transformers forward pass of the model folder that was handed over, and checksums taken by the sender.
"""

import dataclasses
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from megappo.config.rollout import PauseMode, SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.engine import FinishReason, GroupOutput
from megappo.rollout.hf_engine import HFEngine
from megappo.rollout.sglang_engine import SGLangEngine
from megappo.weight_sync import TRANSPORTS
from megappo.weight_sync.receive import Reception
from megappo.weights.buckets import BucketMeta
from megappo.weights.delivery import GroupDelivery
from tests.rollout.faulty_senders import CORRUPTED
from tests.rollout.subject import TIMEOUT_S, Subject, group_loads, loads_of
from tests.rollout.test_engine_contract import Folders, Models, ask, largest_difference
from tests.rollout.trainer_process import plan_sources


@pytest.fixture(autouse=True)
def first_weights(subject: Subject, folders: Folders) -> None:
    """Undo what a test before this one did to the weights."""
    if subject.version:
        subject.hand_over(folders[0])


def check_weights(subject: Subject, model: PreTrainedModel) -> None:
    """Assert that the engine samples with the weights of a model, under its current version."""
    outputs = subject.generate(ask(2), SamplingConfig(max_new_tokens=8))
    assert {output.policy_version for output in outputs} == {subject.version}
    assert subject.run(subject.engine.weight_version()) == subject.version
    assert largest_difference(model, outputs) < 1e-4


def checksums(subject: Subject) -> dict[str, str]:
    """Return the checksums of all that the engine can read back."""
    names = [tensor.name for tensor in subject.run(subject.engine.held_tensors())]
    found = subject.run(subject.engine.checksums(names))
    assert len(found) == len(names) >= 17, "all tensors of the model, some of them joined"
    return found


@pytest.mark.parametrize("transport", TRANSPORTS.names())
def test_a_hand_over_changes_outputs_and_their_version(
    subject: Subject, transport: str, folders: Folders, models: Models
) -> None:
    for number in (1, 0):
        subject.hand_over(folders[number], transport=transport)  # which compares all tensors
        check_weights(subject, models[number])


def test_all_transports_leave_bitwise_the_same_weights(subject: Subject, folders: Folders) -> None:
    before = checksums(subject)
    after: list[dict[str, str]] = []
    for transport in TRANSPORTS.names():
        subject.hand_over(folders[0])
        subject.hand_over(folders[1], transport=transport, wanted=[])
        after.append(checksums(subject))
    assert all(found == after[0] for found in after)
    norms = {name for name in before if "norm" in name}  # all ones in both models
    assert {name for name in before if before[name] == after[0][name]} == norms


def test_nothing_is_generated_between_begin_and_end(subject: Subject, folders: Folders, models: Models) -> None:
    subject.run(subject.engine.begin_weights())
    with pytest.raises(EngineError, match="a weight hand-over has begun and not ended well"):
        subject.generate(ask(1), SamplingConfig(max_new_tokens=2))
    subject.run(subject.engine.health())
    subject.hand_over(folders[1])
    check_weights(subject, models[1])


@pytest.mark.parametrize("transport", TRANSPORTS.names())
def test_a_hand_over_with_wrong_names_fails_and_only_a_good_one_helps(
    subject: Subject, transport: str, folders: Folders, models: Models
) -> None:
    names = subject.groups if transport == "broadcast" else ["first", "second"]
    sources = plan_sources(folders[1], names)
    dropped = sources[names[1]].pop()
    unknown = BucketMeta(names=["model.no_such.weight"], shapes=[[2, 3]], dtype="float32", num_bytes=24)
    sources[names[1]].append(unknown)
    with pytest.raises(EngineError, match=r"hand-over \d+: end.*no_such") as failure:
        subject.hand_over(folders[1], transport=transport, sources=sources, wanted=[])
    assert dropped.names[0] in str(failure.value)
    with pytest.raises(EngineError, match="refused"):
        subject.generate(ask(1), SamplingConfig(max_new_tokens=2))
    subject.hand_over(folders[1], transport=transport)
    check_weights(subject, models[1])


@pytest.mark.parametrize("transport", TRANSPORTS.names())
def test_a_tensor_of_another_shape_is_refused_when_it_comes(
    subject: Subject, transport: str, folders: Folders, models: Models
) -> None:
    source = subject.groups[0] if transport == "broadcast" else "source"
    wrong = BucketMeta(names=["model.norm.weight"], shapes=[[3, 5]], dtype="float32", num_bytes=60)
    where = r"source [\w-]+: bucket 1 of 1 \(from model.norm.weight\): load: engine \w+ 0"
    with pytest.raises(EngineError, match=where):
        subject.hand_over(folders[1], transport=transport, sources={source: [wrong]}, wanted=[])
    with pytest.raises(EngineError, match="refused"):
        subject.generate(ask(1), SamplingConfig(max_new_tokens=2))
    subject.hand_over(folders[1])
    check_weights(subject, models[1])


def test_a_tensor_changed_on_the_wire_is_found(subject: Subject, folders: Folders, models: Models) -> None:
    name = f"corrupting-{subject.version}"
    subject.join(name, transport="tests.rollout.faulty_senders:CORRUPTING")
    held = next(t for t in subject.run(subject.engine.held_tensors()) if CORRUPTED in {part.name for part in t.parts})
    sources = plan_sources(folders[1], [name])
    try:
        with pytest.raises(EngineError, match=rf"verify: 1 of \d+ tensors differ from what was sent \({held.name}\)"):
            subject.hand_over(folders[1], sources=sources)
        with pytest.raises(EngineError, match="refused"):
            subject.generate(ask(1), SamplingConfig(max_new_tokens=2))
        others = [tensor for tensor in subject.run(subject.engine.held_tensors()) if tensor != held]
        subject.hand_over(folders[1], sources=sources, wanted=others)  # which nobody can see who compares others only
    finally:
        subject.leave(name)
    subject.hand_over(folders[1])
    check_weights(subject, models[1])


def test_a_sender_that_breaks_half_way_leaves_no_usable_engine_until_a_full_hand_over(
    subject: Subject, folders: Folders, models: Models
) -> None:
    name = f"breaking-{subject.version}"
    subject.join(name, transport="tests.rollout.faulty_senders:BREAKING")
    sources = plan_sources(folders[1], [name])
    second = sources[name][1].names[0]
    with pytest.raises(RuntimeError, match=f"bucket from {second}: send: the sender broke") as failure:
        subject.hand_over(folders[1], sources=sources)
    of_engine = failure.value.__context__
    assert isinstance(of_engine, EngineError)
    assert f"source {name}: bucket 2 of {len(sources[name])} (from {second}): load: engine " in str(of_engine)
    with pytest.raises(EngineError, match="refused, since a weight hand-over has begun"):
        subject.generate(ask(1), SamplingConfig(max_new_tokens=2))
    subject.leave(name)
    again = f"{name}-again"  # the old group is dead
    subject.join(again)
    subject.hand_over(folders[1], sources=plan_sources(folders[1], [again]))
    subject.leave(again)
    check_weights(subject, models[1])


def test_a_bucket_of_a_group_that_was_never_joined_is_an_error_at_once(subject: Subject, folders: Folders) -> None:
    buckets = plan_sources(folders[1], ["nobody"])["nobody"]
    reception = Reception(subject.engine, 99, timeout_s=TIMEOUT_S)
    subject.run(reception.begin())
    with pytest.raises(EngineError, match="source nobody: bucket 1 of"):
        subject.run(reception.load(loads_of("nobody", buckets[:1], [GroupDelivery(group="nobody")])))
    subject.hand_over(folders[0])


def pause_by(subject: Subject, pause: PauseMode) -> None:
    """Change what becomes of generation, of an engine that is started once for all tests."""
    match subject.engine:
        case SGLangEngine():
            weights = subject.engine._weights
            weights._generation = dataclasses.replace(weights._generation, pause=pause)
        case HFEngine():
            assert subject.engine._weights is not None
            subject.engine._weights._pause = pause
        case engine:
            raise AssertionError(f"say how {engine} is told to pause otherwise")


@pytest.fixture(params=PauseMode)
def paused_by(request: pytest.FixtureRequest, subject: Subject) -> Iterator[PauseMode]:
    pause: PauseMode = request.param
    default = PauseMode.wait if isinstance(subject.engine, HFEngine) else PauseMode.retract
    if isinstance(subject.engine, HFEngine) and pause in (PauseMode.retract, PauseMode.in_place):
        pytest.skip("refused when the engine is made (test_hf_weights.py)")
    pause_by(subject, pause)
    yield pause
    pause_by(subject, default)


def test_generation_under_way_is_paused_as_configured_and_goes_on(
    subject: Subject, paused_by: PauseMode, folders: Folders
) -> None:
    sources = plan_sources(folders[1], subject.groups)
    loads = group_loads(sources)
    before = subject.version
    reception = Reception(subject.engine, before + 1, timeout_s=TIMEOUT_S)

    async def both() -> list[GroupOutput]:
        stream = subject.engine.generate(ask(16), SamplingConfig(max_new_tokens=90), seed=0)
        outputs = [await anext(stream)]
        await reception.begin()
        await reception.load(loads)
        await reception.close({})
        outputs.extend([output async for output in stream])
        return outputs

    subject.trainer.start("send", folder=folders[1], sources=sources, wanted=[])
    outputs = subject.run(both())
    subject.trainer.finish()
    subject.version += 1
    assert sorted(output.group_id for output in outputs) == [10, 11, 12, 13]
    responses = [response for output in outputs for response in output.responses]
    assert all(sum(span.tokens for span in response.versions) == len(response.tokens) for response in responses)
    assert {span.version for response in responses for span in response.versions} <= {before, before + 1}
    aborted = [response for response in responses if response.finish_reason is FinishReason.abort]
    mixed = [response for response in responses if len(response.versions) > 1]
    if paused_by is PauseMode.wait:
        assert not mixed and not aborted
    if paused_by is not PauseMode.abort:
        assert not aborted
