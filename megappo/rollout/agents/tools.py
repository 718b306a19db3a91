"""Tools: typed python functions that a model may call. Whatever happens in a call becomes text for the model.

A tool runs in the process beside the engine, in a thread of its own (an `async def` one on its event loop), with that
process's rights. It is trusted code; what executes code that the model has written must bring its own sandbox.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from megappo.errors import DataError
from megappo.registry import Registry

_FUNCTIONS: Registry[Callable[..., Any]] = Registry("tool")  # Any: whatever a tool returns
"""Without entries: tools are named `package.module:function`."""

_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    # Any: decoded arguments.
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    positional: list[Any] = field(default_factory=list[Any])
    problem: str | None = None
    """Why it cannot be read; the model is told."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolAnswer:
    """What the model is shown of a call."""

    name: str
    text: str
    failed: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class Tool:
    """A function, and how it is shown."""

    name: str
    function: Callable[..., Any]
    # Any: JSON.
    schema: dict[str, Any]

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolAnswer:
        """Run the function; an error, a wrong argument or an answer that is too late becomes text."""
        try:
            arguments = self._arguments(call)
        except _WrongArguments as error:
            return _failed(self.name, str(error))
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self.function):
                    value = await self.function(**arguments)
                else:
                    value = await _in_thread(self.function, arguments)
            return ToolAnswer(name=self.name, text=_as_text(value))
        except Exception as error:  # the tool's own code: the model is told
            if limit.expired():
                return _failed(self.name, f"no answer within {timeout_s:g} s")
            return _failed(self.name, f"{type(error).__name__}: {error}")

    def _arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments by name."""
        try:
            bound = inspect.signature(self.function).bind(*call.positional, **call.arguments)
        except TypeError as error:
            raise _WrongArguments(f"{self.name}: {error}") from error
        declared = self.schema["function"]["parameters"]["properties"]
        for name, value in bound.arguments.items():
            _check_type(name, value, declared.get(name, {}))
        return dict(bound.arguments)


class _WrongArguments(Exception):
    """What is wrong with the arguments of a call."""


def _check_type(name: str, value: Any, declared: Mapping[str, Any]) -> None:
    """Raise _WrongArguments for a plain value of another type than the schema has."""
    kinds = declared.get("type")
    expected = _JSON_TYPES.get(kinds) if isinstance(kinds, str) else None
    if expected is None or (value is None and declared.get("nullable")):
        return
    if not isinstance(value, expected) or (isinstance(value, bool) and kinds != "boolean"):
        raise _WrongArguments(f"{name}={json.dumps(value, default=str)} must be of type {kinds}")
    if "enum" in declared and value not in declared["enum"]:
        raise _WrongArguments(f"{name}={json.dumps(value, default=str)} must be one of {declared['enum']}")


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run a function in a thread of its own: one that hangs neither takes the place of others nor keeps the process
    from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if done.done():
            return  # too late
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = function(**arguments)
        except Exception as error:
            failure = error
        except BaseException as error:  # exit() of a tool ends no other thread, and must not end its answer either
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        if isinstance(failure, StopIteration):  # a future refuses it
            failure = RuntimeError("StopIteration")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()
    return await done


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _failed(name: str, what: str) -> ToolAnswer:
    return ToolAnswer(name=name, text=f"error: {what}", failed=True)


async def answer_call(call: ToolCall, tools: Mapping[str, Tool], *, timeout_s: float) -> ToolAnswer:
    """Return what the model is shown of a call."""
    if call.problem is not None:
        return _failed(call.name, call.problem)
    tool = tools.get(call.name)
    if tool is None:
        return _failed(call.name, f"there is no tool {call.name!r} (use {', '.join(tools) or 'none'})")
    return await tool.call(call, timeout_s=timeout_s)


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """Import the functions of `rollout.tool_loop.tools`; returns them by the name that the model calls.

    Raises:
        DataError: a function has no type hint or no description for a parameter, or two have one name.
        RegistryError: there is no such function.
    """
    tools: dict[str, Tool] = {}
    for path in paths:
        function = _FUNCTIONS.get(path)
        try:
            schema = get_json_schema(function)
        except (TypeHintParsingException, DocstringParsingException, TypeError, AttributeError) as error:
            raise DataError(
                f"rollout.tool_loop.tools: {path} cannot be shown to a model: {error} (give every parameter a type and "
                "a line under 'Args:' in the docstring)"
            ) from error
        name = schema["function"]["name"]
        if name in tools:
            raise DataError(f"rollout.tool_loop.tools: {path} is the second tool called {name} (rename one)")
        tools[name] = Tool(name=name, function=function, schema=schema)
    return tools
