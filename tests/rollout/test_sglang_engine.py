"""What only a real SGLang server can show: its death, a bad option, its end."""

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from megappo.config.profile import ProfileConfig
from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.engine import GenerateRequest
from megappo.rollout.sglang_engine import SGLangEngine
from megappo.rollout.sglang_server import SGLangServer
from tests.rollout.conftest import engine_spec, greedy_tokens, make_model
from tests.rollout.subject import Run, Subject
from tests.rollout.trainer_process import Trainer


def own_processes() -> set[psutil.Process]:
    return {process for process in psutil.Process().children(recursive=True) if process.status() != "zombie"}


@pytest.mark.ends_its_engine
@pytest.mark.parametrize("subject", ["sglang"], indirect=True)
def test_a_killed_scheduler_is_an_error_within_seconds_and_stop_leaves_nothing(
    subject: Subject, started_subjects: dict[str, Subject], run: Run[Any]
) -> None:
    del started_subjects["sglang"]
    engine = subject.engine
    assert isinstance(engine, SGLangEngine) and isinstance(engine._server, SGLangServer)
    members = [psutil.Process(pid) for pid in engine._server.members()]
    requests = [GenerateRequest(group_id=0, prompt_tokens=[5] * 8, num_samples=64)]

    async def generate() -> None:
        async for _ in engine.generate(requests, SamplingConfig(max_new_tokens=110), seed=0):
            pass

    async def kill_while_generating() -> float:
        generating = asyncio.create_task(generate())
        await asyncio.sleep(0.3)
        next(process for process in members if process.name().startswith("sglang::sche")).kill()
        killed = time.monotonic()
        with pytest.raises(EngineError, match=r"(?s)engine sglang 0: generate: .*exit code.*last lines of .*crashed"):
            await generating
        return time.monotonic() - killed

    assert run(kill_while_generating()) < 20.0
    with pytest.raises(EngineError, match="generate: the server is gone"):
        run(generate())
    with pytest.raises(EngineError, match="health: the server is gone"):
        run(engine.health())
    run(engine.stop())
    assert not own_processes() & set(members)


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["sglang"], indirect=True)
def test_the_server_profiles_what_it_generates(subject: Subject, run: Run[Any], tmp_path: Path) -> None:
    engine = subject.engine
    assert isinstance(engine, SGLangEngine)

    async def generate_under_profile() -> None:
        await engine.begin_profile(tmp_path, "step_000003-generate-engine-0", ProfileConfig(shapes=True))
        request = GenerateRequest(group_id=0, prompt_tokens=[5, 6, 7], num_samples=1)
        async for _ in engine.generate([request], SamplingConfig(max_new_tokens=8), seed=0):
            pass
        await engine.end_profile()

    run(generate_under_profile())
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("step_000003-generate-engine-0") and written.name.endswith(".json.gz")
    with gzip.open(written, "rt") as file:
        operations = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"]
    assert any(
        "Input Dims" in event["args"]
        for event in operations
        if event["name"] == "aten::mm" or "linear" in event["name"]
    )


@pytest.mark.slow
def test_an_option_that_sglang_does_not_know_ends_the_start_with_its_message(
    folders: tuple[Path, Path], tmp_path: Path, run: Run[Any]
) -> None:
    before = own_processes()
    spec = engine_spec(folders[0], tmp_path / "server.log", extra_args={"no-such-option": "1"})
    with pytest.raises(EngineError, match=r"(?s)start: the server ended .*unrecognized arguments: --no-such-option"):
        run(SGLangEngine(spec).start())
    assert own_processes() <= before


@pytest.mark.slow
def test_two_ranks_of_a_tied_model_take_a_hand_over_and_answer_nobody_without_the_key(
    tmp_path: Path, trainer: Trainer, run: Run[Any]
) -> None:
    first = make_model(tmp_path / "first", seed=5, tie_word_embeddings=True, intermediate_size=128)
    second = make_model(tmp_path / "second", seed=6, tie_word_embeddings=True, intermediate_size=128)
    spec = engine_spec(first, tmp_path / "server.log")
    spec.config.tensor = 2
    engine = SGLangEngine(spec)
    run(engine.start())
    try:
        subject = Subject(engine=engine, run=run, trainer=trainer, folder=tmp_path, source=first, ranks=2)
        subject.join("two")
        assert len(run(engine.held_tensors())) == 2 * 16
        subject.hand_over(second)
        request = GenerateRequest(group_id=0, prompt_tokens=[5, 6, 7], num_samples=1)
        sampling = SamplingConfig(temperature=0.0, max_new_tokens=6)
        greedy = subject.generate([request], sampling)[0].responses[0].tokens
        assert run(status_without_key(engine)) == 401
    finally:
        run(engine.stop())
    assert greedy == greedy_tokens(second, request.prompt_tokens, 6)


async def status_without_key(engine: SGLangEngine) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/model_info") as answer:
        return answer.status
