"""Writes docs/algorithms.md from the docstrings: `python -m megappo.algo.document docs/algorithms.md`.

Each documented function or class has the lines `Formula:`, `Source:`, `Config:` and `Use:` in its docstring.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from megappo.algo.advantages import ESTIMATORS, Estimator
from megappo.algo.advantages.base import spread_over_tokens
from megappo.algo.aggregation import compute_loss_weights
from megappo.algo.correction import compute_kept, compute_weights
from megappo.algo.dynamic_sampling import decide_sampling
from megappo.algo.kl import KL_ESTIMATORS, KLCoefficient
from megappo.algo.losses import POLICY_LOSSES, PolicyLoss, compute_value_loss
from megappo.algo.token_rewards import compute_overlong_penalty
from megappo.config.algorithm import OldLogProbs

LABELS = ("Formula", "Source", "Config", "Use")

_HEADER = """# Algorithms

Every estimator, loss, KL form and correction: formula, source, configuration, when to use it. Made from the
docstrings by `python -m megappo.algo.document docs/algorithms.md`; do not edit.

Config keys are those of the `algorithm` section of a run; `algorithm=NAME` chooses a preset of `configs/algorithm/`.
`megappo inspect algorithm CASE.json` computes any of them on your own numbers.

lp, lp_old, lp_ref: log-prob of the sampled token under the policy, before the update, under the reference; A: its
advantage; r = exp(clamp(lp - lp_old, -20, 20)). Response tokens are those that the policy sampled; prompt, tool and
observation tokens take no part in anything. Loss tokens are the response tokens that truncation and rejection leave.
"""


def algorithms_page() -> str:
    """Return the page as Markdown."""
    sections = [
        ("Advantage estimators", "`advantage.name`", {name: _estimator(name) for name in ESTIMATORS.names()}),
        ("Policy losses", "`policy_loss.name`", {name: _loss(name) for name in POLICY_LOSSES.names()}),
        ("Log-probs before the update", "`old_log_probs`", {"old_log_probs": OldLogProbs}),
        ("Value loss", "", {"value_loss": compute_value_loss}),
        ("Aggregation", "`policy_loss.aggregation`", {"aggregation": compute_loss_weights}),
        ("KL to the reference", "`kl.in_reward` and `kl.in_loss`", {**KL_ESTIMATORS, "kl.in_reward": KLCoefficient}),
        (
            "Rollout correction",
            "`correction`",
            {"correction.weight": compute_weights, "correction.reject": compute_kept},
        ),
        (
            "Sampling control and length",
            "`sampling` and `overlong`",
            {"sampling": decide_sampling, "overlong": compute_overlong_penalty},
        ),
    ]
    return "\n".join([_HEADER, *(_section(*section) for section in sections)])


def describe(documented: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """Return the summary and the labelled lines of a docstring."""
    paragraphs = (inspect.getdoc(documented) or "").split("\n\n")
    labelled: dict[str, str] = {}
    label = ""
    for line in "\n".join(paragraphs[1:]).splitlines():
        found = re.match(rf"({'|'.join(LABELS)}): (.*)", line)
        if found:
            label = found[1]
            labelled[label] = found[2]
        elif line.startswith("    ") and label:
            labelled[label] += " " + line.strip()
        else:
            label = ""
    return " ".join(paragraphs[0].split()), labelled


def _estimator(name: str) -> Callable[..., object]:
    entry = ESTIMATORS.get(name)
    assert isinstance(entry, Estimator)
    spread = entry.token_stage is spread_over_tokens and entry.sequence_stage is not None
    return entry.sequence_stage if spread and entry.sequence_stage is not None else entry.token_stage


def _loss(name: str) -> Callable[..., object]:
    entry = POLICY_LOSSES.get(name)
    assert isinstance(entry, PolicyLoss)
    return entry.function


def _section(title: str, key: str, entries: Mapping[str, Callable[..., object]]) -> str:
    lines = [f"## {title}", ""]
    if key:
        lines += [f"Configured by {key}.", ""]
    for name, documented in entries.items():
        summary, labelled = describe(documented)
        lines += [f"### {name}", "", summary, ""]
        lines += [f"- **{label}**: {labelled[label]}" for label in LABELS if label in labelled]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(algorithms_page(), encoding="utf-8")
