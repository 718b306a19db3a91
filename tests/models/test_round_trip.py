"""Weights that are loaded come out again bit by bit, in every layout, and as a folder that transformers loads."""

import json
import resource
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megappo.config.model import Dtype
from megappo.config.parallelism import ParallelismConfig
from megappo.errors import CheckpointError
from megappo.models.build import Head
from megappo.models.export import iter_export_buckets, plan_export
from megappo.models.families import FAMILIES
from megappo.models.save import save_hf_model
from megappo.weights.buckets import BucketMeta, open_bucket
from tests.dist_world import DistWorld, RankError
from tests.models.conftest import MakeModel
from tests.models.expert_layouts import EXPERT_CASES
from tests.models.model_jobs import loaded_model

LAYOUTS = {
    "one process": ParallelismConfig(),
    "tensor": ParallelismConfig(tensor=2),
    "pipeline": ParallelismConfig(pipeline=4),
    "virtual pipeline": ParallelismConfig(pipeline=2, virtual_pipeline=2),
    "all axes": ParallelismConfig(tensor=2, pipeline=2, sequence=True),
}
Exported = tuple[bool, list[BucketMeta], dict[str, torch.Tensor]]


def export_job(
    folder: str,
    layout: ParallelismConfig,
    bucket_bytes: int,
    dtype: Dtype = Dtype.float32,
    on_the_wire: str | None = None,
) -> Exported:
    chunks = loaded_model(folder, Head.language_model, layout, dtype)
    plan = plan_export(chunks, bucket_bytes, dtype=on_the_wire)
    state: dict[str, torch.Tensor] = {}
    sent: list[BucketMeta] = []
    for bucket, flat in iter_export_buckets(chunks, bucket_bytes, dtype=on_the_wire):
        assert flat.dtype is torch.uint8 and flat.numel() == bucket.num_bytes
        state.update({name: tensor.clone() for name, tensor in open_bucket(bucket, flat).items()})
        sent.append(bucket)
    assert sent == plan.buckets and plan.sends == bool(sent) and (plan.takes_part or not plan.sends)
    return plan.sends, plan.buckets, state


def export_jobs(folders: list[str], layout: ParallelismConfig) -> list[Exported]:
    return [export_job(folder, layout, bucket_bytes=5000) for folder in folders]


def save_job(folder: str, layout: ParallelismConfig, output: str, head: Head, shard_bytes: int) -> None:
    save_hf_model(loaded_model(folder, head, layout), folder, output, shard_bytes=shard_bytes)


def save_job_with_full_disk(folder: str, layout: ParallelismConfig, output: str) -> str:
    """The last stage may write 1 kB per file only."""
    chunks = loaded_model(folder, Head.language_model, layout)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        save_hf_model(chunks, folder, output)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "saved"


def assert_exported(folder: Path, results: list[Exported]) -> None:
    """Every tensor of the folder is sent once, over all sources, bit by bit."""
    expected = load_file(folder / "model.safetensors")
    assert sorted(name for _, _, state in results for name in state) == sorted(expected)
    for _, _, state in results:
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), f"{folder}: {name}"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_export_is_the_loaded_folder_bit_by_bit(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig
) -> None:
    # Experts go with tensor parallelism under sequence parallelism only.
    fitting = [
        name
        for name in FAMILIES.names()
        if not FAMILIES.get(name).traits.experts or layout.tensor == 1 or layout.sequence
    ]
    folders = [make_model(family, tie_word_embeddings=tied) for family in fitting for tied in (False, True)]
    results = world.run(export_jobs, parallelism=layout, layout=layout, folders=list(map(str, folders)))
    for folder, *of_ranks in zip(folders, *results, strict=True):
        assert_exported(folder, of_ranks)


@pytest.mark.parametrize(("layout", "world_size"), EXPERT_CASES)
def test_experts_of_all_ranks_are_exported_bit_by_bit(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig, world_size: int
) -> None:
    folders = [make_model("qwen3_moe"), make_model("mixtral")]
    results = world.run(
        export_jobs, world_size=world_size, parallelism=layout, layout=layout, folders=list(map(str, folders))
    )
    for folder, *of_ranks in zip(folders, *results, strict=True):
        assert_exported(folder, of_ranks)
        assert sum(sends for sends, _, _ in of_ranks) == layout.pipeline * layout.expert


