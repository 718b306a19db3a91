"""What only the in-process engine shows: tied heads, deadlines, an end in the middle of a batch."""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megappo.config.rollout import SamplingConfig
from megappo.errors import CapabilityError, EngineError
from megappo.rollout.engine import EngineSpec, GenerateRequest, WeightGroup
from megappo.rollout.hf_engine import HFEngine
from tests.rollout.conftest import engine_spec, greedy_tokens, make_model
from tests.rollout.subject import Run, Subject
from tests.rollout.trainer_process import Trainer, plan_sources

REQUEST = GenerateRequest(group_id=0, prompt_tokens=[5, 6, 7], num_samples=8)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    model = make_model(tmp_path / "model", seed=0, max_position_embeddings=200_000)
    return engine_spec(model, tmp_path / "unused.log")


@pytest.fixture
def engine(spec: EngineSpec, run: Run[Any]) -> Iterator[HFEngine]:
    started = HFEngine(spec)
    run(started.start())
    yield started
    run(started.stop())


async def generate(engine: HFEngine, max_new_tokens: int) -> list[list[int]]:
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    return [
        response.tokens
        async for output in engine.generate([REQUEST], sampling, seed=3)
        for response in output.responses
    ]


def test_tensor_parallelism_is_refused(spec: EngineSpec) -> None:
    spec.config.tensor = 2
    with pytest.raises(CapabilityError, match=r"rollout\.tensor=2 needs an engine with tensor parallelism"):
        HFEngine(spec)


def test_the_same_seed_gives_the_same_samples_in_another_engine(
    engine: HFEngine, spec: EngineSpec, run: Run[Any]
) -> None:
    other = HFEngine(dataclasses.replace(spec, index=1, seed=99))
    run(other.start())
    assert run(generate(engine, 20)) == run(generate(other, 20))
    run(other.stop())


def test_stop_ends_a_batch_under_way(engine: HFEngine, run: Run[Any]) -> None:
    engine._end_tokens = []  # nothing ends a sample before its length

    async def stop_while_generating() -> None:
        generating = asyncio.create_task(generate(engine, 100_000))
        await asyncio.sleep(0.3)
        await engine.stop()
        with pytest.raises(EngineError, match="engine hf 0: generate: SamplingCancelled"):
            await generating

    start = time.monotonic()
    run(stop_while_generating())
    assert time.monotonic() - start < 20.0
    with pytest.raises(EngineError, match="generate: the engine is not running"):
        run(generate(engine, 2))


def test_a_group_of_another_back_end_is_refused(engine: HFEngine, run: Run[Any]) -> None:
    group = WeightGroup(name="n", address="127.0.0.1", port=1, world_size=2, rank_offset=1, backend="nccl")
    with pytest.raises(EngineError, match="n uses nccl, and an engine on cpu needs gloo"):
        run(engine.join_weight_group(group))


def test_a_tied_head_is_loaded_with_the_embedding_and_may_be_sent_too(
    tmp_path: Path, trainer: Trainer, run: Run[Any]
) -> None:
    first = make_model(tmp_path / "first", seed=5, tie_word_embeddings=True)
    second = make_model(tmp_path / "second", seed=6, tie_word_embeddings=True)
    engine = HFEngine(engine_spec(first, tmp_path / "unused.log"))
    run(engine.start())
    subject = Subject(engine=engine, run=run, trainer=trainer, folder=tmp_path, source=first)
    subject.join("tied")
    buckets = plan_sources(second, ["tied"], bucket_bytes=1)["tied"]  # one tensor each
    embedding = next(bucket for bucket in buckets if bucket.names == ["model.embed_tokens.weight"])
    head = dataclasses.replace(embedding, names=["lm_head.weight"])
    expected = greedy_tokens(second, REQUEST.prompt_tokens, 6)
    for sent in (buckets, [head, *buckets]):
        subject.hand_over(second, sources={"tied": sent})
        output = subject.generate([REQUEST], SamplingConfig(temperature=0.0, max_new_tokens=6))[0]
        assert output.responses[0].tokens == expected
    with pytest.raises(EngineError, match=r"1 missing parameters \(model.embed_tokens.weight\)"):
        without = [bucket for bucket in buckets if bucket is not embedding]
        subject.hand_over(second, sources={"tied": [head, *without]})
    run(engine.stop())
