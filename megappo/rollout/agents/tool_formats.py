"""How calls of tools stand in the text of a model. A format is a function from the text of one turn to its calls; none
means that the turn is the answer. What looks like a call and cannot be read is one with a problem, of which the model
is told.

To add one: write the function and register it here, or name it `package.module:function`.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any, cast

from megappo.registry import Registry
from megappo.rollout.agents.tools import ToolCall

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def hermes(text: str) -> list[ToolCall]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen)."""
    return [_from_json(inside, "arguments") for inside in _HERMES.findall(text)]


def json_call(text: str) -> list[ToolCall]:
    """Read a turn that is `{"name": ..., "parameters": {...}}` and nothing else (Llama 3.1)."""
    inside = text.strip().removeprefix("<|python_tag|>").strip()
    if not (inside.startswith("{") and '"name"' in inside):
        return []
    return [_from_json(inside, "parameters", "arguments")]


def pythonic(text: str) -> list[ToolCall]:
    """Read a turn that is `[name(key=value), ...]` with literal values and nothing else (Llama 3.2, Llama 4)."""
    inside = text.strip()
    if not _PYTHONIC.match(inside):
        return []
    try:
        parsed = ast.parse(inside, mode="eval").body
        assert isinstance(parsed, ast.List)
        return [_from_syntax(element) for element in parsed.elts]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return [ToolCall(name="", problem="the calls must be written [name(key=value), ...] with literal values")]


def _from_json(text: str, *keys: str) -> ToolCall:
    """Return the call of a JSON object with the arguments under the first of `keys` that it has."""
    try:
        # Any: decoded JSON.
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", problem=f"the call is not valid JSON: {error}")
    fields = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    name = fields.get("name")
    arguments = next((fields[key] for key in keys if key in fields), {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        form = f'{{"name": ..., "{keys[0]}": {{...}}}}'
        return ToolCall(name=name if isinstance(name, str) else "", problem=f"the call must be {form}")
    return ToolCall(name=name, arguments=cast(dict[str, Any], arguments))


def _from_syntax(element: ast.expr) -> ToolCall:
    """Return the call of one element. Raises ValueError for what is not a call with literal arguments."""
    if not isinstance(element, ast.Call) or not isinstance(element.func, ast.Name):
        raise ValueError("not a call")
    if any(keyword.arg is None for keyword in element.keywords):
        raise ValueError("** in a call")
    return ToolCall(
        name=element.func.id,
        positional=[ast.literal_eval(value) for value in element.args],
        arguments={str(keyword.arg): ast.literal_eval(keyword.value) for keyword in element.keywords},
    )


TOOL_FORMATS: Registry[Callable[[str], list[ToolCall]]] = Registry("tool format")
TOOL_FORMATS.register("hermes", hermes)
TOOL_FORMATS.register("json", json_call)
TOOL_FORMATS.register("pythonic", pythonic)
