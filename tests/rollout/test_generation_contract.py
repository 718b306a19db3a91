"""What every registered engine must do with settings, aborts and continuations; and the doors of SGLang's servers.

Oracle: plain transformers forward passes. Tolerance 1e-4 on log-probs: float32 sums in another order differ by a few
1e-6.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.data.tokenizer import load_tokenizer
from megappo.errors import EngineError, RequestError
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, SampledResponse, VersionSpan
from megappo.rollout.hf_engine import HFEngine
from megappo.rollout.sglang_engine import SGLangEngine
from megappo.rollout.sglang_server import SGLangServer
from tests.rollout.conftest import END_TOKENS, engine_spec
from tests.rollout.subject import Subject

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [33, 34, 35, 36], [40]]
Models = tuple[PreTrainedModel, PreTrainedModel]
Folders = tuple[Path, Path]
sglang_only = pytest.mark.parametrize("subject", ["sglang"], indirect=True)


@pytest.fixture(autouse=True)
def first_weights(subject: Subject, folders: Folders) -> None:
    """Undo what a test before this one did to the weights."""
    if subject.version:
        subject.hand_over(folders[0])


def ask(num_samples: int, *, greedy: bool = False) -> list[GenerateRequest]:
    return [
        GenerateRequest(group_id=10 + index, prompt_tokens=prompt, num_samples=num_samples, greedy=greedy)
        for index, prompt in enumerate(PROMPTS)
    ]


@torch.no_grad()
def distributions(model: PreTrainedModel, prompt: list[int], response: SampledResponse) -> torch.Tensor:
    """Probabilities [tokens, V] that the response was drawn from."""
    logits = model(torch.tensor([prompt + response.tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.softmax(logits, -1)


def likelier(probabilities: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Which tokens [tokens, V] are likelier than the one drawn, by more than rounding."""
    drawn = probabilities.gather(-1, torch.tensor(tokens)[:, None])
    return probabilities > drawn * (1 + 1e-5)


Check = Callable[[torch.Tensor, list[int]], bool]
FILTERS: dict[str, tuple[dict[str, float], Check]] = {
    "top_k": ({"top_k": 3}, lambda p, tokens: bool((likelier(p, tokens).sum(-1) < 3).all())),
    "top_p": ({"top_p": 0.5}, lambda p, tokens: bool(((p * likelier(p, tokens)).sum(-1) <= 0.5 + 1e-5).all())),
    "min_p": (
        {"min_p": 0.4},
        lambda p, tokens: bool((p.gather(-1, torch.tensor(tokens)[:, None]) >= 0.4 * p.amax(-1, True) - 1e-6).all()),
    ),
    "top_k and top_p": (
        {"top_k": 2, "top_p": 0.3},
        lambda p, tokens: bool(((p * likelier(p, tokens)).sum(-1) <= 0.3 + 1e-5).all()),
    ),
    "temperature 0": ({"temperature": 0.0}, lambda p, tokens: bool((likelier(p, tokens).sum(-1) == 0).all())),
}


def test_filters_are_obeyed_and_log_probs_count_all_tokens(subject: Subject, models: Models) -> None:
    free = subject.generate(ask(12), SamplingConfig(max_new_tokens=12))
    for name, (settings, obeyed) in FILTERS.items():
        filtered = subject.generate(ask(12), SamplingConfig(max_new_tokens=12, **settings))  # type: ignore[arg-type]
        fulfilled = {True: 0, False: 0}
        for outputs, is_filtered in ((free, False), (filtered, True)):
            for output in outputs:
                prompt = PROMPTS[output.group_id - 10]
                for response in output.responses:
                    probabilities = distributions(models[0], prompt, response)
                    fulfilled[is_filtered] += obeyed(probabilities, response.tokens)
                    expected = probabilities.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0].log()
                    assert response.log_probs == pytest.approx(expected.tolist(), abs=1e-4), name
        assert fulfilled[True] == 48, name
        assert fulfilled[False] < 24, name


