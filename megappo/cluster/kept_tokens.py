"""What the engines have sampled and nobody has trained on yet: references, owned by the driver, so that neither
finished nor begun groups die with the engine that sampled them."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.controller.ports import Draw


@dataclass(kw_only=True, slots=True, frozen=True)
class KeptGroup:
    """One group, and the engine near its tokens."""

    # Any: reference of a RolloutBatch, or of a begun group's list of SampledResponse.
    ref: Any
    engine: int
    sequence_ids: list[int]
    begun_tokens: int = 0
    """Response tokens of all samples of a begun group."""


class KeptTokens:
    """All groups by sequence and group id. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: dict[int, KeptGroup] = {}
        """By sequence id; the samples of a group share an entry."""
        self._begun: dict[int, KeptGroup] = {}
        """By group id."""

    def finish(self, draw: Draw, group: KeptGroup) -> None:
        """Keep a finished group in place of what was begun of it."""
        with self._lock:
            self._begun.pop(draw.group_id, None)
            self._finished.update(dict.fromkeys(draw.sequence_ids, group))

    def begin(self, draw: Draw, group: KeptGroup) -> None:
        """Keep what an aborted group has so far."""
        with self._lock:
            self._begun[draw.group_id] = group

    def begun(self, draw: Draw) -> KeptGroup | None:
        """Return what there is of a group that was aborted."""
        with self._lock:
            return self._begun.get(draw.group_id)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences, and begun groups with any of them."""
        with self._lock:
            dropped = set(sequence_ids)
            for sequence_id in dropped:
                self._finished.pop(sequence_id, None)
            self._begun = {
                group_id: group for group_id, group in self._begun.items() if dropped.isdisjoint(group.sequence_ids)
            }

    def adopt(self, finished: Iterable[KeptGroup], begun: Mapping[int, KeptGroup]) -> None:
        """Keep groups of an earlier run; begun ones by their id."""
        with self._lock:
            for group in finished:
                self._finished.update(dict.fromkeys(group.sequence_ids, group))
            self._begun |= begun

    def of(self, sequence_ids: Iterable[int]) -> tuple[list[KeptGroup], dict[int, KeptGroup]]:
        """Return the groups that some sequences are in, each once: finished ones, and begun ones by their id."""
        with self._lock:
            wanted = set(sequence_ids)
            finished = {group.sequence_ids[0]: group for key, group in self._finished.items() if key in wanted}
            begun = {key: group for key, group in self._begun.items() if not wanted.isdisjoint(group.sequence_ids)}
        return list(finished.values()), begun

    def by_engine(
        self, shards: Sequence[Sequence[int]], engines: Sequence[int]
    ) -> dict[int, tuple[dict[int, list[int]], list[Any]]]:
        """Cut shards by engine: engine -> (number of the shard -> its sequences there, references of their groups).

        Groups of an engine that is not among `engines` go to the first of those.
        """
        cut: dict[int, tuple[dict[int, list[int]], dict[int, KeptGroup]]] = {}
        with self._lock:
            for number, sequence_ids in enumerate(shards):
                for sequence_id in sequence_ids:
                    group = self._finished[sequence_id]
                    engine = group.engine if group.engine in engines else engines[0]
                    parts, groups = cut.setdefault(engine, ({}, {}))
                    parts.setdefault(number, []).append(sequence_id)
                    groups[group.sequence_ids[0]] = group
        return {engine: (parts, [group.ref for group in groups.values()]) for engine, (parts, groups) in cut.items()}
