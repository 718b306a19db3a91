"""The folder of hand-overs by disk: complete or not there, and the last good one stays."""

import json
from pathlib import Path

import pytest
import torch

from megappo.device.backend import CPU
from megappo.errors import CheckpointError
from megappo.weight_sync.disk import DiskSender, VersionFolder, versions_folder
from megappo.weight_sync.transport import SenderSpec
from megappo.weights.buckets import BucketMeta
from megappo.weights.name_map import Partition
from megappo.weights.safetensors_io import HuggingFaceWeights

BUCKETS = [
    BucketMeta(names=["a", "b"], shapes=[[2], [1, 2]], dtype="float32", num_bytes=16),
    BucketMeta(names=["c"], shapes=[[3]], dtype="bfloat16", num_bytes=6),
]


@pytest.fixture
def store(tmp_path: Path) -> VersionFolder:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen2", "dtype": "float32"}')
    (source / "model.safetensors").write_text("not copied")
    folder = tmp_path / "weights"
    folder.mkdir()
    return VersionFolder(folder, source=source)


def write(store: VersionFolder, version: int, *, value: float, buckets: list[BucketMeta] = BUCKETS) -> None:
    """Write the buckets by two senders, every number the same."""
    partial, files = store.start(version), store.files(len(BUCKETS))
    for bucket, file in zip(buckets, files):
        spec = SenderSpec(name="s", engine_ranks=1, folder=partial, files=[file], backend=CPU, timeout_s=1.0)
        sender = DiskSender(spec)
        sender.open()
        dtype = torch.float32 if bucket.dtype == "float32" else torch.bfloat16
        sender.send(bucket, torch.full([bucket.num_bytes // dtype.itemsize], value, dtype=dtype).view(torch.uint8))
        sender.close()


def read(path: Path) -> dict[str, torch.Tensor]:
    with HuggingFaceWeights(path) as weights:
        return {name: weights.read(name, Partition.replicated, rank=0, size=1) for name in weights.names()}


def test_a_version_is_a_model_folder_that_appears_when_it_is_complete(store: VersionFolder) -> None:
    write(store, 3, value=2.5)
    assert not store.path(3).exists()
    assert store.finish(3, BUCKETS, dtype="bfloat16") == store.path(3)
    tensors = read(store.path(3))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "a": [2.5, 2.5],
        "b": [[2.5, 2.5]],
        "c": [2.5, 2.5, 2.5],
    }
    assert tensors["c"].dtype == torch.bfloat16
    assert json.loads((store.path(3) / "config.json").read_text()) == {"model_type": "qwen2", "dtype": "bfloat16"}


def test_the_version_file_names_the_last_one_that_was_verified_and_only_that_is_kept(store: VersionFolder) -> None:
    for version in (3, 4, 5):
        write(store, version, value=float(version))
        store.finish(version, BUCKETS, dtype="float32")
        if version != 4:  # whose verification failed
            store.keep(version)
        named = json.loads((store.path(0).parent / "VERSION.json").read_text())
        assert named == {"version": 5 if version == 5 else 3, "folder": "version-5" if version == 5 else "version-3"}
        assert store.path(3).is_dir() is (version < 5)
    assert sorted(file.name for file in store.path(0).parent.iterdir()) == ["VERSION.json", "version-5"]


def test_a_failure_while_writing_leaves_the_previous_version_as_it_was(store: VersionFolder) -> None:
    write(store, 3, value=3.0)
    store.finish(3, BUCKETS, dtype="float32")
    store.keep(3)
    write(store, 4, value=4.0, buckets=BUCKETS[:1])
    (store.path(4).parent / ".version-4.partial" / "config.json").mkdir()  # where the config is to be written
    with pytest.raises(CheckpointError, match="version-4 cannot be written"):
        store.finish(4, BUCKETS, dtype="float32")
    assert not store.path(4).exists()
    assert read(store.path(3))["a"].tolist() == [3.0, 3.0]
    assert json.loads((store.path(0).parent / "VERSION.json").read_text())["folder"] == "version-3"
    write(store, 4, value=4.0)  # again
    store.finish(4, BUCKETS, dtype="float32")
    assert read(store.path(4))["c"].tolist() == [4.0] * 3


def test_a_sender_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    spec = SenderSpec(name="s", engine_ranks=1, folder=tmp_path / "elsewhere", backend=CPU, timeout_s=1.0)
    with pytest.raises(CheckpointError, match=r"elsewhere is not there .*weight_sync.folder"):
        DiskSender(spec).open()


def test_runs_that_share_a_folder_keep_their_own_versions(store: VersionFolder, tmp_path: Path) -> None:
    source, shared = tmp_path / "model", tmp_path / "shared"
    (shared / "version-0").mkdir(parents=True)  # somebody's
    folders = [versions_folder(str(shared), run_name=name, run_folder=tmp_path) for name in ("one", "two")]
    for folder in folders:
        for version in (1, 2):
            run = VersionFolder(folder, source=source)  # as a resumed run's: it follows on its earlier versions
            write(run, version, value=float(version))
            run.finish(version, BUCKETS, dtype="float32")
            run.keep(version)
    assert [folder.parent for folder in folders] == [shared, shared]
    assert sorted(str(path.relative_to(shared)) for path in shared.glob("**/version-*")) == [
        "one/version-2",
        "two/version-2",
        "version-0",
    ]
    assert versions_folder(None, run_name="one", run_folder=tmp_path) == tmp_path / "weights"
