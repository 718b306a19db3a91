"""Files of sequences whose log-probs differ most between engine and trainer: `<run>/parity/step_000012.json`.

A file holds what a replay needs: token ids, both log-probs of every response token, version, group and row. Numbers
that are not finite become null.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megappo.algo.diagnostics import SequenceGaps
from megappo.batch.fields import select
from megappo.batch.stages import Experience
from megappo.controller.ports import SequenceInfo
from megappo.observability.run_directory import write_atomically


def describe_sequence(info: SequenceInfo, gaps: SequenceGaps, row: int) -> str:
    """Return one sequence and its difference in words."""
    tokens = int(gaps.tokens[row])
    return (
        f"sequence {info.sequence_id} (group {info.group_id}, row {info.row}, version {info.policy_version}): mean "
        f"{gaps.total[row] / tokens:.3g}, max {gaps.largest[row]:.3g} nats over {tokens} tokens"
    )


def write_dump(
    path: Path,
    about: Mapping[str, object],
    infos: Sequence[SequenceInfo],
    fetched: Experience | None,
    *,
    decode: Callable[[Sequence[int]], str] | None,
) -> None:
    """Write some sequences, worst first; those that were not fetched are named without their tokens.

    Args:
        about: of the step.
        fetched: in any order; None: none of them.
    """
    rows = {} if fetched is None else {int(key): row for row, key in enumerate(fetched.sequence_ids)}
    sequences: list[dict[str, Any]] = []  # Any: JSON
    for info in infos:
        found = dict[str, Any]()
        if fetched is not None and info.sequence_id in rows:
            found = _tokens(select(fetched, [rows[info.sequence_id]]), decode)
        sequences.append(
            {
                "sequence_id": info.sequence_id,
                "group_id": info.group_id,
                "row": info.row,
                "policy_version": info.policy_version,
                "finish_reason": info.finish_reason,
                "num_prompt_tokens": info.prompt_tokens,
                "num_response_tokens": info.response_tokens,
                **found,
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {key: _finite(value) for key, value in about.items()} | {"sequences": sequences}
    write_atomically(path, json.dumps(content, allow_nan=False) + "\n")


def _tokens(sequence: Experience, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:  # Any: JSON
    """Return the tokens of one sequence and what both sides say of those it sampled."""
    assert sequence.old_log_probs is not None, "the monitor compares where old log-probs are"
    mask = sequence.response_mask
    prompt, response = sequence.tokens[~mask].tolist(), sequence.tokens[mask].tolist()
    rollout, training = sequence.rollout_log_probs[mask], sequence.old_log_probs[mask]
    size = np.nan_to_num(np.abs(rollout.astype(np.float64) - training), nan=np.inf)
    return {
        "prompt": None if decode is None else decode(prompt),
        "response": None if decode is None else decode(response),
        "prompt_tokens": prompt,
        "response_tokens": response,
        "rollout_log_probs": _numbers(rollout),
        "training_log_probs": _numbers(training),
        "worst_token": int(size.argmax()),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Return float32 values as the shortest decimals that read back equal."""
    return [float(str(value)) if np.isfinite(value) else None for value in values]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
