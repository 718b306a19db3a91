"""Weight files: what is read, and what a broken folder says."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megappo.errors import CheckpointError
from megappo.weights.buckets import BucketMeta
from megappo.weights.name_map import Partition
from megappo.weights.safetensors_io import (
    HuggingFaceWeights,
    finish_folder,
    name_folder,
    partial_folder,
    shard_files,
    start_folder,
    write_shard,
)

TENSOR = torch.arange(24.0).view(4, 6)


@pytest.fixture(params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "one file":
        save_file({"a": TENSOR, "b": TENSOR[0].clone()}, tmp_path / "model.safetensors")
        return tmp_path
    save_file({"a": TENSOR}, tmp_path / "x.safetensors")
    save_file({"b": TENSOR[0].clone()}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_each_rank_reads_its_slice(folder: Path) -> None:
    with HuggingFaceWeights(folder) as weights:
        assert weights.names() == {"a", "b"} and weights.shape("a") == [4, 6]
        assert torch.equal(weights.read("a", Partition.column, rank=1, size=2), TENSOR[2:])
        assert torch.equal(weights.read("a", Partition.row, rank=2, size=3), TENSOR[:, 4:])
        assert torch.equal(weights.read("a", Partition.replicated, rank=1, size=2), TENSOR)
        assert torch.equal(weights.read("b", Partition.column, rank=0, size=2), TENSOR[0, :3])


def test_only_the_files_asked_for_are_opened(folder: Path) -> None:
    (folder / "y.safetensors").unlink(missing_ok=True)
    with HuggingFaceWeights(folder) as weights:
        assert torch.equal(weights.read("a", Partition.replicated, rank=0, size=1), TENSOR)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        HuggingFaceWeights(tmp_path)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x00")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        HuggingFaceWeights(tmp_path)


@pytest.mark.parametrize("names", [{"c": "x.safetensors"}, {"a": "gone.safetensors"}])
def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path, names: dict[str, str]) -> None:
    save_file({"a": TENSOR}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with HuggingFaceWeights(tmp_path) as weights, pytest.raises(CheckpointError, match=next(iter(names))[:1]):
        weights.shape(next(iter(names)))


def test_shards_are_named_as_transformers_names_them() -> None:
    assert shard_files(1) == ["model.safetensors"]
    assert shard_files(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_failed_write_leaves_the_old_folder_and_a_good_one_replaces_it(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    output.mkdir()
    (output / "old").touch()
    (source / "tokenizer.json").write_text("tokens")
    (source / "pytorch_model.bin").write_text("weights")
    bucket = BucketMeta(names=["a"], shapes=[[4, 6]], dtype="float32", num_bytes=96)

    start_folder(output)
    write_shard(partial_folder(output) / "model.safetensors", {"a": TENSOR})
    with pytest.raises(CheckpointError, match=r"config\.json"):  # the source has none
        finish_folder(output, source=source, buckets=[bucket], config_changes={})
    assert (output / "old").exists()

    (source / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    finish_folder(output, source=source, buckets=[bucket], config_changes={"dtype": "bfloat16"})
    files = sorted(path.name for path in output.iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((output / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "source"]


class Killed(BaseException):
    """The process is dead: nothing after it is done."""


@pytest.mark.parametrize("error", [Killed(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_the_old_folder_is_there_until_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException
) -> None:
    output, calls = tmp_path / "output", list[object]()
    output.mkdir()
    (output / "old").touch()
    rename = os.rename

    def refuse(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) == call or (len(calls) > call and isinstance(error, Killed)):
            raise error
        rename(*paths)

    start_folder(output)
    (partial_folder(output) / "new").touch()
    monkeypatch.setattr(os, "rename", refuse)
    if call < 3:  # there are two
        with pytest.raises((Killed, CheckpointError)):
            name_folder(output)
        assert len(list(tmp_path.rglob("old"))) == 1
        if not isinstance(error, Killed):
            assert (output / "old").exists()
    monkeypatch.undo()
    # The next one may be killed as early as it likes.
    start_folder(output)
    assert len(list(tmp_path.rglob("old"))) == 1
    (partial_folder(output) / "new").touch()
    name_folder(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output"]
    assert [path.name for path in output.iterdir()] == ["new"]


def test_an_unwritable_shard_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/model\.safetensors cannot be written"):
        write_shard(tmp_path / "gone" / "model.safetensors", {"a": TENSOR})
