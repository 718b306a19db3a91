"""Hugging Face -> checkpoint -> Hugging Face: every family under every layout, bit by bit."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megappo.cli.main import main
from megappo.config.parallelism import ParallelismConfig
from megappo.models.description import read_description
from megappo.models.families import FAMILIES
from tests.conversion.conftest import SIDE_FILES, MakeFolder, assert_same, change_tensors, tensors_of
from tests.conversion.conversion_jobs import convert_together, loaded_by_megatron
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel

LAYOUTS = {
    "1": {},
    "tp2": {"tp": 2},
    "pp4": {"pp": 4},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "ep2 pp2": {"ep": 2, "pp": 2},
    "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
}
TOKENS = torch.tensor([[5, 17, 3, 80, 41, 2, 9]])


def convert(form: str, *options: object) -> int:
    return main(["convert", form, *map(str, options)])


def to_megatron(hf: Path, out: Path, *options: object) -> Path:
    assert convert("hf-to-megatron", "--hf", hf, "--out", out, *options) == 0
    return out


def to_hf(checkpoint: Path, out: Path, *options: object) -> Path:
    assert convert("megatron-to-hf", "--checkpoint", checkpoint, "--out", out, *options) == 0
    return out


def _options(layout: dict[str, int]) -> list[object]:
    return [option for name, size in layout.items() for option in (f"--{name}", size)]


@pytest.mark.parametrize("family", FAMILIES.names())
def test_a_model_comes_back_bit_by_bit_and_computes_the_same(
    make_folder: MakeFolder, tmp_path: Path, family: str
) -> None:
    has_experts = FAMILIES.get(family).traits.experts is not None
    # 97 tokens: no layout divides them.
    folders = [make_folder(family, vocab_size=97, tie_word_embeddings=tied) for tied in (False, True)]
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        if "ep" in layout and not has_experts:
            continue
        source = folders[number % 2]
        megatron = to_megatron(source, tmp_path / f"m{number}", *_options(layout))
        back = to_hf(megatron, tmp_path / f"b{number}")
        assert_same(tensors_of(back), tensors_of(source))
        ranks = layout.get("pp", 1) * max(layout.get("tp", 1), layout.get("ep", 1) * layout.get("etp", 1))
        assert len(list(megatron.glob("*.distcp"))) == ranks, name
    for source, back in zip(folders, (tmp_path / "b0", tmp_path / "b1")):
        expected, found = (AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits for folder in (source, back))
        assert torch.equal(expected, found)


def test_what_lies_beside_the_weights_goes_along(make_folder: MakeFolder, tmp_path: Path) -> None:
    source = make_folder("qwen2")
    back = to_hf(to_megatron(source, tmp_path / "megatron", "--dtype", "bfloat16"), tmp_path / "back")
    for name, text in SIDE_FILES.items():
        assert (back / name).read_text() == text
    of_source, of_back = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    assert of_back == of_source | {"dtype": "bfloat16"}
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(source).items()}
    assert_same(tensors_of(back), expected)
    assert {file.name for file in back.iterdir()} == {
        *SIDE_FILES,
        *("config.json", "conversion.json", "model.safetensors"),
    }


def test_a_folder_of_several_types_is_converted_to_the_one_asked_for(make_folder: MakeFolder, tmp_path: Path) -> None:
    source = make_folder("llama")
    change_tensors(source, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()}))
    back = to_hf(to_megatron(source, tmp_path / "megatron", "--dtype", "float32"), tmp_path / "back")
    assert_same(tensors_of(back), {name: tensor.float() for name, tensor in tensors_of(source).items()})


def test_weight_files_stay_within_the_limit_and_the_index_names_all(make_folder: MakeFolder, tmp_path: Path) -> None:
    source = make_folder("llama")
    back = to_hf(to_megatron(source, tmp_path / "megatron"), tmp_path / "back", "--max-shard-size", "9KB")
    assert_same(tensors_of(back), tensors_of(source))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(back.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {file.name for file in files} and len(files) > 5
    # The embedding alone has 96 * 32 * 4 = 12,288 bytes.
    assert max(file.stat().st_size for file in files) < 12_288 + 1000
    assert AutoModelForCausalLM.from_pretrained(back).lm_head.weight.equal(tensors_of(source)["lm_head.weight"])


def test_megatron_loads_a_converted_folder_under_other_layouts(
    world: DistWorld, make_folder: MakeFolder, tmp_path: Path
) -> None:
    sources = {
        "dense": make_folder("qwen2", vocab_size=97),
        "tied": make_folder("llama", tie_word_embeddings=True),
        "experts": make_folder("qwen3_moe"),
    }
    folders = [
        (str(to_megatron(source, tmp_path / name, "--tp", 2, "--pp", 2)), str(source))
        for name, source in sources.items()
    ]
    for layout in (ParallelismConfig(pipeline=2, virtual_pipeline=2), ParallelismConfig(tensor=2, sequence=True)):
        results = world.run(loaded_by_megatron, parallelism=layout, layout=layout, folders=folders)
        for source, *of_ranks in zip(sources.values(), *results, strict=True):
            assert_same({name: value for rank in of_ranks for name, value in rank.items()}, tensors_of(source))


def test_several_processes_write_their_shares(world: DistWorld, make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model("mixtral")
    arguments = {"hf": str(source), "megatron": str(tmp_path / "megatron"), "back": str(tmp_path / "back")}
    shares = world.run(convert_together, world_size=2, parallelism=ParallelismConfig(), **arguments)
    assert_same(tensors_of(tmp_path / "back"), tensors_of(source))
    whole = sum(tensor.nbytes for tensor in tensors_of(source).values())
    for share in zip(*shares, strict=True):
        assert sum(share) == whole and min(share) > whole / 3
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 2


def test_a_value_model_keeps_its_head_and_comes_back_as_a_reward_model(value_model, tmp_path: Path) -> None:
    source = value_model("qwen3")
    megatron = to_megatron(source, tmp_path / "megatron", "--tp", 2)
    assert read_description(megatron).role == "critic"
    back = to_hf(megatron, tmp_path / "back")
    assert_same(tensors_of(back), tensors_of(source))
    models = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in (source, back)]
    assert models[1].config.num_labels == 1
    assert torch.equal(*(model(TOKENS).logits for model in models))


def test_a_folder_without_a_tokenizer_is_converted_with_a_note(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_megatron(make_model("llama"), tmp_path / "megatron")
    printed = capsys.readouterr().out
    assert "has no tokenizer, so" in printed and f"next: megappo convert verify --checkpoint {tmp_path}" in printed


def test_a_dry_run_prints_every_tensor_and_writes_nothing(
    make_folder: MakeFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_folder("qwen3_moe")
    assert convert("hf-to-megatron", "--hf", source, "--out", tmp_path / "no", "--tp", 2, "--ep", 2, "--dry-run") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["Hugging", "Face", "Megatron", "transform", "shape", "dtype", "bytes", "ranks"]
    joined = " ".join(line.partition("  ")[0] for line in lines).replace(" + ", " ").split()
    assert sorted(joined) == sorted(tensors_of(source))
    (row,) = (line for line in lines if "layers.2.self_attn.q_proj" in line)
    # 4 query and 2 key heads of 12, keys and values: 96 rows of 32 numbers of 4 bytes.
    assert row.split("  ")[-1] == "dim 0 over 0, 1"
    assert all(cell in row for cell in ("linear_qkv.weight", "qkv", "[96, 32]", "float32", "12,288"))
    (row,) = (line for line in lines if "layers.2.mlp.experts.3.down_proj" in line)
    # Expert 3 of four is on the second of two ranks, whole.
    assert row.endswith("whole on 1")
    assert not (tmp_path / "no").exists()
