"""What the engine sampled is what comes back, token by token, whatever programs do and however often they stop."""

import asyncio
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.cluster.begun_answers import open_begun, pack_begun
from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.agents.program import AgentResult, AgentTask, Generate, OutOfTokens, ProgramError
from megappo.rollout.engine import FinishReason, GroupOutput, SampledResponse, Turn, VersionSpan
from tests.fakes.token_engine import TokenEngine
from tests.rollout.agents.conftest import (
    Script,
    generate,
    generate_with_interruptions,
    make_runner,
    request_of,
)

SAMPLING = SamplingConfig(max_new_tokens=24)


def wanderer(seed: int, *, forgetful: bool = False) -> Script:
    """Make a program that takes a few turns, adds tokens from 100 on and waits in between, as the sample's number and
    the seed say. A forgetful one adds others each time it is run. It hands over what each turn gave it."""
    runs = random.Random(seed)

    async def run(task: AgentTask, call: Generate) -> AgentResult:
        numbers = random.Random(runs.random() if forgetful else hash((seed, task.prompt.row, task.number)))
        tokens = list(task.prompt.tokens)
        turns: list[tuple[list[int], list[float]]] = []
        for _ in range(random.Random(hash((seed, task.number))).randrange(1, 5)):
            try:
                sampled = await call(tokens)
            except OutOfTokens:
                break
            turns.append((sampled.tokens, sampled.log_probs))
            tokens += sampled.tokens
            for _ in range(numbers.randrange(0, 6)):
                await asyncio.sleep(0)
            tokens += [numbers.randrange(100, 200) for _ in range(numbers.randrange(0, 5))]
        return AgentResult(extra={"turns": turns}, counts={"visits": 1.0})

    return run


def check_record(response: SampledResponse, engine: TokenEngine, group_id: int, sample: int, prompt: list[int]) -> None:
    """The response is the prompts and answers of the engine's calls for this sample, one after the other."""
    assert response.turns is not None and len(response.mask) == len(response.tokens) == len(response.log_probs)
    record, place = list(prompt), 0
    mask: list[bool] = []
    log_probs: list[float] = []
    for call in engine.drawn:
        if (call.group_id, call.sample) != (group_id, sample):
            continue
        assert call.read[: len(record)] == record, "the model read something else than it had written"
        added = call.read[len(record) :]
        mask += [False] * len(added) + [True] * len(call.tokens)
        log_probs += [0.0] * len(added) + call.log_probs
        record = call.read + call.tokens
        place = len(record)
    kept = len(response.tokens)
    assert place == len(record) and response.tokens == record[len(prompt) :][:kept]
    assert response.mask == mask[:kept] and response.log_probs == log_probs[:kept]
    assert not any(mask[kept:]), "a sampled token was lost"
    assert kept == 0 or response.mask[-1]
    assert sum(span.tokens for span in response.versions) == response.sampled_tokens == sum(mask)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    at_once=st.sampled_from([None, 8]),
    forgetful=st.booleans(),
    max_new_tokens=st.integers(1, 30),
    prompts=st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_tokens_of_the_engine_come_back_as_they_were(
    seed: int, at_once: int | None, forgetful: bool, max_new_tokens: int, prompts: list[list[int]]
) -> None:
    engine = TokenEngine(at_once=at_once)
    runner = make_runner(engine, wanderer(seed, forgetful=forgetful))
    requests = [request_of(group, prompt, num_samples=1 + group % 3) for group, prompt in enumerate(prompts)]
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    numbers = random.Random(seed)
    outputs = asyncio.run(generate_with_interruptions(runner, requests, sampling, numbers))
    assert [output.group_id for output in outputs] == list(range(len(prompts)))
    for output, request in zip(outputs, requests):
        for sample, response in enumerate(output.responses):
            check_record(response, engine, output.group_id, sample, request.prompt_tokens)
            assert len(response.tokens) <= max_new_tokens
            assert response.finish_reason is not FinishReason.abort
            assert response.notes is not None
            assert response.notes.counts == {"visits": 1.0, "turns": len(response.turns or [])}
            assert response.notes.extra["turns"] == turns_of(response)


def turns_of(response: SampledResponse) -> list[tuple[list[int], list[float]]]:
    """Cut a response into what its calls sampled."""
    turns: list[tuple[list[int], list[float]]] = []
    place = 0
    for turn in response.turns or []:
        own = slice(place + turn.observed, place + turn.observed + turn.sampled)
        turns.append((response.tokens[own], response.log_probs[own]))
        place = own.stop
    return turns


