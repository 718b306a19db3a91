"""`parity.json` of a record: the sequences whose log-probs differ most between engine and trainer, for reading.

Token ids, both log-probs of every response token, text, version, group and row. Numbers that are not finite are null.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megappo.batch.fields import select
from megappo.batch.stages import Experience
from megappo.config.run import RunConfig
from megappo.controller.comparison import ParityFinding

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


def worst_rows(finding: ParityFinding, config: RunConfig) -> list[int]:
    """Return the positions of the sequences to write down, worst first."""
    return finding.worst[: config.rollout.parity.dump]


def rows_with_tokens(finding: ParityFinding, config: RunConfig) -> list[int]:
    """Return those of them that fit into `rollout.parity.dump_tokens`; of the others no tokens are written."""
    left, whole = config.rollout.parity.dump_tokens, list[int]()
    for row in worst_rows(finding, config):
        length = finding.comparison.sequences[row].length
        if length <= left:
            whole.append(row)
            left -= length
    return whole


def parity_view(finding: ParityFinding, config: RunConfig, fetched: Experience, decode: Decode | None) -> str:
    """Return parity.json of a step.

    Args:
        fetched: the sequences of `rows_with_tokens`, perhaps with others, in any order.
    """
    comparison = finding.comparison
    about = {
        "step": comparison.step,
        "reasons": finding.reasons,
        "trainer_version": comparison.version,
        "mean": comparison.mean,
        "max": comparison.largest,
        "pearson_r": comparison.pearson_r,
        "compared_tokens": int(comparison.gaps.tokens.sum()),
        "model": config.model.path,
        "dtype": config.model.dtype.value,
        "engine": config.rollout.engine,
        "engine_dtype": config.rollout.weight_dtype(config.model).value,
        "temperature": config.rollout.sampling.temperature,
    }
    with_tokens = set(rows_with_tokens(finding, config))
    view = _View(fetched=fetched, decode=decode)
    sequences = [view.sequence(finding, row, with_tokens=row in with_tokens) for row in worst_rows(finding, config)]
    content = {key: _finite(value) for key, value in about.items()} | {"sequences": sequences}
    return json.dumps(content, allow_nan=False) + "\n"


@dataclass(kw_only=True, slots=True, frozen=True)
class _View:
    """Where tokens and their text come from."""

    fetched: Experience
    decode: Decode | None

    def sequence(self, finding: ParityFinding, row: int, *, with_tokens: bool) -> dict[str, Any]:  # Any: JSON
        """Return what is known of the sequence at a position of the step."""
        info = finding.comparison.sequences[row]
        known = {
            "sequence_id": info.sequence_id,
            "group_id": info.group_id,
            "row": info.row,
            "policy_version": info.policy_version,
            "finish_reason": info.finish_reason,
            "num_prompt_tokens": info.prompt_tokens,
            "num_response_tokens": info.response_tokens,
        }
        if not with_tokens:
            return known
        place = int(np.flatnonzero(self.fetched.sequence_ids == info.sequence_id)[0])
        return known | show_tokens(select(self.fetched, [place]), self.decode)


def show_tokens(sequence: Experience, decode: Decode | None) -> dict[str, Any]:  # Any: JSON
    """Return the tokens of one sequence and what both sides say of those it sampled: nothing of what a rollout program
    put between them."""
    assert sequence.old_log_probs is not None, "the monitor compares where old log-probs are"
    start = int(np.append(sequence.response_mask, True).argmax())
    mask = sequence.response_mask[start:]
    prompt, response = sequence.tokens[:start].tolist(), sequence.tokens[start:].tolist()
    rollout, training = (
        np.where(mask, values[start:], np.nan) for values in (sequence.rollout_log_probs, sequence.old_log_probs)
    )
    size = np.where(mask, np.nan_to_num(np.abs(rollout.astype(np.float64) - training), nan=np.inf), 0.0)
    return {
        "prompt": None if decode is None else decode(prompt),
        "response": None if decode is None else decode(response),
        "prompt_tokens": prompt,
        "response_tokens": response,
        "rollout_log_probs": _numbers(rollout),
        "training_log_probs": _numbers(training),
        "worst_token": int(size.argmax()) if len(size) else 0,
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Return float32 values as the shortest decimals that read back equal."""
    return [float(str(value)) if np.isfinite(value) else None for value in values]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