def test_a_padded_vocabulary_comes_out_without_its_padding(world: DistWorld, make_model: MakeModel) -> None:
    """Five tokens on four ranks: the third has one and the last none."""
    layout = ParallelismConfig(tensor=4)
    folder = make_model("llama", vocab_size=5, num_attention_heads=4, num_key_value_heads=4)
    results = world.run(export_job, parallelism=layout, layout=layout, folder=str(folder), bucket_bytes=5000)
    assert_exported(folder, results)
    assert world.run(padding_job, parallelism=layout, layout=layout, folder=str(folder)) == [0, 0, 1, 2]


def padding_job(folder: str, layout: ParallelismConfig) -> int:
    """Return the number of rows of the embedding and the output layer that are zero, the same in both."""
    (model,) = loaded_model(folder, Head.language_model, layout)
    rows = [int((weight == 0).all(1).sum()) for weight in (model.embedding.word_embeddings.weight, model.output_weight)]
    assert rows[0] == rows[1]
    return rows[0]


def test_the_first_rank_of_a_stage_sends_buckets_within_the_limit(world: DistWorld, make_model: MakeModel) -> None:
    layout = LAYOUTS["all axes"]
    folder = str(make_model("qwen2"))
    results = world.run(export_job, parallelism=layout, layout=layout, folder=folder, bucket_bytes=5000)
    assert [sends for sends, _, _ in results] == [True, False, True, False]
    for sends, buckets, _ in results:
        assert all(bucket.num_bytes <= 5000 or len(bucket.names) == 1 for bucket in buckets)
        assert len(buckets) > 3 if sends else not buckets


def test_only_one_data_parallel_replica_sends(world: DistWorld, make_model: MakeModel) -> None:
    layout = LAYOUTS["tensor"]
    results = world.run(
        export_job, world_size=4, parallelism=layout, layout=layout, folder=str(make_model("llama")), bucket_bytes=5000
    )
    assert [sends for sends, _, _ in results] == [True, False, False, False]


@pytest.mark.parametrize(
    ("layout", "takes_part"),
    [
        (ParallelismConfig(expert=2), [True, True, False, False]),
        (ParallelismConfig(tensor=2, sequence=True), [True, True, False, False]),
        (ParallelismConfig(tensor=2, sequence=True, expert=4), [True] * 4),
        (ParallelismConfig(pipeline=2, expert=2), [True] * 4),
    ],
)
def test_a_stage_is_exported_by_the_ranks_that_hold_a_first_copy(
    world: DistWorld, make_model: MakeModel, tmp_path: Path, layout: ParallelismConfig, takes_part: list[bool]
) -> None:
    folder, output = make_model("qwen3_moe"), tmp_path / "saved"
    assert takes_part == world.run(
        save_by_those_who_take_part,
        world_size=4,
        parallelism=layout,
        layout=layout,
        folder=str(folder),
        output=str(output),
    )
    saved = AutoModelForCausalLM.from_pretrained(output).state_dict()
    source = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert saved.keys() == source.keys() and all(torch.equal(saved[name], source[name]) for name in source)


def save_by_those_who_take_part(folder: str, layout: ParallelismConfig, output: str) -> bool:
    chunks = loaded_model(folder, Head.language_model, layout)
    save_hf_model(chunks, folder, output, shard_bytes=10_000)
    return plan_export(chunks, 10_000).takes_part


def test_bfloat16_is_the_rounded_folder_whether_the_model_has_it_or_the_way(
    world: DistWorld, make_model: MakeModel
) -> None:
    folder, layout = make_model("qwen3"), LAYOUTS["tensor"]
    results = world.run(
        export_job, parallelism=layout, layout=layout, folder=str(folder), bucket_bytes=5000, dtype=Dtype.bfloat16
    )
    expected = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in results[0][2].items())
    assert {bucket.dtype for bucket in results[0][1]} == {"bfloat16"}
    cast = world.run(
        export_job, parallelism=layout, layout=layout, folder=str(folder), bucket_bytes=5000, on_the_wire="bfloat16"
    )
    assert cast[0][1] == results[0][1]
    assert all(torch.equal(tensor, cast[0][2][name]) for name, tensor in results[0][2].items())


