"""An example of tools: a calculator, sums that a small model cannot do in its head, and what it starts from.

`megappo sft experiment=calculator_start` teaches a small model to spell calls and to guess; `megappo train
experiment=calculator` is then about when to use the tool, and about copying without a mistake (docs/agents.md).
"""

import ast
import operator
import random
from collections.abc import Callable, Iterator

from megappo.config.data import SourceConfig
from megappo.data.types import Message, Row

DEFAULT_SIZE = 1000
"""Rows made when `size` is not set."""
_LONGEST = 64
"""Characters of a sum."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calc(expression: str) -> int:
    """Work out a sum of whole numbers.

    Args:
        expression: whole numbers with +, - and * between them, and parentheses

    Returns:
        The result.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} characters")
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except SyntaxError:
        raise ValueError("not a sum") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, -, * and parentheses")


def problems(config: SourceConfig) -> Iterator[Row]:
    """Yield sums of two or three numbers below 100 and what they come to, `size` of them by `seed`. The first rows are
    the same whatever the size."""
    numbers = random.Random(config.seed)
    for row in range(DEFAULT_SIZE if config.size is None else config.size):
        terms = [str(numbers.randrange(2, 100)) for _ in range(numbers.choice((2, 3)))]
        question = terms[0] + "".join(numbers.choice("+-*") + term for term in terms[1:])
        yield Row(row=row, question=question, answer=str(calc(question)), source="calculator")


def demonstrations(config: SourceConfig) -> Iterator[Row]:
    """Yield conversations about the same sums: in every fourth one the assistant asks the calculator, in the others it
    answers at once."""
    for problem in problems(config):
        asks: list[Message] = [
            {"role": "assistant", "content": f'[calc("{problem.question}")]'},
            {"role": "tool", "content": problem.answer},
        ]
        messages: list[Message] = [
            {"role": "user", "content": problem.question},
            *(asks if problem.row % 4 == 0 else []),
            {"role": "assistant", "content": problem.answer},
        ]
        yield Row(row=problem.row, question=messages, answer=None, source="calculator")