def stripped(outputs: Sequence[GroupOutput]) -> list[Any]:
    """Everything but the time."""
    return [
        (response.tokens, response.log_probs, response.turns, response.finish_reason, response.notes)
        for output in outputs
        for response in output.responses
    ]


@pytest.mark.parametrize("at_once", [None, 8])
def test_interruptions_change_nothing(at_once: int | None) -> None:
    requests = [request_of(group, [2 + group, 5], num_samples=3) for group in range(4)]
    for seed in range(20):
        straight = asyncio.run(generate(make_runner(TokenEngine(at_once=at_once), wanderer(seed)), requests, SAMPLING))
        runner = make_runner(TokenEngine(at_once=at_once), wanderer(seed))
        broken = asyncio.run(generate_with_interruptions(runner, requests, SAMPLING, random.Random(seed)))
        assert stripped(broken) == stripped(straight)


@pytest.mark.parametrize("at_once", [None, 8])
def test_a_call_may_be_stopped_at_any_moment(at_once: int | None) -> None:
    async def stop_after(steps: int) -> int:
        runner = make_runner(TokenEngine(at_once=at_once), wanderer(1))
        call = asyncio.create_task(generate(runner, [request_of(0, [2, 5], num_samples=3)], SAMPLING))
        for _ in range(steps):
            await asyncio.sleep(0)
        await runner.abort()
        (output,) = await asyncio.wait_for(call, 20.0)
        return sum(response.sampled_tokens for response in output.responses)

    found = [asyncio.run(stop_after(steps)) for steps in range(1, 60)]  # 0: it has not begun
    assert found[0] == 0 and found[-1] > 10


@pytest.mark.parametrize("at_once", [None, 8])
def test_what_the_engine_interrupts_for_the_sake_of_another_call_goes_on_at_once(at_once: int | None) -> None:
    async def disturbed() -> list[GroupOutput]:
        engine = TokenEngine(at_once=at_once)
        call = asyncio.create_task(generate(make_runner(engine, wanderer(1)), requests, SAMPLING))
        while not call.done():
            for _ in range(7):
                await asyncio.sleep(0)
            await engine.abort()
        return await call

    requests = [request_of(group, [2, 5], num_samples=3) for group in range(2)]
    straight = asyncio.run(generate(make_runner(TokenEngine(at_once=at_once), wanderer(1)), requests, SAMPLING))
    assert stripped(asyncio.run(disturbed())) == stripped(straight)


def test_turns_that_a_repeated_run_does_not_ask_for_are_left_out() -> None:
    async def loses_interest(task: AgentTask, call: Generate) -> AgentResult:
        runs.append(task.number)
        sampled = await call(task.prompt.tokens)
        if len(runs) == 1:
            await call([*task.prompt.tokens, *sampled.tokens, 100])
            await asyncio.sleep(60)
        return AgentResult()

    runs: list[int] = []
    runner = make_runner(TokenEngine(at_once=8), loses_interest, request_timeout_s=0.2)
    request = request_of(0, [2], num_samples=1)
    (begun,) = asyncio.run(generate(runner, [request], SAMPLING))
    request.begun.extend(begun.responses)
    (output,) = asyncio.run(generate(runner, [request], SAMPLING))
    assert len(begun.responses[0].turns or []) == 2
    assert turns_of(output.responses[0]) == turns_of(begun.responses[0])[:1]
    assert output.responses[0].finish_reason is FinishReason.stop


@pytest.mark.parametrize("reason", [FinishReason.abort, FinishReason.stop])
def test_an_answer_that_was_begun_without_a_program_is_the_first_turn(reason: FinishReason) -> None:
    async def twice(task: AgentTask, call: Generate) -> AgentResult:
        first = await call(task.prompt.tokens)
        await call([*task.prompt.tokens, *first.tokens, 100, 101])
        return AgentResult(extra={"first": first.tokens})

    spans = [VersionSpan(version=0, tokens=2)]
    begun = SampledResponse(tokens=[5, 6], log_probs=[-0.5, -0.25], finish_reason=reason, versions=spans)
    # Beside what a program has begun it is stored as what it was.
    other = replace(begun, turns=[Turn(observed=1, sampled=1, finish_reason=FinishReason.abort)])
    opened = open_begun(pack_begun({0: ([0], [begun]), 1: ([1], [other])}))
    assert opened[0][1][0].mask == [True, True] and opened[1][1][0].mask == [False, True]
    for response in (begun, opened[0][1][0]):
        request = replace(request_of(0, [2, 3], num_samples=1), begun=[response])
        (output,) = asyncio.run(generate(make_runner(TokenEngine(end_share=1.0), twice), [request], SAMPLING))
        (found,) = output.responses
        first = [5, 6] if reason is FinishReason.stop else [5, 6, 1]
        assert found.notes is not None and found.notes.extra["first"] == first
        assert found.tokens == [*first, 100, 101, 1]
        assert found.mask == [True] * len(first) + [False, False, True]


