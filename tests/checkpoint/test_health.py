"""What is wrong with a checkpoint, and which one a run goes on from."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.checkpoint.health import Checksums, check, checkpoint_to_resume, newest_whole
from megappo.checkpoint.manifest import MANIFEST
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import OnDamaged
from megappo.errors import CheckpointError
from tests.checkpoint.small_checkpoints import content, found_in, quick_folder, write, written


@pytest.fixture
def directory() -> Iterator[Path]:
    """Checkpoints of steps 1 to 3."""
    with quick_folder() as folder:
        store = CheckpointStore(Path(folder) / "checkpoints")
        for step in (1, 2, 3):
            write(store, step)
        yield store.directory


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, tuple[Callable[[Path], object], Checksums, str]] = {
    "a rank's file is cut": (
        lambda step: os.truncate(step / "actor/rank_0.bin", 5),
        Checksums.none,
        "actor/rank_0.bin has 5 bytes, 13 were written",
    ),
    "a rank's file is gone": (
        lambda step: (step / "actor/rank_0.bin").unlink(),
        Checksums.none,
        "actor/rank_0.bin is missing",
    ),
    "a rank's file is changed": (
        lambda step: _flip(step / "actor/rank_0.bin"),
        Checksums.full,
        "actor/rank_0.bin has another checksum than when it was written",
    ),
    "a file of the loop is changed": (lambda step: _flip(step / "loop.json"), Checksums.small, "loop.json has another"),
    "no manifest": (lambda step: (step / MANIFEST).unlink(), Checksums.none, "holds no manifest.json: it is no"),
    "an empty manifest": (lambda step: os.truncate(step / MANIFEST, 0), Checksums.none, "cannot be read: JSONDecode"),
    "a list for a manifest": (lambda step: (step / MANIFEST).write_text("[]"), Checksums.none, "cannot be read: Type"),
    "another format": (
        lambda step: (step / MANIFEST).write_text('{"format": 1}'),
        Checksums.none,
        "has format 1, this version of megappo reads format 2",
    ),
    "another number in the manifest": (
        lambda step: (step / MANIFEST).write_text((step / MANIFEST).read_text().replace(": 13,", ": 14,")),
        Checksums.none,
        "its digest is that of another content",
    ),
    "an empty folder": (lambda step: (shutil.rmtree(step), step.mkdir()), Checksums.none, "holds no manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_used_or_nothing(name: str, directory: Path) -> None:
    damage, least, problem = DAMAGES[name]
    damage(directory / "step_000003")
    (found,) = check(directory / "step_000003", least).problems
    assert problem in found
    if least is Checksums.full:
        return  # a rank finds it when it loads
    chosen = newest_whole(directory, OnDamaged.previous)
    assert chosen is not None and content(chosen) == written(2)
    assert problem in chosen.notes[0] and chosen.notes[-1] == f"going on from {directory}/step_000002"
    with pytest.raises(CheckpointError) as refused:
        newest_whole(directory, OnDamaged.refuse)
    assert problem in str(refused.value) and "checkpoint.on_damaged=previous goes on from step_000002" in str(
        refused.value
    )
    with pytest.raises(CheckpointError) as refused:
        checkpoint_to_resume(f"{directory}/step_000003", directory, OnDamaged.previous)
    assert problem in str(refused.value) and "whole ones beside it: step_000001, step_000002" in str(refused.value)


def test_a_whole_checkpoint_has_no_problem_and_what_is_odd_is_noted(directory: Path) -> None:
    assert check(directory / "step_000003", Checksums.full).notes == []
    (directory / "step_000003" / "notes.txt").write_text("mine")
    (directory / "step_000003").rename(directory / "step_000007")
    health = check(directory / "step_000007", Checksums.full)
    assert health.is_whole
    assert health.notes == ["not in manifest.json: notes.txt", "step_000007 holds step 3"]


@settings(max_examples=40)
@given(data=st.data())
def test_no_changed_byte_passes_for_whole(data: st.DataObject) -> None:
    with quick_folder() as folder:
        step = write(CheckpointStore(Path(folder)), 1)
        files = sorted(path for path in step.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files))
        original = path.read_bytes()
        changed = bytearray(original)
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(bytes(changed))
        whole = check(step, Checksums.full).is_whole
        # Another blank between two entries of the manifest changes no entry.
        assert not whole or (path.name == MANIFEST and bytes(changed).split() == original.split())


def test_the_newest_one_is_taken_without_a_word(directory: Path) -> None:
    found = newest_whole(directory, OnDamaged.refuse)
    assert found is not None and (found.manifest.step, found.notes) == (3, [])


def test_what_is_under_way_or_on_its_way_out_is_no_checkpoint(directory: Path) -> None:
    for name in ("step_000004.writing", "step_000005.deleting", "step_000006.set_aside", "step_7", "step_000008x"):
        shutil.copytree(directory / "step_000003", directory / name)
    (directory / "step_000009").write_text("a file")
    assert found_in(directory) == written(3)


@pytest.mark.parametrize(
    ("pointer", "note"),
    [
        (None, "holds checkpoints but no 'latest'"),
        ("", "is garbled: it holds ''"),
        ("step_00000", "is garbled: it holds 'step_00000'"),
        ("step_000009", "names step_000009, which is not there"),
    ],
)
def test_a_damaged_pointer_is_told_of_and_the_newest_is_used_or_nothing(
    pointer: str | None, note: str, directory: Path
) -> None:
    (directory / "latest").unlink() if pointer is None else (directory / "latest").write_text(pointer)
    found = newest_whole(directory, OnDamaged.previous)
    assert found is not None and content(found) == written(3)
    assert note in found.notes[0]
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        newest_whole(directory, OnDamaged.refuse)


def test_a_whole_one_newer_than_the_pointer_is_used_and_told_of(directory: Path) -> None:
    (directory / "latest").write_text("step_000002")
    found = newest_whole(directory, OnDamaged.refuse)
    assert found is not None and content(found) == written(3)
    assert found.notes == [
        f"going on from {directory}/step_000003, which is whole and newer than step_000002: the run was killed before "
        "it moved on"
    ]


def test_a_run_never_starts_anew_beside_checkpoints(directory: Path) -> None:
    for step in (1, 2, 3):
        (directory / f"step_{step:06d}" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint.*start anew with resume=never"):
        newest_whole(directory, OnDamaged.previous)
    for step in (1, 2, 3):
        shutil.rmtree(directory / f"step_{step:06d}")
    with pytest.raises(CheckpointError, match=r"names step_000003, which is not there, and there is no other"):
        newest_whole(directory, OnDamaged.previous)
    (directory / "latest").unlink()
    assert newest_whole(directory, OnDamaged.refuse) is None
    assert newest_whole(directory / "nowhere", OnDamaged.refuse) is None


def test_resume_is_never_auto_or_a_folder_under_any_name(directory: Path) -> None:
    elsewhere = directory.parent / "kept"
    shutil.copytree(directory / "step_000002", elsewhere)
    assert checkpoint_to_resume("never", directory, OnDamaged.previous) is None
    newest = checkpoint_to_resume("auto", directory, OnDamaged.previous)
    given_one = checkpoint_to_resume(str(elsewhere), directory, OnDamaged.previous)
    assert newest is not None and newest.manifest.step == 3
    assert given_one is not None and content(given_one) == written(2)


def test_what_people_take_for_a_checkpoint_is_refused_with_what_it_is(directory: Path, tmp_path: Path) -> None:
    newest = rf"give one, the newest is {directory / 'step_000003'}"
    for name in ("nothing", "model", "converted"):
        (tmp_path / name).mkdir()
    for name in ("model", "converted"):
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "converted" / "__0_0.distcp").touch()
    for folder, said in (
        (directory, newest),
        (directory.parent, newest),
        (directory / "step_000003" / "actor", rf"one part of a checkpoint \(give {directory / 'step_000003'}\)"),
        (tmp_path / "model", r"weights alone, and not where a run was \(start a new run from them: model.path=DIR\)"),
        (tmp_path / "converted", r"weights alone, .*`megappo convert megatron-to-hf` makes of it"),
        (tmp_path / "nothing", r"cannot be resumed from: .* holds no manifest.json.*give another folder"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint_to_resume(str(folder), directory, OnDamaged.previous)
