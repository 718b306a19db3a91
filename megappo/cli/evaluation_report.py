"""What people read of an evaluation: a line, tables, JSON, and the answers themselves."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megappo.cli.evaluation_pairs import Difference
from megappo.config.validation import ValidationConfig, statistic_names
from megappo.controller.judge import Answer, AnsweredPrompt, AnsweredSet, GroupReport, SetReport, Statistic
from megappo.observability.console import RunConsole
from megappo.observability.run_directory import write_file


def heading_of(name: str, validation: ValidationConfig) -> str:
    """Return how people call a statistic: `mean@8`, `pass@4`."""
    if name.startswith("pass_at_"):
        return name.replace("pass_at_", "pass@")
    return f"{name}@{validation.samples_per_prompt}"


def _shown(statistic: Statistic | None) -> str:
    """Return a statistic with its interval."""
    if statistic is None:
        return "-"
    ends = _ends(statistic)
    return f"{statistic.value:.3f} ({ends})" if ends else f"{statistic.value:.3f}"


def line_of(report: SetReport, validation: ValidationConfig) -> str:
    """Return one line about a set."""
    name = f"{report.name}: " if report.name else ""
    found = [
        f"{heading_of(statistic, validation)} {_shown(report.whole.statistics.get(statistic))}"
        for statistic in statistic_names(validation)
    ]
    failed = f", {report.whole.failed} rewards failed" if report.whole.failed else ""
    return name + ", ".join(found) + failed


def print_tables(console: RunConsole, reports: Sequence[SetReport], validation: ValidationConfig) -> None:
    """Print a table of each set: its sources, then all of it."""
    for report in reports:
        groups = report.sources | {"all" if report.sources else report.name or "validation": report.whole}
        console.grid(
            f"Validation set {report.name}" if report.name else "Validation",
            ["source", "", "value", f"{validation.confidence:.0%} interval", "of"],
            [row for name, group in groups.items() for row in _rows(name, group, validation)],
        )


def print_differences(
    console: RunConsole, differences: Sequence[Difference], validation: ValidationConfig, *, title: str
) -> None:
    """Print a table of what this evaluation is better by; nothing where it was compared with none."""
    if differences:
        rows = [
            (
                one.set_name or "validation",
                heading_of(one.statistic, validation),
                f"{one.value:+.3f}",
                "" if one.interval is None else "{:+.3f} to {:+.3f}".format(*one.interval),
                f"{one.prompts} prompts",
            )
            for one in differences
        ]
        console.grid(title, ["set", "", "difference", f"{validation.confidence:.0%} interval", "of"], rows)


# Any: JSON.
def difference_facts(differences: Sequence[Difference]) -> dict[str, dict[str, Any]]:
    """Return the same as JSON holds it: by set, then by statistic."""
    facts: dict[str, dict[str, Any]] = {}
    for one in differences:
        interval = None if one.interval is None else list(one.interval)
        of_set = facts.setdefault(one.set_name or "validation", {})
        of_set[one.statistic] = {"value": one.value, "interval": interval, "prompts": one.prompts}
    return facts


def _rows(name: str, group: GroupReport, validation: ValidationConfig) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the lines of one source; its name is in the first."""
    for statistic in statistic_names(validation):
        found = group.statistics.get(statistic)
        value = "-" if found is None else f"{found.value:.3f}"
        prompts = 0 if found is None else found.prompts
        yield name, heading_of(statistic, validation), value, _ends(found), f"{prompts} prompts"
        name = ""
    tokens, count = group.response_tokens, len(group.response_tokens)
    answers = f"{count} answers"
    if count:
        yield "", "response tokens", f"{tokens.mean():.1f}", f"at most {tokens.max()}", answers
        yield "", "truncated", f"{group.truncated / count:.1%}", "", answers
    if group.failed:
        yield "", "failed rewards", str(group.failed), "", f"{count + group.failed} answers"


def _ends(statistic: Statistic | None) -> str:
    if statistic is None or statistic.interval is None:
        return ""
    return "{:.3f} to {:.3f}".format(*statistic.interval)


# Any: JSON.
def facts_of(reports: Sequence[SetReport]) -> dict[str, Any]:
    """Return everything that the tables show, and the parts of the reward, as JSON holds it: by set, then by source."""
    return {
        report.name or "validation": _facts(report.whole)
        | {"sources": {name: _facts(group) for name, group in report.sources.items()}}
        for report in reports
    }


# Any: JSON.
def _facts(group: GroupReport) -> dict[str, Any]:
    tokens, count = group.response_tokens, len(group.response_tokens)
    return {
        "prompts": group.prompts,
        "answers": count,
        "failed_rewards": group.failed,
        "reward": {
            name: {
                "value": statistic.value,
                "interval": None if statistic.interval is None else list(statistic.interval),
                "prompts": statistic.prompts,
            }
            for name, statistic in group.statistics.items()
        },
        "parts": {name: sum(found) / len(found) for name, found in group.parts.items()},
        "response_tokens": {"mean": float(tokens.mean()), "max": int(tokens.max())} if count else None,
        "truncated_ratio": group.truncated / count if count else None,
    }


def write_generations(path: Path, answered: Sequence[AnsweredSet]) -> None:
    """Write every answer as a line of JSON; the file appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.writing")
    lines = (json.dumps(line) + "\n" for line in generation_lines(answered))
    write_file(aside, lambda file: file.writelines(line.encode() for line in lines))
    aside.replace(path)


# Any: JSON.
def generation_lines(answered: Sequence[AnsweredSet]) -> Iterator[dict[str, Any]]:
    """Yield the answers, prompt by prompt; those whose reward failed have no score."""
    for one in answered:
        for prompt in one.prompts:
            for answer in sorted([*prompt.answers, *prompt.failed], key=lambda answer: answer.info.sequence_id):
                yield {"set": one.name} | _line(prompt, answer)


# Any: JSON.
def _line(prompt: AnsweredPrompt, answer: Answer) -> dict[str, Any]:
    info, reward, sample = answer.info, answer.reward, answer.sample
    return {
        "source": prompt.prompt.source,
        "row": info.row,
        "prompt": prompt.prompt.text,
        "response": None if sample is None else sample.response,
        "answer": prompt.prompt.answer,
        "score": None if math.isnan(reward.score) else reward.score,
        "parts": reward.parts,
        "extracted": reward.extracted,
        "failure": reward.failure,
        "finish_reason": info.finish_reason,
        "response_tokens": info.response_tokens,
    }
