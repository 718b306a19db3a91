"""The input of `megappo inspect algorithm`: a JSON file of sequences and an algorithm, read and checked.

Shapes: B sequences, N response tokens of all sequences, packed in file order. All numbers are float64.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from megappo.algo.errors import AlgorithmInputError
from megappo.batch.fields import offsets_of
from megappo.cli.algorithm_section import number_of, parse_algorithm
from megappo.config.algorithm import AlgorithmConfig
from megappo.errors import DataError

TOKEN_FIELDS = (
    "rewards",
    "values",
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "new_values",
    "entropy",
    "sum_pi_squared",
)
"""Fields with one number per response token."""

_FIELDS = {*TOKEN_FIELDS, "group", "mask", "score", "greedy_score", "finish_reason"}
_FINISH_REASONS = ("stop", "length", "abort")


class CaseError(DataError):
    """Sequences of the case are not what the algorithm can take; every fault is listed with sequence and field."""

    def __init__(self, faults: list[AlgorithmInputError]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"case error: {fault}" for fault in faults))


@dataclass(kw_only=True, slots=True)
class AlgorithmCase:
    """A checked case."""

    algorithm: AlgorithmConfig
    names_advantage: bool
    """Whether the file names an advantage estimator (else the default one only runs if it can)."""
    offsets: np.ndarray
    """[B+1] int64."""
    mask: np.ndarray
    """[N] bool."""
    group_ids: np.ndarray
    """[B] int64; a sequence without a group is a group of its own."""
    has_group: np.ndarray
    """[B] bool."""
    truncated: np.ndarray
    """[B] bool."""
    scores: np.ndarray | None
    """[B]; 0 where the rewards are given per token. None: no sequence has a reward."""
    parts: list[Mapping[str, float]]
    """[B]."""
    greedy_scores: np.ndarray | None
    """[B]."""
    tokens: dict[str, np.ndarray]
    """[N] per field that is given; 0 on empty sequences that leave it out."""

    @property
    def occupied(self) -> np.ndarray:
        """Which sequences have a response token, [B] bool."""
        return np.array([self.mask[start:end].any() for start, end in zip(self.offsets[:-1], self.offsets[1:])], bool)


def read_case(path: Path) -> AlgorithmCase:
    """Read a case.

    Raises:
        DataError: the file cannot be read or is not a case; CaseError: its sequences are not.
        ConfigError: its algorithm breaks rules.
    """
    content = _read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("sequences"), list):
        raise DataError(f'{path}: must be an object {{"sequences": [...], "algorithm": {{...}}}}')
    unknown = sorted(content.keys() - {"sequences", "algorithm"})
    if unknown:
        raise DataError(f"{path}: unknown key {unknown[0]!r} (use sequences and algorithm)")
    given = content.get("algorithm")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise DataError(f"{path}: algorithm must be an object")
    algorithm = parse_algorithm(given)
    return _Reader(content["sequences"]).case(algorithm, names_advantage="name" in (given.get("advantage") or {}))


def _read_json(path: Path) -> Any:  # Any: whatever the file holds; the caller checks it
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path}: is nested too deeply for a case") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; one that gives a key twice is no case, since the first value would be lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice in one object")
        found[key] = value
    return found


class _Reader:
    """Turns the JSON sequences into arrays and gathers every fault on the way."""

    def __init__(self, sequences: list[Any]) -> None:
        self.faults: list[AlgorithmInputError] = []
        self.sequences: list[dict[str, Any]] = []
        for number, sequence in enumerate(sequences):
            if isinstance(sequence, dict):
                # null is another way to leave a field out.
                self.sequences.append({name: value for name, value in sequence.items() if value is not None})
            else:
                self.sequences.append({})
                self.fault(number, "sequence", "must be an object")
        self.masks = [self._mask(number) for number in range(len(self.sequences))]
        self.occupied = [any(mask) for mask in self.masks]

    def fault(self, number: int, field: str, rule: str) -> None:
        self.faults.append(AlgorithmInputError(number, field, rule))

    def case(self, algorithm: AlgorithmConfig, *, names_advantage: bool) -> AlgorithmCase:
        self._check_fields()
        tokens = {name: values for name in TOKEN_FIELDS if (values := self._token_field(name)) is not None}
        has_group, group_ids = self._groups()
        scores, parts = self._scores(algorithm)
        case = AlgorithmCase(
            algorithm=algorithm,
            names_advantage=names_advantage,
            offsets=offsets_of([len(mask) for mask in self.masks]),
            mask=np.array([value for mask in self.masks for value in mask], dtype=bool),
            group_ids=group_ids,
            has_group=has_group,
            truncated=np.array([sequence.get("finish_reason") == "length" for sequence in self.sequences], bool),
            scores=scores,
            parts=parts,
            greedy_scores=self._sequence_numbers("greedy_score"),
            tokens=tokens,
        )
        if self.faults:
            raise CaseError(self.faults)
        return case

    def _mask(self, number: int) -> list[bool]:
        mask = self.sequences[number].get("mask")
        if not isinstance(mask, list) or not all(value in (0, 1) for value in mask):
            self.fault(number, "mask", "must be a list of 0 and 1, one for each response token")
            return []
        return [bool(value) for value in mask]

    def _check_fields(self) -> None:
        for number, sequence in enumerate(self.sequences):
            for name in sorted(sequence.keys() - _FIELDS):
                self.fault(number, name, f"is not a field of a sequence (use {', '.join(sorted(_FIELDS))})")
            reason = sequence.get("finish_reason", "stop")
            if reason not in _FINISH_REASONS:
                self.fault(number, "finish_reason", f"is {reason!r}, must be one of {', '.join(_FINISH_REASONS)}")

    def _token_field(self, name: str) -> np.ndarray | None:
        """Return a per-token field [N], or None when no sequence has it."""
        if not any(name in sequence for sequence in self.sequences):
            return None
        values: list[float] = []
        for number, (sequence, mask) in enumerate(zip(self.sequences, self.masks)):
            given = sequence.get(name)
            if given is None:
                # Of rewards, a sequence may have a score instead.
                if self.occupied[number] and name != "rewards":
                    self.fault(number, name, "is missing, other sequences have it")
                given = [0.0] * len(mask)
            elif not isinstance(given, list) or any(number_of(value) is None for value in given):
                self.fault(number, name, "must be a list of numbers, one for each response token")
                given = [0.0] * len(mask)
            elif len(given) != len(mask):
                self.fault(number, name, f"has {len(given)} entries, mask has {len(mask)}")
                given = [0.0] * len(mask)
            values += given
        return np.array(values, dtype=np.float64)

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        known: dict[object, int] = {}
        has_group, ids = [], []
        for number, sequence in enumerate(self.sequences):
            group = sequence.get("group")
            if group is not None and (not isinstance(group, str | int) or isinstance(group, bool)):
                self.fault(number, "group", "must be text or an integer")
                group = None
            # "1" and 1 are two groups; a sequence without a group gets a key that no other has.
            key = (number,) if group is None else (type(group).__name__, group)
            ids.append(known.setdefault(key, len(known)))
            has_group.append(group is not None)
        return np.array(has_group, dtype=bool), np.array(ids, dtype=np.int64)

    def _sequence_numbers(self, name: str) -> np.ndarray | None:
        """Return a number per sequence [B], or None when no sequence has it."""
        if not any(name in sequence for sequence in self.sequences):
            return None
        numbers: list[float] = []
        for number, sequence in enumerate(self.sequences):
            value = sequence.get(name)
            if value is None and self.occupied[number]:
                self.fault(number, name, "is missing, other sequences have it")
            elif value is not None and number_of(value) is None:
                self.fault(number, name, "must be a number")
                value = None
            numbers.append(0.0 if value is None else value)
        return np.array(numbers, dtype=np.float64)

    def _scores(self, algorithm: AlgorithmConfig) -> tuple[np.ndarray | None, list[Mapping[str, float]]]:
        """Return scores [B] (None: no sequence has a reward) and their parts [B]."""
        if not any("score" in sequence or "rewards" in sequence for sequence in self.sequences):
            return None, [{} for _ in self.sequences]
        scores: list[float] = []
        parts: list[Mapping[str, float]] = []
        for number, sequence in enumerate(self.sequences):
            score = sequence.get("score")
            if score is not None and "rewards" in sequence:
                self.fault(number, "rewards", "cannot be given beside score")
            if score is None and "rewards" not in sequence and self.occupied[number]:
                self.fault(number, "score", "is missing, other sequences have a reward")
            parts.append(self._parts(number, score))
            scores.append(self._total(number, score, parts[-1], algorithm))
        return np.array(scores, dtype=np.float64), parts

    def _parts(self, number: int, score: object) -> Mapping[str, float]:
        if not isinstance(score, dict):
            return {}
        if any(number_of(value) is None for value in score.values()):
            self.fault(number, "score", "must hold numbers only")
            return {}
        return cast(Mapping[str, float], score)

    def _total(self, number: int, score: object, parts: Mapping[str, float], algorithm: AlgorithmConfig) -> float:
        """Return the one number of a score: itself, its part named score, or for gdpo the weighted sum of its parts."""
        if score is None:
            return 0.0
        if not isinstance(score, dict):
            total = number_of(score)
            if total is None:
                self.fault(number, "score", "must be a number or an object of numbers")
            return total or 0.0
        if "score" in parts:
            return float(parts["score"])
        advantage = algorithm.advantage
        if advantage.name == "gdpo":
            weights = advantage.weights or [1.0] * len(advantage.reward_keys)
            return float(sum(w * parts[key] for key, w in zip(advantage.reward_keys, weights) if key in parts))
        self.fault(
            number, "score", f"has no part 'score', which {advantage.name} needs (keys seen: {', '.join(parts)})"
        )
        return 0.0