def test_an_engine_that_works_batch_by_batch_gets_the_calls_of_all_programs_at_once() -> None:
    async def two_turns(task: AgentTask, call: Generate) -> AgentResult:
        tokens = [*task.prompt.tokens, *(await call(task.prompt.tokens)).tokens]
        for _ in range(3 * task.number):  # some are slower between their turns
            await asyncio.sleep(0)
        if task.number:
            await call([*tokens, 100])
        return AgentResult()

    engine = TokenEngine(end_share=1.0)
    requests = [request_of(group, [2, 3], num_samples=4) for group in range(3)]
    asyncio.run(generate(make_runner(engine, two_turns), requests, SAMPLING))
    assert engine.batches == [12, 9]
    engine = TokenEngine(end_share=1.0, at_once=8)
    asyncio.run(generate(make_runner(engine, two_turns), requests, SAMPLING))
    assert engine.batches == [1] * 21


def test_what_is_added_counts_against_the_tokens_of_a_sample_and_the_last_sampled_one_ends_it() -> None:
    async def adds(task: AgentTask, call: Generate) -> AgentResult:
        tokens = list(task.prompt.tokens)
        while True:
            tokens += (await call(tokens)).tokens
            tokens += [100] * 4

    engine = TokenEngine(end_share=1.0)  # turns of one token
    (output,) = asyncio.run(
        generate(make_runner(engine, adds), [request_of(0, [2], num_samples=1)], SamplingConfig(max_new_tokens=15))
    )
    (response,) = output.responses
    # 1 + 5 + 5 tokens; the next four and one more would be 16
    assert response.tokens == [1, *[100] * 4, 1, *[100] * 4, 1]
    assert response.finish_reason is FinishReason.length


def test_a_program_may_end_a_sample_itself_when_there_is_no_room() -> None:
    async def adds(task: AgentTask, call: Generate) -> AgentResult:
        sampled = await call(task.prompt.tokens)
        with pytest.raises(OutOfTokens, match="max_new_tokens=8 is used up"):  # one more and no room for an answer
            await call([*task.prompt.tokens, *sampled.tokens, *[100] * 7])
        return AgentResult(finish_reason=FinishReason.stop, extra={"room": False})

    (output,) = asyncio.run(
        generate(make_runner(TokenEngine(end_share=1.0), adds), [request_of(0, [2])], SamplingConfig(max_new_tokens=8))
    )
    for response in output.responses:
        assert response.finish_reason is FinishReason.stop and 100 not in response.tokens
        assert response.notes is not None and response.notes.extra == {"room": False}


