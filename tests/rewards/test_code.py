import asyncio
import json

import pytest

from megappo.errors import DataError
from megappo.rewards import Reward, Sample
from megappo.rewards.code import CodeReward
from megappo.rewards.code_cases import find_program
from tests.rewards.sandboxed import skip_without_sandbox

ENDS = ["passed", "wrong", "error", "timeout", "memory", "output"]
NEXT = json.dumps({"inputs": ["1", "2\n"], "outputs": ["2", "3\n"]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab', add"])


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    skip_without_sandbox()


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(time_s=30.0, total_s=100.0, memory_mb=256)


def score(reward: CodeReward, program: str, tests: str | None = NEXT) -> tuple[float, dict[str, float]]:
    result = asyncio.run(reward(Sample(prompt="", response=f"```python\n{program}\n```", answer=tests)))
    assert list(result.parts) == ["program", *ENDS]
    assert result.parts["program"] == 1.0
    return result.score, {name: share for name, share in result.parts.items() if share and name != "program"}


BY_INPUT = [
    ("print(int(input()) + 1)", 1.0, {"passed": 1.0}),
    ("print(str(int(input()) + 1) + '  \\n\\n')", 1.0, {"passed": 1.0}),
    ("print(2)", 0.0, {"passed": 0.5, "wrong": 0.5}),
    ("print('', int(input()) + 1)", 0.0, {"wrong": 1.0}),
    ("print(int(input()) + 1); exit(1)", 0.0, {"error": 1.0}),
    ("print(1 / 0)", 0.0, {"error": 1.0}),
    ("print(", 0.0, {"error": 1.0}),
    ("held = bytearray(1 << 30)", 0.0, {"memory": 1.0}),
    ("while True: print('x' * 1000)", 0.0, {"output": 1.0}),
    ("import os; os.kill(os.getpid(), 11)", 0.0, {"error": 1.0}),
]


def test_each_input_is_judged_by_what_is_printed(reward):
    for program, expected, parts in BY_INPUT:
        assert score(reward, program) == (expected, parts), program


BY_ASSERT = [
    ("def add(a, b): return a + b", 1.0, {"passed": 1.0}),
    ("def add(a, b): return a + b\nif __name__ == '__main__': 1 / 0", 1.0, {"passed": 1.0}),
    ("def add(a, b):\n    print('x')\n    return 3", 0.0, {"passed": 0.5, "wrong": 0.5}),
    ("def add(a, b): return 1 / 0", 0.0, {"error": 1.0}),
    ("add = 3", 0.0, {"error": 1.0}),
    ("def add(a, b)", 0.0, {"error": 1.0}),
    ("assert False", 0.0, {"error": 1.0}),
    ("def add(a, b): return bytearray(1 << 30)", 0.0, {"memory": 1.0}),
    ("def add(a, b):\n    while True: print('x' * 1000)", 0.0, {"output": 1.0}),
    # Ends before the tests do.
    ("exit(0)", 0.0, {"error": 1.0}),
    ("import os; os._exit(0)", 0.0, {"error": 1.0}),
    ("import os\ndef add(a, b):\n    if a == 1: return 3\n    os._exit(0)", 0.0, {"passed": 0.5, "error": 0.5}),
    # Says that it passed.
    (
        "import os\nfor n in range(9):\n    try: os.write(n, b'passed\\n' * 9)\n    except OSError: pass",
        0.0,
        {"error": 1.0},
    ),
]


def test_each_assertion_is_judged(reward):
    for program, expected, parts in BY_ASSERT:
        assert score(reward, program, ASSERTS) == (expected, parts), program


def test_time_is_told_apart():
    quick = CodeReward(time_s=2.0, total_s=2.5)
    assert score(quick, "while True: pass") == (0.0, {"timeout": 1.0})
    once = "def add(a, b):\n    if a == 'a':\n        while True: pass\n    return 3"
    assert score(quick, once, ASSERTS) == (0.0, {"passed": 0.5, "timeout": 0.5})


def test_the_share_of_tests_is_scored_when_asked_for():
    assert score(CodeReward(partial=True), "print(2)")[0] == 0.5


def test_a_response_without_program_scores_0(reward):
    for response in ("", " \n", "```\nno end", "```bash\nls\n```"):
        result = asyncio.run(reward(Sample(prompt="", response=response, answer=NEXT)))
        assert result == Reward(score=0.0, parts=dict.fromkeys(["program", *ENDS], 0.0))


PROGRAMS = [
    ("a = 1", "a = 1"),
    ("so:\n```python\na = 1\n```\nand\n```py\nb = 2\n```\ndone", "b = 2\n"),
    ("```Python\na = 1\n```\n```\noutput\n```", "a = 1\n"),
    ("```\na = 1\n```", "a = 1\n"),
    ("```python title=x\na = 1\n```", "a = 1\n"),
    ("  ```python\n  a = 1\n  ```", "  a = 1\n"),
    ("```python\na = '```'\n```", "a = '```'\n"),
    ("```python\na = 1\n```\n```python\nb = 2", "a = 1\n"),
    ("```python\na = 1", None),
    ("```rust\nfn main() {}\n```", None),
    ("", None),
]


@pytest.mark.parametrize(("response", "program"), PROGRAMS)
def test_the_last_python_block_is_the_program(response, program):
    assert find_program(response) == program


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1", "output": "2"}, {"input": "2", "output": "3"}],
        {"inputs": ["1", "2"], "outputs": ["2", "3"]},
        json.dumps([{"input": "1", "output": "2"}]),
    ],
)
def test_tests_may_be_a_column_of_the_row(tests):
    reward = CodeReward(tests_key="cases")
    sample = Sample(prompt="", response="print(int(input()) + 1)", answer=None, extra={"cases": tests})
    assert asyncio.run(reward(sample)).score == 1.0


def test_a_text_that_is_no_json_is_one_test(reward):
    check = "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)"
    assert score(reward, "def add(a, b): return a + b", check) == (1.0, {"passed": 1.0})
    assert score(reward, "def add(a, b): return a - b", check) == (0.0, {"wrong": 1.0})


NO_TESTS = [
    "",
    "[]",
    "{}",
    "42",
    "null",
    '{"inputs": ["1"], "outputs": []}',
    '{"inputs": [1], "outputs": [2]}',
    '["", "a"]',
]


@pytest.mark.parametrize("answer", [*NO_TESTS, None])
def test_a_row_without_tests_is_an_error(reward, answer):
    with pytest.raises(DataError, match=r"no answer|holds no tests"):
        asyncio.run(reward(Sample(prompt="", response="a", answer=answer)))


@pytest.mark.parametrize(
    "params",
    [
        {"memory_mb": 1},
        {"time_s": 0},
        {"time_s": 9.0, "total_s": 8.0},
        {"processes": 1},
        {"partial": 1},
        {"disk_mb": 0},
    ],
)
def test_wrong_parameters_are_refused(params):
    with pytest.raises(DataError, match=r"params\."):
        CodeReward(**params)
