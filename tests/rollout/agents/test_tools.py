"""Tools: what a model is told of them, and of whatever goes wrong in a call."""

import asyncio
import threading
from typing import Any

import pytest

from megappo.config.data import SourceConfig
from megappo.errors import MegappoError
from megappo.rollout.agents.calculator import calc, demonstrations, problems
from megappo.rollout.agents.tool_formats import TOOL_FORMATS, hermes, json_call, pythonic
from megappo.rollout.agents.tools import ToolAnswer, ToolCall, answer_call, load_tools

PLACE = "tests.rollout.agents.sample_tools"
TOOLS = load_tools([f"{PLACE}:{name}" for name in ("add", "look_up", "fails", "sleeps", "sleeps_softly")])


def answer(name: str, *positional: Any, timeout_s: float = 5.0, **arguments: Any) -> ToolAnswer:
    call = ToolCall(name=name, positional=list(positional), arguments=arguments)
    return asyncio.run(answer_call(call, TOOLS, timeout_s=timeout_s))


def test_a_schema_comes_from_signature_and_docstring() -> None:
    assert TOOLS["add"].schema["function"]["name"] == "add"
    assert TOOLS["add"].schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "description": "one"},
            "y": {"type": "integer", "description": "the other"},
        },
        "required": ["x"],
    }


def test_what_a_tool_returns_is_shown_as_text() -> None:
    assert answer("add", x=2, y=3) == ToolAnswer(name="add", text="5")
    assert answer("add", 2) == ToolAnswer(name="add", text="3")
    assert answer("look_up", word="\u00e4") == ToolAnswer(name="look_up", text='{"word": "\u00e4", "kind": "short"}')
    assert answer("sleeps", seconds=0).text == "awake"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ad", {}, "there is no tool 'ad' (use add, look_up, fails, sleeps, sleeps_softly)"),
        ("add", {}, "add: missing a required argument: 'x'"),
        ("add", {"x": 1, "z": 2}, "add: got an unexpected keyword argument 'z'"),
        ("add", {"x": "1"}, 'x="1" must be of type integer'),
        ("add", {"x": True}, "x=true must be of type integer"),
        ("add", {"x": 1.5}, "x=1.5 must be of type integer"),
        ("add", {"x": None}, "x=null must be of type integer"),
        ("look_up", {"word": "a", "kind": "wide"}, "kind=\"wide\" must be one of ['short', 'long']"),
        ("fails", {"why": "no reason"}, "LookupError: no reason"),
        ("fails", {"why": "exit"}, "RuntimeError: SystemExit: 3"),
        ("fails", {"why": "stop"}, "RuntimeError: StopIteration"),
    ],
)
def test_whatever_goes_wrong_becomes_text(name: str, arguments: dict[str, Any], message: str) -> None:
    assert answer(name, **arguments) == ToolAnswer(name=name, text=f"error: {message}", failed=True)


def test_a_call_that_cannot_be_read_is_told_of() -> None:
    call = ToolCall(name="", problem="the call is not valid JSON")
    assert asyncio.run(answer_call(call, TOOLS, timeout_s=1.0)).text == "error: the call is not valid JSON"


@pytest.mark.parametrize("name", ["sleeps", "sleeps_softly"])
def test_a_tool_that_takes_too_long_is_given_up(name: str) -> None:
    # A minute, for which nobody waits: neither this call nor the end of the process.
    assert answer(name, seconds=60.0, timeout_s=0.05).text == "error: no answer within 0.05 s"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool sleeps")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["add"], "unknown"),
        ([f"{PLACE}:none"], "cannot be imported"),
        ([f"{PLACE}:untyped"], "cannot be shown to a model: .*missing a type hint.*give every parameter a type"),
        ([f"{PLACE}:undescribed"], "cannot be shown to a model: .*no description for the argument 'x'"),
        ([f"{PLACE}:CALLS"], "cannot be shown to a model"),
        ([f"{PLACE}:add", f"{PLACE}:other_add"], "is the second tool called add"),
    ],
)
def test_functions_that_are_no_tools_are_refused(paths: list[str], message: str) -> None:
    with pytest.raises(MegappoError, match=message):
        load_tools(paths)


