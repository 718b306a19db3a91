"""What a code reward runs, and what each end means: from a response to programs, and from how they ended to verdicts.

The program is the last block of the response that is fenced as python or py, else the last block fenced without a
language, else, where there is no fence at all, all of the response. A block that is not closed is none.

Tests, as JSON text or as lists and objects:

- `{"inputs": [text, ...], "outputs": [text, ...]}` or `[{"input": text, "output": text}, ...]`: for each, the program
  is run with the input as standard input; what it prints is compared from the outside, line by line, without white
  space at the end of lines and without empty lines at the end.
- `["assert f(1) == 2", ...]`: Python texts, each run in a copy of what the program has defined. A text that is no JSON
  is one such test. The program is run once, with `__name__` set to "solution".

Asserts are judged by the process that runs the program. One that ends it early, or prints what a passed test would,
gains nothing; one that looks for the tests in memory, or returns objects that equal everything, can. Standard input
and output cannot be deceived in that way: prefer them where the task allows.
"""

import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megappo.errors import DataError
from megappo.rewards.sandbox.host import End, Ended, Program
from megappo.rewards.types import Sample, answer_of

_FENCE = re.compile(r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[^\n`]*\n(?P<text>.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)

_ASSERTS = """\
import json, os, sys

def run():
    given = json.loads(sys.stdin.read())
    report = os.dup(1)
    os.dup2(2, 1)

    def attempt(text, names):
        try:
            exec(compile(text, "solution.py", "exec", dont_inherit=True), names)
        except AssertionError:
            return "wrong"
        except MemoryError:
            return "memory"
        except BaseException:
            import traceback
            traceback.print_exc()
            return "error"
        return "passed"

    names = {"__name__": "solution"}
    verdict = attempt(given["program"], names)
    for test in given["tests"]:
        # A program that failed has no tests that pass; an assertion of its own is an error of it.
        failed = "error" if verdict == "wrong" else verdict
        found = attempt(test, dict(names)) if verdict == "passed" else failed
        os.write(report, (given["mark"] + " " + found + "\\n").encode())

run()
"""


class Verdict(StrEnum):
    """What became of one test."""

    passed = "passed"
    wrong = "wrong"
    """Another output, or an assertion that does not hold."""
    error = "error"
    """The program raised, or ended with an exit code other than 0 or by a signal."""
    timeout = "timeout"
    memory = "memory"
    output = "output"
    """More output than it may write."""


_OF_END = {End.time: Verdict.timeout, End.memory: Verdict.memory, End.output: Verdict.output}


@dataclass(kw_only=True, slots=True, frozen=True)
class InputCases:
    """Tests by standard input and output."""

    cases: Sequence[tuple[str, str]]
    """Input and expected output."""

    def programs(self, text: str) -> list[Program]:
        """Return what is to be run for a program."""
        return [Program(program=text, stdin=given) for given, _ in self.cases]

    def verdicts(self, ends: Sequence[Ended]) -> list[Verdict]:
        """Return what became of each test."""
        return [self._verdict(ended, expected) for ended, (_, expected) in zip(ends, self.cases, strict=True)]

    def _verdict(self, ended: Ended, expected: str) -> Verdict:
        if ended.end is not End.exited or ended.exit_code != 0:
            return _failure(ended)
        return Verdict.passed if _lines(ended.stdout) == _lines(expected) else Verdict.wrong


@dataclass(kw_only=True, slots=True, frozen=True)
class AssertCases:
    """Tests by Python texts that raise if they fail."""

    tests: Sequence[str]
    mark: str
    """Begins the lines that tell of tests, so that the program cannot print them; another one for each job."""

    def programs(self, text: str) -> list[Program]:
        """Return what is to be run for a program."""
        given = {"program": text, "tests": list(self.tests), "mark": self.mark}
        return [Program(program=_ASSERTS, stdin=json.dumps(given))]

    def verdicts(self, ends: Sequence[Ended]) -> list[Verdict]:
        """Return what became of each test. Those of which nothing was heard share the end of the process."""
        (ended,) = ends
        words = [line.split() for line in ended.stdout.splitlines()]
        told = [Verdict(line[1]) for line in words if len(line) == 2 and line[0] == self.mark][: len(self.tests)]
        return told + [_failure(ended)] * (len(self.tests) - len(told))


def find_program(response: str) -> str | None:
    """Return the program of a response; None: there is none."""
    if "```" not in response:
        return response if response.strip() else None
    blocks = [(match["language"].lower(), match["text"]) for match in _FENCE.finditer(response)]
    for languages in (("python", "py", "python3"), ("",)):
        found = [text for language, text in blocks if language in languages]
        if found:
            return found[-1]
    return None


def read_cases(sample: Sample, *, key: str | None) -> InputCases | AssertCases:
    """Return the tests of a row. Raises DataError when it has none, or not in one of the forms.

    Args:
        key: of `Sample.extra`; None: the tests are the answer.
    """
    where = "answer" if key is None else f"column {key}"
    given = answer_of(sample) if key is None else sample.extra.get(key)
    if isinstance(given, str):
        with contextlib.suppress(ValueError):  # Python text
            given = json.loads(given)
    cases = _cases(given)
    if cases is None:
        raise DataError(
            f"reward code: the {where} of a row of {sample.source or 'the data source'} holds no tests: {given!r:.200} "
            '(use {"inputs": [...], "outputs": [...]}, [{"input": ..., "output": ...}], or Python texts; '
            "params.tests_key names the column)"
        )
    return cases


def _cases(given: Any) -> InputCases | AssertCases | None:  # Any: decoded JSON
    if isinstance(given, str) and given.strip():
        return AssertCases(tests=[given], mark=secrets.token_hex(16))
    if isinstance(given, Mapping) and given.keys() >= {"inputs", "outputs"}:
        pairs = _pairs(given["inputs"], given["outputs"])
        return InputCases(cases=pairs) if pairs else None
    if not isinstance(given, list) or not given:
        return None
    if all(isinstance(test, str) and test.strip() for test in given):
        return AssertCases(tests=given, mark=secrets.token_hex(16))
    if all(isinstance(test, Mapping) and test.keys() >= {"input", "output"} for test in given):
        pairs = _pairs([test["input"] for test in given], [test["output"] for test in given])
        return InputCases(cases=pairs) if pairs else None
    return None


def _pairs(inputs: Any, outputs: Any) -> list[tuple[str, str]]:  # Any: decoded JSON
    """Return inputs and outputs as pairs; none where they are not lists of texts of one length."""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return []
    return list(zip(inputs, outputs)) if all(isinstance(text, str) for text in [*inputs, *outputs]) else []


def _failure(ended: Ended) -> Verdict:
    if ended.end in _OF_END:
        return _OF_END[ended.end]
    # Python tells of the limit on its address space by an exception.
    last = ended.stderr.rstrip().rpartition("\n")[2]
    return Verdict.memory if last.startswith("MemoryError") else Verdict.error


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