def test_numbers_of_numpy_become_plain_ones() -> None:
    async def asks(task: AgentTask, call: Generate) -> AgentResult:
        first = await call(task.prompt.tokens)
        await call(np.array([*task.prompt.tokens, *first.tokens, 100]))  # type: ignore[arg-type]
        return AgentResult(counts={"x": np.float32(0.5), "y": np.int64(2)})  # type: ignore[dict-item]

    (output,) = asyncio.run(
        generate(make_runner(TokenEngine(end_share=1.0), asks), [request_of(0, [2], num_samples=1)], SAMPLING)
    )
    (response,) = output.responses
    assert response.tokens == [1, 100, 1] and response.notes is not None
    assert json.loads(json.dumps([response.tokens, response.notes.counts]))[1] == {"x": 0.5, "y": 2.0, "turns": 2.0}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other_tokens", "called generate with 1 tokens that do not begin with the 2 so far"),
        ("shorter", "called generate with 2 tokens that do not begin with the"),
        ("two_at_once", "called generate while another call of the same sample was under way"),
        ("text", r"called generate with something else than token ids: 'str' object"),
        ("no_result", r"returned NoneType \(return an AgentResult\)"),
        ("no_count", r"returned the count x=nan \(counts are finite numbers\)"),
        ("taken", r"returned the count turns, which is that of the turns of every program \(rename it\)"),
        ("no_values", r"returned extra that cannot be sent to the reward: .*lock.* \(use plain values\)"),
        ("raises", r"ValueError: no idea \(its log has the traceback\)"),
    ],
)
@pytest.mark.parametrize("at_once", [None, 8])
def test_a_faulty_program_is_named_with_its_data_row(fault: str, message: str, at_once: int | None) -> None:
    async def faulty(task: AgentTask, call: Generate) -> AgentResult:
        if fault == "raises" and await call(task.prompt.tokens):
            raise ValueError("no idea")
        if fault == "other_tokens":
            await call([9])
        if fault == "text":
            await call([*task.prompt.tokens, "a"])  # type: ignore[list-item]
        if fault == "no_result":
            return None  # type: ignore[return-value]
        if fault == "no_values":
            return AgentResult(extra={"lock": threading.Lock()})
        if fault == "no_count":
            return AgentResult(counts={"x": float("nan")})
        if fault == "taken":
            return AgentResult(counts={"turns": 1.0})
        if fault == "shorter":
            await call(task.prompt.tokens)
            await call(task.prompt.tokens)
        await asyncio.gather(call(task.prompt.tokens), call(task.prompt.tokens))
        return AgentResult()

    runner = make_runner(TokenEngine(at_once=at_once), faulty)
    with pytest.raises(ProgramError, match=rf"rollout\.agent=tests:Program: made row 7: {message}"):
        asyncio.run(generate(runner, [request_of(7, [2, 3], num_samples=1)], SAMPLING))


def test_an_error_of_the_engine_reaches_the_caller_and_nothing_is_left() -> None:
    class Broken(TokenEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise EngineError("engine 0: generate: out of paper")
            yield

    async def call() -> int:
        with pytest.raises(EngineError, match="out of paper"):
            await generate(make_runner(Broken(), wanderer(0)), [request_of(0, [2], num_samples=4)], SAMPLING)
        return len(asyncio.all_tasks())

    assert asyncio.run(call()) == 1


def test_a_call_that_takes_too_long_is_interrupted_with_what_it_has() -> None:
    async def slow(task: AgentTask, call: Generate) -> AgentResult:
        sampled = await call(task.prompt.tokens)
        if task.number:
            await asyncio.sleep(60)
        await call([*task.prompt.tokens, *sampled.tokens, 100])
        return AgentResult()

    runner = make_runner(TokenEngine(at_once=8), slow, request_timeout_s=0.3)
    (output,) = asyncio.run(generate(runner, [request_of(0, [2])], SAMPLING))
    quick, waiting = output.responses
    assert quick.finish_reason is not FinishReason.abort and 100 in quick.tokens
    assert waiting.finish_reason is FinishReason.abort and waiting.sampled_tokens == len(waiting.tokens) > 0
    assert waiting.seconds >= 0.3


def test_a_call_without_a_token_is_an_error_of_the_engine() -> None:
    async def stuck(task: AgentTask, call: Generate) -> AgentResult:
        await asyncio.sleep(60)
        return AgentResult()

    runner = make_runner(TokenEngine(at_once=8), stuck, request_timeout_s=0.1)
    with pytest.raises(EngineError, match=r"not one token within rollout\.request_timeout_s=0\.1"):
        asyncio.run(generate(runner, [request_of(0, [2])], SAMPLING))


def test_time_goes_on_where_it_was_when_a_sample_was_interrupted() -> None:
    spent: list[float] = []

    async def waits(task: AgentTask, call: Generate) -> AgentResult:
        spent.append(task.spent_s)
        await call(task.prompt.tokens)
        await asyncio.sleep(60 if len(spent) == 1 else 0)
        return AgentResult()

    runner = make_runner(TokenEngine(at_once=8), waits, request_timeout_s=0.2)
    request = request_of(0, [2], num_samples=1)
    (begun,) = asyncio.run(generate(runner, [request], SAMPLING))
    request.begun.extend(begun.responses)
    (output,) = asyncio.run(generate(runner, [request], SAMPLING))
    assert spent[0] == 0.0 and spent[1] == begun.responses[0].seconds >= 0.2
    assert output.responses[0].tokens == begun.responses[0].tokens