def test_stop_tokens_end_a_response_beside_the_end_tokens(subject: Subject) -> None:
    stops = list(range(20, 26))
    outputs = subject.generate(ask(16), SamplingConfig(max_new_tokens=40, stop_token_ids=stops))
    responses = [response for output in outputs for response in output.responses]
    assert {response.tokens[-1] for response in responses} & set(stops)
    for response in responses:
        assert not {*stops, *END_TOKENS} & set(response.tokens[:-1])
        assert (response.tokens[-1] in {*stops, *END_TOKENS}) is (response.finish_reason is FinishReason.stop)


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(subject: Subject, folders: Folders) -> None:
    tokenizer = load_tokenizer(str(folders[0]))
    (free,) = subject.generate(ask(8, greedy=True)[:1], SamplingConfig(max_new_tokens=30))
    text = str(tokenizer.decode(free.responses[0].tokens))
    sampling = SamplingConfig(max_new_tokens=30, stop=["never there", text[7:10]])
    (stopped,) = subject.generate(ask(8, greedy=True)[:1], sampling)
    length = text.find(text[7:10]) + 3
    for response in stopped.responses:
        assert response.tokens == free.responses[0].tokens[:length]
        assert len(response.log_probs) == length
        assert response.finish_reason is FinishReason.stop


def test_the_least_length_is_obeyed_or_refused(subject: Subject) -> None:
    sampling = SamplingConfig(max_new_tokens=24, min_new_tokens=20)
    if isinstance(subject.engine, SGLangEngine):
        with pytest.raises(RequestError, match="min_new_tokens=20 is not possible with true log-probs"):
            subject.generate(ask(1), sampling)
        return
    lengths = [len(response.tokens) for output in subject.generate(ask(32), sampling) for response in output.responses]
    assert min(lengths) > 20 - 1
    free = subject.generate(ask(32), SamplingConfig(max_new_tokens=24))
    assert min(len(response.tokens) for output in free for response in output.responses) < 12


def test_a_prompt_without_room_for_its_response_is_refused_and_the_longest_is_not_cut(subject: Subject) -> None:
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=120)  # 128 positions

    def longest(prompt: list[int]) -> SampledResponse:
        requests = [GenerateRequest(group_id=4, prompt_tokens=prompt, num_samples=1, row=77)]
        return subject.generate(requests, sampling)[0].responses[0]

    with pytest.raises(RequestError, match=r"prompt of group 4 \(data row 77\) has 9 tokens, which with .*=120"):
        longest([7] * 9)
    response = next(found for start in range(30, 60) if (found := longest([start] * 8)).tokens[-1] not in END_TOKENS)
    assert len(response.tokens) == 120


def continue_until_done(
    subject: Subject, requests: list[GenerateRequest], sampling: SamplingConfig
) -> tuple[list[GroupOutput], bool]:
    """Abort and continue, after longer and longer times; returns the groups, and whether one was interrupted midway."""

    async def generate_and_abort(delay_s: float) -> list[GroupOutput]:
        async def collect() -> list[GroupOutput]:
            return [output async for output in subject.engine.generate(requests, sampling, seed=0)]

        generating = asyncio.create_task(collect())
        await asyncio.wait([generating], timeout=delay_s)
        await subject.engine.abort()
        return sorted(await generating, key=lambda output: output.group_id)

    delay_s, interrupted = 0.02, False
    while True:
        outputs = subject.run(generate_and_abort(delay_s))
        open_ones = [
            response
            for output in outputs
            for response in output.responses
            if response.finish_reason is FinishReason.abort
        ]
        if not open_ones:
            return outputs, interrupted
        interrupted = interrupted or any(response.tokens for response in open_ones)
        requests = [
            dataclasses.replace(request, begun=output.responses)
            for request, output in zip(requests, outputs, strict=True)
        ]
        delay_s *= 2


def test_aborted_and_continued_samples_are_those_that_nothing_interrupted(subject: Subject) -> None:
    sampling = SamplingConfig(max_new_tokens=110)
    requests = ask(4, greedy=True)
    whole = subject.generate(requests, sampling)
    continued, interrupted = continue_until_done(subject, requests, sampling)
    assert interrupted
    for output, expected in zip(continued, whole, strict=True):
        for response, uninterrupted in zip(output.responses, expected.responses, strict=True):
            assert response.tokens == uninterrupted.tokens
            assert response.finish_reason is uninterrupted.finish_reason
            assert response.log_probs == pytest.approx(uninterrupted.log_probs, abs=1e-4)
            assert response.versions == [VersionSpan(version=subject.version, tokens=len(response.tokens))]


