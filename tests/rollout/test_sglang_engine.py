"""What only a real SGLang server can show: its death, a bad option, its end. Starts servers of its own."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.engine import GenerateRequest
from megappo.rollout.sglang_engine import SGLangEngine
from tests.rollout.conftest import Run, engine_spec


def own_processes() -> set[psutil.Process]:
    return {process for process in psutil.Process().children(recursive=True) if process.status() != "zombie"}


def test_a_killed_scheduler_is_an_error_within_seconds_and_stop_leaves_nothing(
    folders: tuple[Path, Path], tmp_path: Path, run: Run[Any]
) -> None:
    before = own_processes()
    engine = SGLangEngine(engine_spec(folders[0], tmp_path / "server.log"))
    run(engine.start())
    requests = [GenerateRequest(group_id=0, prompt_tokens=[5] * 8, num_samples=64)]

    async def generate() -> None:
        async for _ in engine.generate(requests, SamplingConfig(max_new_tokens=110), seed=0):
            pass

    async def kill_while_generating() -> float:
        generating = asyncio.create_task(generate())
        await asyncio.sleep(0.3)
        scheduler = next(process for process in own_processes() - before if process.name().startswith("sglang::sche"))
        scheduler.kill()
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
    assert own_processes() <= before


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
def test_a_stranger_gets_no_answer_and_two_ranks_work_as_one(
    folders: tuple[Path, Path], tmp_path: Path, run: Run[Any]
) -> None:
    spec = engine_spec(folders[0], tmp_path / "server.log")
    spec.config.tensor = 2
    engine = SGLangEngine(spec)
    run(engine.start())

    async def ask() -> tuple[int, int]:
        async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/model_info") as answer:
            status = answer.status
        request = GenerateRequest(group_id=0, prompt_tokens=[5], num_samples=3)
        async for output in engine.generate([request], SamplingConfig(max_new_tokens=4), seed=0):
            return status, len(output.responses)
        return status, 0

    try:
        assert run(ask()) == (401, 3)
    finally:
        run(engine.stop())
