"""The tool loop, with an engine that says what a script has it say."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from megappo.config.rollout import RolloutConfig, SamplingConfig, ToolLoopConfig
from megappo.data.tokenizer import character_tokenizer, encode_all
from megappo.data.types import Prompt
from megappo.rollout.agents.program import AgentSpec
from megappo.rollout.agents.runner import AgentRunner
from megappo.rollout.agents.tool_loop import ToolLoop
from megappo.rollout.continuation import join_group, open_samples
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, SampledResponse, VersionSpan

PLACE = "tests.rollout.agents.sample_tools"
TOKENIZER = character_tokenizer(map(chr, range(32, 127)))
PROMPT = "1+2?>"


@dataclass
class SayingEngine:
    """Says the next line at each call; a line that ends with $ has no end token, and hangs after its last token where
    it ends with two."""

    lines: Sequence[str]
    at_once: int | None = 8
    read: list[str] = field(default_factory=list)
    """What the model had before it at each call."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        for request in requests:
            (sample,) = open_samples(request, sampling.max_new_tokens)
            line = self.lines[len(self.read)]
            text: Any = TOKENIZER.decode([*request.prompt_tokens, *sample.begun])
            self.read.append(text)
            tokens = encode_all(TOKENIZER, [line.rstrip("$")])[0] + [] if line.endswith("$") else said(line)
            tokens = tokens[: sample.budget]
            if line.endswith("$$"):
                await self.aborted.wait()
            reason = FinishReason.stop if tokens and tokens[-1] == 1 else FinishReason.length
            drawn = SampledResponse(
                tokens=tokens,
                log_probs=[-0.5] * len(tokens),
                finish_reason=FinishReason.abort if line.endswith("$$") else reason,
                versions=[VersionSpan(version=3, tokens=len(tokens))],
            )
            yield join_group(request, {0: drawn}, max_new_tokens=sampling.max_new_tokens, version_in_use=3)

    async def abort(self) -> None:
        self.aborted.set()

    async def weight_version(self) -> int:
        return 3


def said(line: str) -> list[int]:
    return [*encode_all(TOKENIZER, [line])[0], 1]


def take_turns(
    *lines: str,
    begun: list[SampledResponse] | None = None,
    tools: list[dict[str, Any]] | None = None,
    max_new_tokens: int = 300,
    **settings: Any,
) -> tuple[SampledResponse, str, SayingEngine]:
    """Return the sample that the lines lead to, its text, and the engine."""
    loop = ToolLoopConfig(tools=[f"{PLACE}:{name}" for name in ("add", "fails", "sleeps_softly")], format="pythonic")
    for key, value in ({"show_tools": False} | settings).items():
        setattr(loop, key, value)
    config = RolloutConfig(agent="tool_loop", tool_loop=loop)
    engine = SayingEngine(lines)
    program = ToolLoop(AgentSpec(config=config, tokenizer=TOKENIZER))
    runner = AgentRunner(engine, program, config)  # type: ignore[arg-type]  # what a runner needs of an engine
    prompt = Prompt(row=0, text=PROMPT, tokens=said(PROMPT)[:-1], answer="3", source="made", tools=tools)
    request = GenerateRequest(group_id=0, prompt_tokens=prompt.tokens, num_samples=1, begun=begun or [])

    async def collect() -> list[GroupOutput]:
        sampling = SamplingConfig(max_new_tokens=max_new_tokens)
        return [output async for output in runner.generate([request], [prompt], sampling, seed=0)]

    ((output,),) = [asyncio.run(collect())]
    (response,) = output.responses
    text: Any = TOKENIZER.decode(response.tokens)
    return response, text, engine


def notes_of(response: SampledResponse) -> tuple[str, dict[str, float]]:
    assert response.notes is not None
    return response.notes.extra["last_turn"], response.notes.counts


def test_a_call_is_answered_and_the_answer_ends_the_sample() -> None:
    response, text, engine = take_turns("[add(x=1, y=2)]", "3")
    assert text == "[add(x=1, y=2)]<eos>3>3<eos>"
    assert engine.read == [PROMPT, PROMPT + "[add(x=1, y=2)]<eos>3>"]
    masked = "".join(str(TOKENIZER.decode([token])) for token, own in zip(response.tokens, response.mask) if not own)
    assert masked == "3>"
    assert response.log_probs == [-0.5 if own else 0.0 for own in response.mask]
    assert response.finish_reason is FinishReason.stop
    assert notes_of(response) == ("3", {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0})