def test_a_continued_sample_keeps_the_log_probs_and_versions_of_what_was_begun(
    subject: Subject, folders: Folders, models: Models
) -> None:
    sampling = SamplingConfig(max_new_tokens=16)
    first = subject.version
    begun = subject.generate(ask(4), SamplingConfig(max_new_tokens=6))
    requests = [
        dataclasses.replace(
            request,
            begun=[
                dataclasses.replace(response, finish_reason=FinishReason.abort)
                if response.finish_reason is FinishReason.length
                else response
                for response in output.responses
            ],
        )
        for request, output in zip(ask(4), begun, strict=True)
    ]
    second = subject.hand_over(folders[1])
    assert any(response.finish_reason is FinishReason.abort for request in requests for response in request.begun)
    for request, output in zip(requests, subject.generate(requests, sampling), strict=True):
        assert output.policy_version == first
        for before, response in zip(request.begun, output.responses, strict=True):
            if before.finish_reason is FinishReason.stop:
                assert response == before
                continue
            assert response.tokens[:6] == before.tokens
            assert response.log_probs[:6] == before.log_probs
            assert response.versions == [
                VersionSpan(version=first, tokens=6),
                VersionSpan(version=second, tokens=len(response.tokens) - 6),
            ]
            probabilities = distributions(models[1], request.prompt_tokens, response)[6:]
            expected = probabilities.gather(-1, torch.tensor(response.tokens[6:])[:, None])[:, 0].log()
            assert response.log_probs[6:] == pytest.approx(expected.tolist(), abs=1e-4)