@pytest.mark.parametrize("shard_bytes", [10_000, 1 << 30], ids=["shards", "one file per stage"])
def test_a_saved_policy_loads_in_transformers_with_its_side_files(
    world: DistWorld, make_model: MakeModel, tmp_path: Path, shard_bytes: int
) -> None:
    folder, layout, output = make_model("qwen2"), LAYOUTS["all axes"], tmp_path / "saved"
    (folder / "tokenizer.json").write_text("{}")
    output.mkdir()
    (output / "left_over.txt").write_text("of an older save")
    world.run(
        save_job, parallelism=layout, layout=layout, folder=str(folder), output=str(output), head=Head.language_model,
        shard_bytes=shard_bytes,
    )  # fmt: skip
    saved = AutoModelForCausalLM.from_pretrained(output).state_dict()
    source = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert saved.keys() == source.keys() and all(torch.equal(saved[name], source[name]) for name in source)
    assert (output / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and not (output / "left_over.txt").exists()
    index = json.loads((output / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        with safe_open(output / file, framework="pt") as tensors:
            held = {name for name, of in index["weight_map"].items() if of == file}
            assert set(tensors.keys()) == held
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in source.values())


def test_a_saved_critic_loads_as_a_classifier_with_one_label(
    world: DistWorld, make_model: MakeModel, tmp_path: Path
) -> None:
    folder, layout, output = make_model("llama"), ParallelismConfig(), tmp_path / "critic"
    world.run(
        save_job, parallelism=layout, layout=layout, folder=str(folder), output=str(output), head=Head.value_function,
        shard_bytes=1 << 30,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    assert sorted(path.name for path in output.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert bool((model.score.weight == 0).all())


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_model(
    world: DistWorld, make_model: MakeModel, tmp_path: Path
) -> None:
    folder, layout, output = make_model("qwen2"), LAYOUTS["all axes"], tmp_path / "saved"
    output.mkdir()
    (output / "config.json").write_text("old")
    messages = world.run(
        save_job_with_full_disk, parallelism=layout, layout=layout, folder=str(folder), output=str(output)
    )
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 2:") and "model-00002-of-00002.safetensors cannot be written" in messages[0]
    assert (output / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, "missing tensors: model.layers.4.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "tensors of no known parameter: model.layers.3.input_layernorm.weight"),
        ({"vocab_size": 128}, r"model.embed_tokens.weight has shape \[96, 32\], must have \[128, 32\]"),
        ({"head_dim": 8}, r"layers.3.self_attn.q_proj.weight has shape \[48, 32\], must have \[32, 32\]"),
    ],
)
def test_a_folder_that_does_not_fit_its_config_is_refused_with_names(
    world: DistWorld, make_model: MakeModel, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    source = make_model("qwen2")
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = ParallelismConfig()
    with pytest.raises(RankError, match=message):
        world.run(export_job, parallelism=layout, layout=layout, folder=str(tmp_path), bucket_bytes=5000)


@pytest.mark.parametrize("output_layer", ["equal", "different"])
def test_a_tied_folder_with_an_output_layer_of_its_own_is_refused(
    world: DistWorld, make_model: MakeModel, tmp_path: Path, output_layer: str
) -> None:
    source = make_model("qwen2", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if output_layer == "equal" else embedding.flip(0)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # as in old folders: not a weight
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    arguments = {"layout": ParallelismConfig(), "folder": str(tmp_path), "bucket_bytes": 5000}
    if output_layer == "equal":
        ((_, _, state),) = world.run(export_job, parallelism=ParallelismConfig(), **arguments)
        assert "lm_head.weight" not in state and torch.equal(state["model.embed_tokens.weight"], embedding)
        return
    with pytest.raises(RankError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        world.run(export_job, parallelism=ParallelismConfig(), **arguments)
