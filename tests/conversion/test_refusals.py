"""What cannot be converted is refused with the names of what is wrong, and nothing appears."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.cli.main import main
from megappo.conversion.torch_dist import StoredItem, finish_stored, write_stored
from megappo.models.description import MODEL_FILE
from megappo.observability.run_directory import write_atomically
from megappo.weights.safetensors_io import partial_folder
from tests.conversion.conftest import MakeFolder, assert_same, change_tensors, tensors_of

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def convert(form: str, *options: object) -> int:
    return main(["convert", form, *map(str, options)])


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def lose(folder: Path) -> None:
    names = ("model.norm.weight", "model.layers.2.self_attn.k_proj.bias")
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in names])


def add(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}))


def reshape(folder: Path) -> None:
    change_tensors(
        folder,
        lambda tensors: tensors.update(
            {"model.norm.weight": torch.ones(31), "model.layers.0.self_attn.o_proj.weight": torch.ones(32, 47)}
        ),
    )


def untie(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)


def mix_types(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).half()}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_off_in_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def shards(folder: Path, index_of: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Give each half of the tensors a file; the index is what `index_of` makes of the right one."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    right: dict[str, str] = {}
    for file, own in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
        right |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index_of(right)}))


def lose_shard(folder: Path) -> None:
    shards(folder, lambda right: right)
    (folder / "b.safetensors").unlink()


def name_ghost(folder: Path) -> None:
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    shards(folder, lambda right: right | {"model.norm.weight": other[right["model.norm.weight"]]})


def hide_tensor(folder: Path) -> None:
    shards(folder, lambda right: {name: file for name, file in right.items() if name != "model.norm.weight"})


def garble_index(folder: Path) -> None:
    shards(folder, lambda right: right)
    (folder / "model.safetensors.index.json").write_text("{")


HF_FAULTS = {
    "missing": (lose, "missing tensors: model.layers.2.self_attn.k_proj.bias, model.norm.weight (2 in all)"),
    "extra": (add, "tensors of no known parameter: model.layers.9.mlp.up_proj.weight (1 in all)"),
    "shapes": (reshape, "o_proj.weight has shape [32, 47], must have [32, 48]\n  model.norm.weight has shape [31]"),
    "not tied": (untie, "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight"),
    "mixed types": (mix_types, "holds tensors of type float16, float32 (say which type to write: --dtype float32 or"),
    "cut off": (cut_off, "model.safetensors cannot be read: it is cut off: its header names"),
    "cut off in its header": (cut_off_in_header, "model.safetensors cannot be read: it is cut off within its header"),
    "shard gone": (lose_shard, "b.safetensors cannot be read: [Errno 2]"),
    "ghost": (name_ghost, "the index names in a file that lacks them: model.norm.weight (1 in all)"),
    "hidden": (
        hide_tensor,
        "(1 in all)\n  tensors in a file that the index does not name there: model.norm.weight",
    ),
    "index": (garble_index, "model.safetensors.index.json cannot be read"),
    "other model": (lambda folder: change_config(folder, num_hidden_layers=3), "no known parameter: model.layers.3."),
    "other family": (
        lambda folder: change_config(folder, model_type="qwen3"),
        "model.layers.0.self_attn.k_norm.weight",
    ),
    "unknown family": (lambda folder: change_config(folder, model_type="gpt2"), "model_type='gpt2' is not supported"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("no"), "config.json is not JSON"),
    "no folder": (shutil.rmtree, "does not exist (give a local Hugging Face folder)"),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_a_hugging_face_folder_that_is_wrong_is_refused_by_name(
    make_folder: MakeFolder, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_folder("qwen2")
    breaks, message = HF_FAULTS[fault]
    breaks(source)
    assert convert("hf-to-megatron", "--hf", source, "--out", tmp_path / "out", "--tp", 2) == 2
    printed = capsys.readouterr().err
    assert message in printed and "rank 0" not in printed
    assert {path.name for path in tmp_path.iterdir()} <= {source.name}


@pytest.fixture
def megatron(make_folder: MakeFolder, tmp_path: Path) -> Path:
    assert convert("hf-to-megatron", "--hf", make_folder("qwen2"), "--out", tmp_path / "megatron", "--tp", 2) == 0
    return tmp_path / "megatron"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write a checkpoint whose tensors are others."""
    from megappo.conversion.torch_dist import StoredFolder

    stored = StoredFolder(folder)
    tensors = {key: stored.read(key, [0] * len(entry.size), entry.size) for key, entry in stored.tensors().items()}
    change(tensors)
    for file in (*folder.glob("*.distcp"), folder / ".metadata"):
        file.unlink()
    items = [
        StoredItem(
            key=key,
            file="__0_0.distcp",
            offset=(0,) * tensor.dim(),
            shape=tuple(tensor.shape),
            global_shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )
        for key, tensor in tensors.items()
    ]
    write_stored(folder, items, lambda item: tensors[item.key])
    finish_stored(folder, common={})


def change_model(folder: Path) -> None:
    description = json.loads((folder / MODEL_FILE).read_text())
    description["architecture"]["num_layers"] = 5
    write_atomically(folder / MODEL_FILE, json.dumps(description))


def cut_data(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])


def damage_data(folder: Path) -> None:
    """The bytes of the first tensor of a file are others: torch's archive holds their checksum."""
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[:64] = bytes(64)
    file.write_bytes(content)


