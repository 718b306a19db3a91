"""A run that is killed, and a disk that refuses, at every single operation on the file system.

At any moment the checkpoint that a run would go on from is the one before or the new one, whole to the last byte.
"""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import CheckpointConfig
from megappo.errors import CheckpointError
from tests.checkpoint.small_checkpoints import FaultyDisk, Killed, found_in, quick_folder, write, written

_KEEP_ONE = CheckpointConfig(keep_last=1)


@dataclass(frozen=True)
class Case:
    """What a run does to its checkpoints, and which content may be found afterwards."""

    before: Callable[[CheckpointStore], None]
    during: Callable[[CheckpointStore], object]
    found: list[tuple[str, str]]


def _nothing(store: CheckpointStore) -> None:
    write(store, 1)


def _save_score_prune(store: CheckpointStore) -> None:
    write(store, 2)
    store.record_score(2, "reward/mean", 0.5)
    store.prune(_KEEP_ONE)


def _leave_ruins(store: CheckpointStore) -> None:
    write(store, 1)
    (store.begin(2) / "half").write_text("x")
    shutil.copytree(store.directory / "step_000001", store.directory / "step_000001.replaced")
    shutil.copytree(store.directory / "step_000001", store.directory / "step_000000.deleting")


def _leave_a_replaced_one(store: CheckpointStore) -> None:
    write(store, 1)
    (store.directory / "step_000001").rename(store.directory / "step_000001.replaced")


def _three(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write(store, step)


CASES = {
    "second save": Case(_nothing, _save_score_prune, [written(1), written(2)]),
    "the same step again": Case(_nothing, lambda store: write(store, 1, "new"), [written(1), written(1, "new")]),
    "cleaning": Case(_leave_ruins, lambda store: store.clean(), [written(1)]),
    "cleaning after a replacement": Case(_leave_a_replaced_one, lambda store: store.clean(), [written(1)]),
    "going back": Case(_three, lambda store: store.go_on_from(1), [written(1), written(2), written(3)]),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as memory:
        yield Path(memory) / "checkpoints"


def _prepared(case: Case, folder: Path) -> CheckpointStore:
    shutil.rmtree(folder, ignore_errors=True)
    store = CheckpointStore(folder)
    case.before(store)
    return store


def _operations(case: Case, folder: Path) -> int:
    store, disk = _prepared(case, folder), FaultyDisk()
    with disk.plugged_in():
        case.during(store)
    return disk.count


def _restart(store: CheckpointStore, allowed: list[tuple[str, str]]) -> None:
    """Do what a new start does: settle, go on, save and remove; what was found before stays findable."""
    found = found_in(store.directory)
    assert found in allowed
    store.clean()
    assert found_in(store.directory) == found
    leftovers = {path.suffix for path in store.directory.iterdir()} & {".writing", ".deleting", ".replaced"}
    assert leftovers == set()
    write(store, 9)
    store.prune(_KEEP_ONE)
    assert store.steps() == [9]
    assert found_in(store.directory) == written(9)


@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(name: str, folder: Path) -> None:
    case = CASES[name]
    count = _operations(case, folder)
    assert count >= 3
    for at in range(1, count + 1):
        store, disk = _prepared(case, folder), FaultyDisk(error=Killed, at=at)
        with pytest.raises(Killed), disk.plugged_in():
            case.during(store)
        _restart(store, case.found)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_refusal_of_any_operation_is_explained_and_leaves_the_old_checkpoint_or_the_new_one(
    name: str, once: bool, folder: Path
) -> None:
    case = CASES[name]
    codes = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO]
    refused = 0
    for at in range(1, _operations(case, folder) + 1):
        code = codes[at % len(codes)]
        store = _prepared(case, folder)
        disk = FaultyDisk(error=lambda code=code: OSError(code, os.strerror(code)), at=at, once=once)
        with disk.plugged_in():
            try:
                case.during(store)
            except CheckpointError as error:
                refused += 1
                assert os.strerror(code) in str(error)
                assert str(error).endswith(")"), "the remedy comes last"
        _restart(store, case.found)
    assert refused >= 3


@settings(max_examples=30)
@given(
    saves=st.lists(
        st.tuples(st.integers(1, 2), st.integers(1, 60), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_no_history_of_kills_loses_a_checkpoint(saves: list[tuple[int, int, bool]]) -> None:
    """(steps that the run gets further, operation at which it is killed, whether it removes old ones before)."""
    with quick_folder() as folder:
        store = CheckpointStore(Path(folder) / "checkpoints")
        write(store, 1)
        step, last = 1, written(1)
        for number, (further, at, prunes) in enumerate(saves):
            disk = FaultyDisk(error=Killed, at=at)
            with disk.plugged_in():
                try:
                    store.clean()
                    if prunes:
                        store.prune(_KEEP_ONE)
                    write(store, step + further, str(number))
                except Killed:
                    pass
            new = written(step + further, str(number))
            found = found_in(store.directory)
            assert found in (last, new)
            if disk.count < at:
                assert found == new
            if found == new:
                step, last = step + further, new


def _mounted(folder: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not _mounted(folder, "size=256k"):
        pytest.skip("mounting a file system needs root and CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_of_and_a_later_save_succeeds(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    write(store, 1)
    folder = store.begin(2)
    (folder / "loop.json").write_text("{}")
    with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(CheckpointError, match=r"No space left on device.*keep fewer checkpoints"):
        store.commit(2)
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_000001"]
    assert found_in(store.directory) == written(1)
    write(store, 2)
    assert found_in(store.directory) == written(2)


def test_a_file_system_that_became_read_only_is_told_of(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    write(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be begun.*Read-only file system.*choose a run.dir"):
        store.begin(2)
    assert found_in(store.directory) == written(1)


def test_a_folder_without_permission_is_told_of(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder) / "checkpoints")
        write(store, 1)
        Path(folder).chmod(0o755)
        store.directory.chmod(0o555)
        with _as_nobody(), pytest.raises(CheckpointError, match=r"Permission denied.*give the user of the run"):
            store.begin(2)
        store.directory.chmod(0)
        with _as_nobody(), pytest.raises(CheckpointError, match=r"checkpoints cannot be read: Permission denied"):
            found_in(store.directory)
        store.directory.chmod(0o755)
        assert found_in(store.directory) == written(1)


class _as_nobody:
    """Root may do anything, so a user who may not asks."""

    def __enter__(self) -> None:
        self._user = os.geteuid()
        if self._user == 0:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        if self._user == 0:
            os.seteuid(0)