CALL = ToolCall(name="add", arguments={"x": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the answer is 3", []),
        ('<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', [CALL]),
        ('so <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call> and <tool_call>{"name": "f"}', None),
        ("<tool_call>add(1)</tool_call>", "the call is not valid JSON: "),
        ("<tool_call>[1]</tool_call>", 'the call must be {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "the call must be"),
        ("<tool_call>" + "[" * 100_000, "the call is not valid JSON"),
    ],
)
def test_hermes_calls_are_read(text: str, expected: list[ToolCall] | str | None) -> None:
    check(hermes(text), expected, [CALL, ToolCall(name="f")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"x": 1}', []),
        ('the answer: {"name": "add"}', []),
        ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', [CALL]),
        ('{"name": "add", "parameters": {"x": 1}', "the call is not valid JSON"),
        ('{"name": 3, "parameters": {}}', 'the call must be {"name": ..., "parameters": {...}}'),
    ],
)
def test_a_turn_of_json_is_read(text: str, expected: list[ToolCall] | str) -> None:
    check(json_call(text), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", []),
        ("see [add(x=1)]", []),
        (" [add(x=1)]\n", [CALL]),
        ("[add(x=1), f()]", None),
        ("[add(x=1)", "the calls must be written [name(key=value), ...]"),
        ("[add(x=open('y'))]", "the calls must be written"),
        ("[add(**{'x': 1})]", "the calls must be written"),
        ("[a.b(x=1)]", "the calls must be written"),
        ("[add(x=1)] + [2]", "the calls must be written"),
        ("[add(x=" + "(" * 10_000, "the calls must be written"),
    ],
)
def test_pythonic_calls_are_read(text: str, expected: list[ToolCall] | str | None) -> None:
    check(pythonic(text), expected, [CALL, ToolCall(name="f")])
    assert pythonic("[add(1, [2, 'a'])]") == [ToolCall(name="add", positional=[1, [2, "a"]])]


def check(found: list[ToolCall], expected: list[ToolCall] | str | None, both: list[ToolCall] | None = None) -> None:
    """Compare the calls of a text, or the problem of its only one."""
    if not isinstance(expected, str):
        assert found == (both if expected is None else expected)
        return
    (call,) = found
    assert call.problem is not None and call.problem.startswith(expected)


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
@pytest.mark.parametrize("text", ["", "\x00", "{}", "[]", "[(", "{{{", '{"name"', "<tool_call>", "[a(", "\u2028[f(1)]"])
def test_no_text_breaks_a_format(name: str, text: str) -> None:
    assert all(isinstance(call, ToolCall) for call in TOOL_FORMATS.get(name)(text))


def test_the_calculator_works_out_sums_and_nothing_else() -> None:
    assert calc("12+3*(4-9)--2") == -1
    for wrong in ("1/2", "2**3", "x", "abs(-1)", "1.5", "True", "'a'*3", "1+", "9" * 65, "[1]"):
        with pytest.raises(ValueError):
            calc(wrong)


def test_every_fourth_demonstration_asks_the_calculator_and_all_end_with_the_answer() -> None:
    rows, sums = list(demonstrations(SourceConfig(size=6, seed=3))), list(problems(SourceConfig(size=9, seed=3)))
    for row, problem in zip(rows, sums):
        assert isinstance(row.question, list) and problem.answer == str(calc(str(problem.question)))
        assert row.question[0]["content"] == problem.question and row.question[-1]["content"] == problem.answer
        asked = [pythonic(str(message["content"])) for message in row.question[1:-1]][:1]
        expected = ToolCall(name="calc", positional=[problem.question])
        assert asked == ([[expected]] if row.row % 4 == 0 else [])