MEGATRON_FAULTS = {
    "missing": (lambda folder: rewrite(folder, lambda tensors: tensors.pop(QKV)), f"missing tensors: {QKV} (1 in all)"),
    "extra": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"optimizer.state.exp_avg.x": torch.ones(2)})),
        "tensors of no known parameter: optimizer.state.exp_avg.x (1 in all)",
    ),
    "shape": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({QKV: torch.ones(3, 2)})),
        f"{QKV} has shape [3, 2], must have [96, 32]",
    ),
    "other model": (change_model, "is of another model than"),
    "cut off": (cut_data, "is damaged: __1_0.distcp is cut off: "),
    "file gone": (lambda folder: (folder / "__1_0.distcp").unlink(), "is damaged: __1_0.distcp is missing"),
    "damaged": (damage_data, "cannot be read from"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), "is no Megatron checkpoint"),
    "garbled metadata": (lambda folder: (folder / ".metadata").write_bytes(b"\x80no"), ".metadata cannot be read"),
    "other format": (
        lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "is in the format zarr, only torch_dist is read",
    ),
    "no description": (lambda folder: (folder / MODEL_FILE).unlink(), "is no checkpoint: it holds neither"),
}


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_a_checkpoint_that_is_wrong_is_refused_by_name(
    megatron: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks, message = MEGATRON_FAULTS[fault]
    breaks_alone = ("missing", "extra", "shape")
    if fault in breaks_alone:
        _in_a_world(lambda: breaks(megatron))
    else:
        breaks(megatron)
    before = {path.name for path in tmp_path.iterdir()}
    assert convert("megatron-to-hf", "--checkpoint", megatron, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before


def _in_a_world(action: Callable[[], None]) -> None:
    from megappo.conversion.processes import run_job

    def job() -> int:
        action()
        return 0

    assert run_job(job) == 0


def test_a_layout_that_does_not_suit_the_model_is_refused_with_all_reasons(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_folder("qwen2")
    options = ("--hf", source, "--out", tmp_path / "out")
    assert convert("hf-to-megatron", *options, "--tp", 4, "--pp", 3, "--ep", 2) == 2
    printed = capsys.readouterr().err
    assert "--tp=4 must divide the 2 key/value heads of the model (use 1 or 2)" in printed
    assert "--pp=3 must divide the 4 layers of the model (use 1, 2 or 4)" in printed
    assert "--ep=2 is for mixtures of experts" in printed and "layout" not in printed
    assert convert("hf-to-megatron", *options, "--tp", 0) == 2
    assert "--tp=0 must be a whole number above 0" in capsys.readouterr().err
    assert convert("hf-to-megatron", *options, "--processes", 0) == 2
    assert "--processes=0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_place_of_the_output_is_respected(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_folder("llama"), tmp_path / "out"
    out.mkdir()
    assert convert("hf-to-megatron", "--hf", source, "--out", out) == 0  # an empty folder is no loss
    assert convert("hf-to-megatron", "--hf", source, "--out", out) == 2
    assert "exists (give --overwrite to replace it" in capsys.readouterr().err
    (out / "note").touch()
    assert convert("hf-to-megatron", "--hf", source, "--out", out, "--overwrite") == 0
    assert not (out / "note").exists()

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    for target, message in (
        (mine, "exists and was not written by a conversion"),
        (source, "overlap"),
        (source / "megatron", "overlap"),
    ):
        assert convert("hf-to-megatron", "--hf", source, "--out", target, "--overwrite") == 2
        assert message in capsys.readouterr().err
    assert (mine / "thesis.tex").exists()

    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert convert("hf-to-megatron", "--hf", source, "--out", link) == 0
    assert link.is_symlink() and (tmp_path / "elsewhere" / MODEL_FILE).is_file()


def test_two_conversions_into_one_folder_do_not_mix(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_folder("llama"), tmp_path / "out"
    aside = partial_folder(out)
    aside.mkdir()
    (aside / "left").touch()
    other = os.open(aside, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert convert("hf-to-megatron", "--hf", source, "--out", out) == 1
        assert "is being written by another process" in capsys.readouterr().err
        assert (aside / "left").exists()
    finally:
        os.close(other)
    assert convert("hf-to-megatron", "--hf", source, "--out", out) == 0  # what a kill left is no obstacle
    assert not aside.exists() and not (out / "left").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_stops_a_write_is_what_is_told(
    error: BaseException,
    make_folder: MakeFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(tensor: torch.Tensor, file: object) -> None:
        try:
            raise error
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")  # as torch's writer does when it is closed

    monkeypatch.setattr("megappo.conversion.torch_dist.torch.save", fail)
    code = convert("hf-to-megatron", "--hf", make_folder("llama"), "--out", tmp_path / "out")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert ("interrupted" if code == 130 else "No space left on device") in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not partial_folder(tmp_path / "out").exists()


def test_a_write_that_fails_leaves_the_old_folder(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_folder("llama"), tmp_path / "out"
    assert convert("hf-to-megatron", "--hf", source, "--out", out) == 0
    back = tmp_path / "back"
    assert convert("megatron-to-hf", "--checkpoint", out, "--out", back) == 0
    damage_data(out)
    assert convert("megatron-to-hf", "--checkpoint", out, "--out", back, "--overwrite") == 2
    assert "embedding.word_embeddings.weight cannot be read" in capsys.readouterr().err
    assert_same(tensors_of(back), tensors_of(source))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