def test_errors_are_text_for_the_model_which_may_try_again() -> None:
    response, text, _ = take_turns("[add(x='1')][", "[fails(why='x')]", "[nothing()]", "[add(1), add(2)]", "no")
    assert [part for part in text.split("<eos>") if part.startswith("error")] == [
        "error: the calls must be written [name(key=value), ...] with literal values>[fails(why='x')]",
        "error: LookupError: x>[nothing()]",
        "error: there is no tool 'nothing' (use add, fails, sleeps_softly)>[add(1), add(2)]",
    ]
    assert text.endswith("<eos>23>no<eos>")  # the template writes two answers one after the other
    assert notes_of(response) == ("no", {"turns": 5.0, "tool_calls": 5.0, "tool_errors": 3.0})


def test_the_last_turn_may_call_no_tool() -> None:
    response, text, engine = take_turns("[add(1)]", "[add(2)]", "3", max_turns=2)
    assert text == "[add(1)]<eos>2>[add(2)]<eos>" and len(engine.read) == 2
    assert response.finish_reason is FinishReason.length
    assert notes_of(response) == ("[add(2)]", {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0})


def test_tokens_that_run_out_end_a_sample_by_length_with_what_it_has() -> None:
    in_turn, text, _ = take_turns("[add(1)]", "34567", max_new_tokens=13)
    assert text == "[add(1)]<eos>2>34" and in_turn.finish_reason is FinishReason.length
    between, text, _ = take_turns("[add(1)]", "3", max_new_tokens=11)
    assert text == "[add(1)]<eos>" and between.finish_reason is FinishReason.length
    assert notes_of(between) == ("[add(1)]", {"turns": 1.0, "tool_calls": 1.0, "tool_errors": 0.0})


def test_a_call_that_is_cut_off_is_not_made() -> None:
    response, text, _ = take_turns("[add(1)]$")
    assert text == "[add(1)]" and response.finish_reason is FinishReason.length
    assert notes_of(response)[1]["tool_calls"] == 0


def test_time_that_runs_out_ends_a_sample_by_length_with_what_it_has() -> None:
    tool, text, _ = take_turns("[sleeps_softly(60.0)]", "3", timeout_s=0.1)
    assert text == "[sleeps_softly(60.0)]<eos>" and tool.finish_reason is FinishReason.length
    engine, text, _ = take_turns("[add(1)]", "3$$", timeout_s=0.1)
    assert text == "[add(1)]<eos>" and engine.finish_reason is FinishReason.length
    spent = SampledResponse(
        tokens=[], log_probs=[], finish_reason=FinishReason.abort, versions=[], turns=[], seconds=500.0
    )
    nothing, text, _ = take_turns("3", begun=[spent])
    assert text == "" and nothing.finish_reason is FinishReason.length and nothing.seconds >= 500


def test_a_slow_tool_is_given_up_and_long_answers_are_cut() -> None:
    _, text, _ = take_turns("[sleeps_softly(60.0)]", "3", tool_timeout_s=0.05, max_observation_tokens=9)
    assert text == "[sleeps_softly(60.0)]<eos>error: no>3<eos>"


def test_a_data_row_with_tools_of_its_own_has_only_those() -> None:
    only = [{"type": "function", "function": {"name": "fails"}}]
    _, text, _ = take_turns("[add(1)]", "3", tools=only)
    assert "error: there is no tool 'add' (use fails)>" in text
    _, text, _ = take_turns("[add(1)]", "3", tools=[])
    assert "error: there is no tool 'add' (use none)>" in text


@pytest.mark.parametrize("answer", ["2", "5"])
def test_an_interrupted_sample_goes_on_with_the_answers_that_the_model_has_read(answer: str) -> None:
    whole, text, _ = take_turns("[add(1)]", "3")
    assert whole.turns is not None
    record = said(f"[add(1)]<eos>{answer}>")[:-1]
    turns = [whole.turns[0], type(whole.turns[0])(observed=2, sampled=0, finish_reason=FinishReason.abort)]
    begun = SampledResponse(
        tokens=record,
        log_probs=[-0.5] * 9 + [0.0] * 2,
        finish_reason=FinishReason.abort,
        versions=[VersionSpan(version=2, tokens=9)],
        turns=turns,
    )
    response, text, engine = take_turns("3", begun=[begun])
    assert text == f"[add(1)]<eos>{answer}>3<eos>" and engine.read == [f"{PROMPT}[add(1)]<eos>{answer}>"]
    assert response.versions == [VersionSpan(version=2, tokens=9), VersionSpan(version=3, tokens=2)]
    assert notes_of(response) == ("3", {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0})
