"""Tensors pass one by one: whoever holds one has let go of those before."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megappo.conversion.processes import run_job
from megappo.conversion.torch_dist import StoredFolder, StoredItem, finish_stored, write_stored
from megappo.errors import CheckpointError
from megappo.weights.buckets import TensorMeta
from megappo.weights.safetensors_file import SafetensorsFile, write_safetensors

NUMBER = 12


class _Source:
    """Gives tensors and counts how many of them are alive when it is asked for the next."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def tensor(self, number: int) -> torch.Tensor:
        self.most_alive = max(self.most_alive, sum(given() is not None for given in self._given))
        tensor = torch.full((5, 3), float(number))
        self._given.append(weakref.ref(tensor))
        return tensor


def test_a_checkpoint_is_written_and_read_tensor_by_tensor(tmp_path: Path) -> None:
    source = _Source()
    items = [
        StoredItem(
            key=f"t{number}",
            file="__0_0.distcp",
            offset=(0, 0),
            shape=(5, 3),
            global_shape=(5, 3),
            dtype=torch.float32,
        )
        for number in range(NUMBER)
    ]

    def job() -> int:
        write_stored(tmp_path, items, lambda item: source.tensor(int(item.key[1:])))
        finish_stored(tmp_path, common={})
        return 0

    assert run_job(job) == 0
    assert source.most_alive <= 1
    stored = StoredFolder(tmp_path)
    assert stored.read("t7", (2, 1), (2, 2)).tolist() == [[7.0, 7.0], [7.0, 7.0]]
    with pytest.raises(CheckpointError, match=r"holds only a part of t7 \[4, 3\] at \[2, 0\]"):
        stored.read("t7", (2, 0), (4, 3))


def test_a_weight_file_is_written_tensor_by_tensor_as_the_library_reads_it(tmp_path: Path) -> None:
    source, file = _Source(), tmp_path / "model.safetensors"
    metas = [TensorMeta(name=f"t{number}", shape=[5, 3], dtype="float32") for number in range(NUMBER)]
    write_safetensors(file, metas, (source.tensor(number) for number in range(NUMBER)))
    assert source.most_alive <= 1
    with safe_open(file, framework="pt") as read:
        assert read.metadata() == {"format": "pt"}
        assert all(torch.equal(read.get_tensor(meta.name), torch.full((5, 3), float(meta.name[1:]))) for meta in metas)


@pytest.mark.parametrize("padding", range(1, 9))
def test_tensors_behind_a_header_of_any_length_are_read(tmp_path: Path, padding: int) -> None:
    file = tmp_path / "x.safetensors"
    values = torch.arange(4, dtype=torch.bfloat16)
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode() + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + values.view(torch.uint8).numpy().tobytes())
    assert SafetensorsFile(file).tensor("a").tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype F4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fill bytes 0 to 4"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    file = tmp_path / "x.safetensors"
    header = json.dumps({"a": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(file)
