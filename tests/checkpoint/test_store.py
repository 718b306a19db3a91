"""Saving, replacing, keeping and removing checkpoints."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from megappo.checkpoint.health import newest_whole
from megappo.checkpoint.manifest import FileRecord, read_manifest, record_files
from megappo.checkpoint.scores import read_scores
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import BestMode, CheckpointConfig, OnDamaged
from megappo.errors import CheckpointError
from tests.checkpoint.small_checkpoints import FaultyDisk, found_in, quick_folder, write, written


@pytest.fixture
def store() -> Iterator[CheckpointStore]:
    with quick_folder() as folder:
        yield CheckpointStore(Path(folder) / "checkpoints")


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_a_checkpoint_appears_whole_and_is_pointed_to(store: CheckpointStore) -> None:
    folder = write(store, 50)
    assert folder == store.directory / "step_000050"
    assert names(store) == ["latest", "step_000050"]
    assert (store.directory / "latest").read_text() == "step_000050"
    assert found_in(store.directory) == written(50)


def test_the_manifest_holds_the_records_of_the_ranks_and_of_all_other_files(store: CheckpointStore) -> None:
    manifest = read_manifest(write(store, 7))
    assert (manifest.step, manifest.roles, manifest.extra) == (7, ["actor"], {"weight_version": 7})
    assert [record.path for record in manifest.files] == ["actor/rank_0.bin", "loop.json"]
    assert manifest.num_bytes == len("weights of 7 ") + len(written(7)[0])
    (own,) = manifest.files_of("actor")
    assert own == record_files(store.directory / "step_000007" / "actor", [_rank_file(store, 7)])[0]


def _rank_file(store: CheckpointStore, step: int) -> Path:
    return store.directory / f"step_{step:06d}" / "actor" / "rank_0.bin"


def test_files_of_ranks_are_not_read_again(store: CheckpointStore) -> None:
    folder = store.begin(1)
    (folder / "actor").mkdir()
    (folder / "actor" / "a").write_bytes(b"12345")
    store.commit(1, [FileRecord(path="actor/a", num_bytes=5, xxh3_128="of the rank")])
    assert read_manifest(store.directory / "step_000001").files[0].xxh3_128 == "of the rank"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (FileRecord(path="actor/gone", num_bytes=1, xxh3_128="0"), "actor/gone is missing"),
        (FileRecord(path="loop.json", num_bytes=99, xxh3_128="0"), "loop.json has 2 bytes, 99 were written"),
    ],
)
def test_a_file_that_is_not_as_its_rank_wrote_it_fails_the_save(
    store: CheckpointStore, record: FileRecord, problem: str
) -> None:
    write(store, 1)
    (store.begin(2) / "loop.json").write_text("{}")
    with pytest.raises(CheckpointError, match=problem):
        store.commit(2, [record])
    assert names(store) == ["latest", "step_000001"]
    assert found_in(store.directory) == written(1)


def test_everything_is_on_the_disk_before_it_gets_its_name_and_the_name_before_the_pointer(
    store: CheckpointStore,
) -> None:
    disk = FaultyDisk()
    with disk.plugged_in():
        write(store, 1)
    writing, directory = store.directory / "step_000001.writing", str(store.directory)
    renamed = disk.done.index(("rename", str(writing)))
    flushed = {path for operation, path in disk.done[:renamed] if operation == "fsync"}
    files = {"actor/rank_0.bin", "loop.json", "manifest.json"}
    # The folder of the run, too, in which the directory of all checkpoints is new.
    run = str(store.directory.parent)
    assert flushed == {run, str(writing), str(writing / "actor"), *(str(writing / name) for name in files)}
    last_opened = max(i for i, done in enumerate(disk.done) if done[1] == str(writing / "manifest.json"))
    assert last_opened < renamed
    pointed = disk.done.index(("replace", f"{directory}/latest.writing"))
    assert ("fsync", directory) in disk.done[renamed:pointed]
    assert ("fsync", f"{directory}/latest.writing") in disk.done[:pointed]
    assert disk.done[-1] == ("fsync", directory)


def test_a_step_that_is_saved_again_replaces_the_old_one(store: CheckpointStore) -> None:
    write(store, 1, "old")
    write(store, 1, "new")
    assert names(store) == ["latest", "step_000001"]
    assert found_in(store.directory) == written(1, "new")


def test_an_abandoned_save_leaves_nothing(store: CheckpointStore) -> None:
    write(store, 1)
    (store.begin(2) / "loop.json").write_text("{}")
    store.abandon(2)
    store.abandon(3)
    assert names(store) == ["latest", "step_000001"]


def test_begin_gives_an_empty_folder_where_an_earlier_save_was_killed(store: CheckpointStore) -> None:
    (store.begin(2) / "half").write_text("x")
    assert list(store.begin(2).iterdir()) == []


def test_clean_removes_what_a_killed_run_left_and_nothing_else(store: CheckpointStore) -> None:
    write(store, 1)
    for name in ("step_000002.writing", "step_000000.deleting", "notes.writing", "step_000009.set_aside"):
        (store.directory / name).mkdir()
        (store.directory / name / "file").write_text("x")
    (store.directory / "latest.writing").write_text("step_0")
    assert len(store.clean()) == 3
    assert names(store) == ["latest", "notes.writing", "step_000001", "step_000009.set_aside"]
    assert CheckpointStore(store.directory / "not there").clean() == []


def test_going_on_from_an_older_checkpoint_sets_newer_ones_aside(store: CheckpointStore) -> None:
    for step in (2, 4, 6):
        write(store, step)
    done = store.go_on_from(2)
    assert (store.directory / "latest").read_text() == "step_000002"
    assert len(done) == 2 and "step_000006 is newer" in done[0]
    assert found_in(store.directory) == written(2)
    write(store, 4, "again")
    write(store, 6, "again")
    store.go_on_from(4)
    assert names(store) == [
        "latest",
        "step_000002",
        "step_000004",
        "step_000004.set_aside",
        "step_000006.set_aside",
        "step_000006.set_aside_2",
    ]
    assert found_in(store.directory) == written(4, "again")
    assert store.go_on_from(4) == []


def test_the_values_of_steps_that_are_made_again_count_for_nothing(store: CheckpointStore) -> None:
    keep = CheckpointConfig(keep_last=1, keep_best="val/reward/mean")
    for step, reward in ((2, 0.5), (4, 0.1), (6, 0.9)):
        write(store, step)
        store.record_score(step, "val/reward/mean", reward)
    store.go_on_from(4)
    assert read_scores(store.directory, "val/reward/mean").values == {2: 0.5, 4: 0.1}
    write(store, 6, "again")  # its value is not known yet
    store.prune(keep)
    assert store.steps() == [2, 6]


def test_prune_keeps_the_newest_the_best_and_every_kth(store: CheckpointStore) -> None:
    keep = CheckpointConfig(keep_last=1, keep_every=40, keep_best="val/reward/mean")
    removed: list[str] = []
    for step, reward in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.2), (50, 0.3), (60, 0.4)):
        write(store, step)
        removed += [path.name for path in store.prune(keep)]
        store.record_score(step, "val/reward/mean", reward)
    assert removed == ["step_000010", "step_000030", "step_000050"]
    assert store.steps() == [20, 40, 60]
    # The smallest was 0.2 at step 40; nothing else would be kept.
    store.prune(CheckpointConfig(keep_last=1, keep_best="val/reward/mean", best_mode=BestMode.min))
    assert store.steps() == [40, 60]


def test_scores_are_of_one_metric_and_of_checkpoints_that_are_there(store: CheckpointStore) -> None:
    for step in (1, 2):
        write(store, step)
        store.record_score(step, "reward/mean", float(step))
    store.record_score(3, "reward/mean", 3.0)
    assert read_scores(store.directory, "reward/mean").values == {1: 1.0, 2: 2.0, 3: 3.0}
    store.prune(CheckpointConfig(keep_last=1))
    store.record_score(4, "reward/mean", float("nan"))
    values = read_scores(store.directory, "reward/mean").values
    assert sorted(values) == [2, 4] and values[4] != values[4]
    assert read_scores(store.directory, "reward/max").values == {}
    (store.directory / "scores.json").write_text("[")
    assert read_scores(store.directory, "reward/mean").values == {}


def test_a_damaged_checkpoint_is_no_copy_when_old_ones_are_removed(store: CheckpointStore) -> None:
    write(store, 1)
    write(store, 2)
    os.truncate(_rank_file(store, 2), 3)
    assert store.prune(CheckpointConfig(keep_last=1)) == []
    assert found_in(store.directory) == written(1)
    write(store, 3)
    store.prune(CheckpointConfig(keep_last=1))
    assert store.steps() == [3]


def test_a_folder_that_vanishes_while_it_is_written_is_named(store: CheckpointStore) -> None:
    write(store, 1)
    folder = store.begin(2)
    folder.rmdir()
    with pytest.raises(CheckpointError, match=r"step_000002.writing was not written.*No such file.*something removed"):
        store.commit(2)
    assert found_in(store.directory) == written(1)


def test_a_manifest_that_other_programs_read_says_its_format(store: CheckpointStore) -> None:
    folder = write(store, 1)
    content = json.loads((folder / "manifest.json").read_text())
    assert content["format"] == 2
    assert content["files"][1] == asdict(record_files(folder, [folder / "loop.json"])[0])


def test_extra_entries_come_back_as_json_holds_them(store: CheckpointStore) -> None:
    store.begin(1)
    store.commit(1, extra={"sizes": (1, 2), "by_rank": {10: 0.1, 9: None}})
    found = newest_whole(store.directory, OnDamaged.refuse)
    assert found is not None
    assert found.manifest.extra == {"sizes": [1, 2], "by_rank": {"10": 0.1, "9": None}}