def limit_calls(subject: Subject, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set `rollout.request_timeout_s` of an engine that runs."""
    engine = subject.engine
    assert isinstance(engine, HFEngine | SGLangEngine)
    config = engine._spec.config if isinstance(engine, HFEngine) else engine._config
    monkeypatch.setattr(config, "request_timeout_s", seconds)


def work_until_a_call_is_late(engine: HFEngine) -> None:
    """Occupy the engine's thread, so that no call has a token before its deadline."""
    give_up = time.monotonic() + 30.0
    while not any(call.late.is_set() for call in list(engine._calls)) and time.monotonic() < give_up:
        time.sleep(0.001)


def test_a_call_without_a_single_token_is_an_error_that_names_the_key(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seconds = subject.engine, 1e-6
    if isinstance(engine, SGLangEngine):
        seconds = 0.2
        engine._generation.gate.close()  # as for a hand-over that does not end
    if isinstance(engine, HFEngine):
        engine._thread.submit(work_until_a_call_is_late, engine)
    limit_calls(subject, monkeypatch, seconds)
    with pytest.raises(EngineError, match=rf"generate: not one token within rollout\.request_timeout_s={seconds:g} "):
        subject.generate(ask(1), SamplingConfig(max_new_tokens=4))
    if isinstance(engine, SGLangEngine):
        engine._generation.gate.open()
    limit_calls(subject, monkeypatch, 60.0)
    assert len(subject.generate(ask(1), SamplingConfig(max_new_tokens=4))) == 4


def test_what_takes_longer_than_a_call_may_take_keeps_its_tokens_and_goes_on_in_another(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, requests = SamplingConfig(max_new_tokens=110), ask(4, greedy=True)
    whole = subject.generate(requests, sampling)
    limit_s, calls, outputs = 0.02, 0, list[GroupOutput]()
    while not outputs or any(response.finish_reason is FinishReason.abort for o in outputs for response in o.responses):
        limit_calls(subject, monkeypatch, limit_s)
        try:
            outputs = subject.generate(requests, sampling)
        except EngineError:  # not one token
            limit_s *= 2
            continue
        calls += 1
        requests = [
            dataclasses.replace(request, begun=output.responses)
            for request, output in zip(requests, outputs, strict=True)
        ]
    assert calls > 1
    found = [response.tokens for output in outputs for response in output.responses]
    assert found == [response.tokens for output in whole for response in output.responses]


def test_an_abort_of_nothing_does_nothing(subject: Subject) -> None:
    subject.run(subject.engine.abort())
    assert len(subject.generate(ask(1), SamplingConfig(max_new_tokens=2))) == 4


def test_health_answers_while_generating(subject: Subject) -> None:
    async def ask_meanwhile() -> bool:
        requests = [GenerateRequest(group_id=0, prompt_tokens=[5] * 8, num_samples=32)]

        async def collect() -> list[GroupOutput]:
            return [
                output async for output in subject.engine.generate(requests, SamplingConfig(max_new_tokens=110), seed=0)
            ]

        generating = asyncio.create_task(collect())
        await asyncio.sleep(0.05)
        await subject.engine.health()
        was_generating = not generating.done()
        await generating
        return was_generating

    assert subject.run(ask_meanwhile())


@sglang_only
def test_no_route_of_a_server_answers_without_the_key(subject: Subject) -> None:
    assert isinstance(subject.engine, SGLangEngine)
    key, url = subject.engine._server.api_key, subject.engine.url
    unlisted = [
        "/health",
        "/health_generate",
        "/ready",
        "/metrics",
        "/metrics/",
        "/docs",
        "/openapi.json",
        "/",
        "/none",
    ]

    async def statuses() -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        async with aiohttp.ClientSession(url) as session:
            async with session.get("/openapi.json", headers={"Authorization": f"Bearer {key}"}) as answer:
                paths = (await answer.json())["paths"]
            assert len(paths) > 50
            for path in [*paths, *unlisted]:
                for method in {"GET", "OPTIONS", "HEAD", *(name.upper() for name in paths.get(path, {}))}:
                    async with session.request(method, path.replace("{", "").replace("}", "")) as answer:
                        found[method, path] = answer.status
        return found

    found = subject.run(statuses())
    assert {route: status for route, status in found.items() if status != 401} == {}


@sglang_only
def test_the_key_of_a_server_is_in_no_log_command_line_environment_or_error(subject: Subject) -> None:
    assert isinstance(subject.engine, SGLangEngine)
    server = subject.engine._server
    assert isinstance(server, SGLangServer)
    key = server.api_key
    with pytest.raises(EngineError) as failure:
        subject.generate([GenerateRequest(group_id=0, prompt_tokens=[], num_samples=1)], SamplingConfig())
    refused = subject.run(server.failure("generate", "for the test"))
    assert key not in f"{failure.value}{refused}"
    written = [server.log_path, *(path for path in subject.folder.rglob("*") if path.is_file())]
    assert [path for path in written if key.encode() in path.read_bytes()] == []
    for process in psutil.Process().children(recursive=True):
        assert key not in " ".join(process.cmdline())
        assert key not in str(process.environ())


@sglang_only
def test_a_server_that_runs_already_is_used_and_left_running(
    subject: Subject, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = subject.engine
    assert isinstance(engine, SGLangEngine)
    assert engine._server.api_key is not None
    monkeypatch.setenv("KEY_OF_THE_TEST", engine._server.api_key)
    spec = engine_spec(folders[0], tmp_path / "unused.log")
    spec.config.urls = [engine.url]

    def start(**changes: object) -> SGLangEngine:
        other = SGLangEngine(dataclasses.replace(spec, **changes))  # type: ignore[arg-type]
        subject.run(other.start())
        return other

    with pytest.raises(EngineError, match=r"start: refused with status 401.*api_key_env=null"):
        start()
    spec.config.api_key_env = "NOT_SET"
    with pytest.raises(EngineError, match="api_key_env=NOT_SET is not set in the environment"):
        start()
    spec.config.api_key_env = "KEY_OF_THE_TEST"
    subject.hand_over(folders[0])
    other = start()
    with pytest.raises(EngineError, match=f"refused, since its weights are those of version {subject.version}"):
        dataclasses.replace(subject, engine=other).generate(ask(1), SamplingConfig(max_new_tokens=2))
    subject.run(other.stop())
    subject.run(engine.health())
    smaller = tmp_path / "smaller"
    smaller.mkdir()
    for file in folders[0].iterdir():
        text = file.read_text().replace('"vocab_size": 64', '"vocab_size": 60') if file.suffix == ".json" else None
        (smaller / file.name).write_bytes(file.read_bytes() if text is None else text.encode())
    with pytest.raises(EngineError, match="its vocabulary is not the 60 tokens"):
        start(model=dataclasses.replace(spec.model, path=str(smaller)))
