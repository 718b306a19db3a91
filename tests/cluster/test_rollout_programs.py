"""Rollout programs in the pool: every token comes back once and in its place, whatever engines do."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from megappo.controller.ports import Draw, FinishedGroup
from tests.cluster.conftest import FAST, SAMPLING, Engines, start_engines
from tests.fakes.two_turns import ADDED


@pytest.fixture(scope="module")
def _programs(ray_here: None, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    recovery = replace(FAST, max_restarts=100, max_backoff_s=0.1)
    folder = tmp_path_factory.mktemp("programs")
    agent = "tests.fakes.two_turns:TwoTurns"
    made, placement = start_engines(folder, tokenizer_folder, 100.0, 100.0, recovery=recovery, agent=agent)
    yield made
    made.pool.stop()
    placement.remove()


@pytest.fixture
def programs(_programs: Engines) -> Engines:
    """Two engines that tests share."""
    _programs.wait_for_all(2)
    return _programs


def turn_of(draw: Draw) -> list[int]:
    start, length = draw.prompt.tokens
    return [(start + place) % 50 for place in range(length)]


def check(engines: Engines, wanted: Sequence[Draw], groups: Sequence[FinishedGroup]) -> None:
    """Every sequence is told of once, with two turns and what the program put between; tokens and mask say the same."""
    infos = {info.sequence_id: info for group in groups for info in group.sequences}
    assert sorted(infos) == sorted(sequence_id for draw in wanted for sequence_id in draw.sequence_ids)
    (shard,) = engines.pool.pack([list(infos)])
    found: dict[int, tuple[list[int], list[bool]]] = {}
    for batch in ray.get(shard.pieces):
        batch.validate()
        assert not batch.rollout_log_probs[~batch.response_mask].any()
        for number, sequence_id in enumerate(batch.sequence_ids):
            inside = slice(batch.offsets[number], batch.offsets[number + 1])
            found[int(sequence_id)] = (batch.tokens[inside].tolist(), batch.response_mask[inside].tolist())
    for draw in wanted:
        turn = turn_of(draw)
        for sequence_id in draw.sequence_ids:
            tokens, mask = found[sequence_id]
            assert tokens == [*draw.prompt.tokens, *turn, *ADDED, *turn]
            assert mask == [False] * 2 + [True] * len(turn) + [False] * 2 + [True] * len(turn)
            info = infos[sequence_id]
            assert (info.response_tokens, info.sampled_tokens) == (2 * len(turn) + 2, 2 * len(turn))
            assert info.counts == {"pauses": 1.0, "turns": 2.0}


def test_the_reward_gets_what_the_program_hands_over(programs: Engines) -> None:
    wanted = programs.draws([4, 6])
    groups = list(programs.pool.generate(wanted, SAMPLING, seed=0))
    for group in groups:
        samples = ray.get(group.samples)
        assert [sample.extra for sample in samples] == [{"number": 0}, {"number": 1}]
        assert [sample.response_tokens for sample in samples] == [info.sampled_tokens for info in group.sequences]
    check(programs, wanted, groups)


def test_programs_of_a_failed_engine_are_run_again_elsewhere(programs: Engines) -> None:
    programs.hand_over(programs.version + 1)
    wanted = programs.draws([8] * 12)
    groups: list[FinishedGroup] = []
    for group in programs.pool.generate(wanted, SAMPLING, seed=0):
        if not groups:
            programs.fault(0, "die")
        groups.append(group)
    check(programs, wanted, groups)


def test_what_is_stopped_early_goes_on_also_in_another_run_and_nothing_is_sampled_twice(programs: Engines) -> None:
    wanted = programs.draws([2, 2, 9, 9, 9, 9])
    first = list(programs.pool.generate(wanted, SAMPLING, seed=0, wanted=2))
    done = {info.group_id for group in first for info in group.sequences}
    left = [draw for draw in wanted if draw.group_id not in done]
    ids = [sequence_id for draw in left for sequence_id in draw.sequence_ids]
    assert left and ids
    held = programs.pool.read(ids)
    assert held.begun.num_sequences and held.begun.marks is not None
    programs.pool.pack([], forget=ids)
    programs.pool.adopt(held)
    # A second turn of another version shows what was sampled anew.
    programs.hand_over(programs.version + 1)
    rest = list(programs.pool.generate(left, SAMPLING, seed=0))
    check(programs, wanted, [*first, *rest])
    begun = {int(held.begun.sequence_ids[row]) for row in np.flatnonzero(held.begun.lengths)}
    versions = {info.sequence_id: info.policy_version for group in rest for info in group.sequences}
    assert begun and all(versions[sequence_id] < programs.version for sequence_id in begun)
