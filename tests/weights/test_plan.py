"""The invariants of a hand-over plan, over random models and layouts, and the bounds for models that exist."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from megappo.errors import ConfigError
from megappo.weights.buckets import fewest_buckets
from megappo.weights.engine_shards import engine_shards
from megappo.weights.layouts import EngineLayout, ModelWeights, TrainerLayout
from megappo.weights.name_map import EMBEDDING, OUTPUT, VALUE_HEAD, hugging_face_names
from megappo.weights.plan import PlannedTensor, WeightPlan, plan_weights
from tests.weights.weight_models import BUCKET_BYTES, REAL_MODELS, models_and_layouts

LAYOUTS = {
    "one rank": TrainerLayout(world_size=1),
    "tensor 4": TrainerLayout(world_size=4, tensor=4),
    "tensor 2, pipeline 4": TrainerLayout(world_size=8, tensor=2, pipeline=4),
    "pipeline 2, expert 4": TrainerLayout(world_size=16, tensor=2, pipeline=2, expert=4, expert_tensor=2),
}


def tensors_of(plan: WeightPlan) -> list[PlannedTensor]:
    return [tensor for source in plan.sources for bucket in source.buckets for tensor in bucket.tensors]


@settings(max_examples=80, deadline=None)
@given(models_and_layouts())
def test_every_tensor_is_fed_once_and_by_the_ranks_of_its_bucket(
    drawn: tuple[ModelWeights, TrainerLayout, int],
) -> None:
    model, trainer, engine = drawn
    plan = plan_weights(model, trainer, bucket_bytes=500, dtype="float32", engine=EngineLayout(tensor=engine))
    names = hugging_face_names(
        model.table, model.num_layers, num_experts=model.num_experts, dense_layers=model.dense_layers
    )
    left_out = {VALUE_HEAD, OUTPUT} if model.tied_embeddings else {VALUE_HEAD}
    assert Counter(tensor.name for tensor in tensors_of(plan)) == Counter(names - left_out)
    for source in plan.sources:
        assert source.ranks <= set(range(trainer.world_size))
        for bucket in source.buckets:
            assert bucket.ranks[0] == source.sender
            assert bucket.meta.names == [tensor.name for tensor in bucket.tensors]
            assert bucket.meta.num_bytes <= 500 or len(bucket.tensors) == 1
            assert sum(bucket.bytes_of(rank) for rank in bucket.ranks) == bucket.meta.num_bytes
            for tensor in bucket.tensors:
                fed = np.zeros(tensor.length, int)
                for piece in tensor.pieces:
                    assert piece.rank in bucket.ranks
                    fed[piece.start : piece.stop] += 1
                assert (fed == 1).all(), tensor
    senders = [source.sender for source in plan.sources]
    assert senders == sorted(set(senders))


@settings(max_examples=60, deadline=None)
@given(models_and_layouts())
def test_every_element_of_every_engine_rank_is_fed_once(drawn: tuple[ModelWeights, TrainerLayout, int]) -> None:
    model, trainer, engine = drawn
    plan = plan_weights(model, trainer, bucket_bytes=500, dtype="float32", engine=EngineLayout(tensor=engine))
    for tensor in tensors_of(plan):
        held = np.zeros(tensor.length, int)
        for shard in engine_shards(plan, tensor):
            fed = np.zeros(tensor.length, int)
            for piece in shard.feeds:
                fed[piece.start : piece.stop] += 1
                whole = next(own for own in tensor.pieces if own.rank == piece.rank)
                assert whole.start <= piece.start and piece.stop <= whole.stop
            own = np.zeros(tensor.length, int)
            own[shard.start : shard.stop] = 1
            assert (fed == own).all(), shard
            assert shard.num_bytes == tensor.meta.num_bytes // tensor.length * own.sum()
            held += own
        copies = 1
        if tensor.partition.value is None:
            copies = engine
        elif tensor.name.split(".")[-2] in ("k_proj", "v_proj"):
            copies = max(1, engine // model.num_key_value_heads)
        assert (held == copies).all(), tensor


@settings(max_examples=40, deadline=None)
@given(models_and_layouts())
def test_the_ranks_of_an_engine_hold_their_fused_parameters_whole(
    drawn: tuple[ModelWeights, TrainerLayout, int],
) -> None:
    """Rows of all tensors of a fused parameter lie one after the other."""
    model, trainer, engine = drawn
    plan = plan_weights(model, trainer, bucket_bytes=500, dtype="float32", engine=EngineLayout(tensor=engine))
    rows: dict[tuple[int, str, int | None], list[range]] = {}
    for tensor in tensors_of(plan):
        for shard in engine_shards(plan, tensor):
            length = shard.stop - shard.start if tensor.partition.value == 0 else tensor.meta.shape[0]
            key = shard.rank, shard.name, shard.expert
            rows.setdefault(key, []).append(range(shard.offset, shard.offset + length))
    for (_, name, _), found in rows.items():
        ordered = sorted(found, key=lambda part: part.start)
        assert ordered[0].start == 0
        assert all(before.stop == after.start for before, after in pairwise(ordered)), name
        fused = {"qkv_proj": 3, "gate_up_proj": 2, "w13_weight": 2}
        assert len(found) == next((count for part, count in fused.items() if part in name), 1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("Qwen3 30B")) for name in REAL_MODELS]
)
def test_bounds_hold_for_models_that_exist(name: str, layout: TrainerLayout) -> None:
    model = REAL_MODELS[name]
    plan = plan_weights(model, layout, bucket_bytes=BUCKET_BYTES, dtype="bfloat16")
    limit = 2 * max(BUCKET_BYTES, *(tensor.meta.num_bytes for tensor in tensors_of(plan)))
    for source in plan.sources:
        assert source.bucket_buffer + source.receive_buffer <= limit
        assert all(part <= limit for part in source.part_buffers.values())
        for experts in (False, True):
            sizes = [
                tensor.meta.num_bytes
                for bucket in source.buckets
                for tensor in bucket.tensors
                if bucket.is_of_experts is experts
            ]
            if not sizes:
                continue
            calls = sum(bucket.is_of_experts is experts for bucket in source.buckets)
            small = sum(size for size in sizes if size <= BUCKET_BYTES)
            alone = sum(size > BUCKET_BYTES for size in sizes)
            # Nine tenths full, or as full as whole tensors allow (four of Qwen2.5 7B's largest do not fit).
            at_best = calls == fewest_buckets(sizes, BUCKET_BYTES)
            assert at_best or calls <= alone + 1 + small / (0.9 * BUCKET_BYTES)


def test_a_hand_computed_plan() -> None:
    """Two layers of one key/value head and two query heads on two stages of two ranks; rank 4 starts the second."""
    model = ModelWeights(
        table=REAL_MODELS["Llama 3 8B"].table,
        num_layers=2,
        hidden_size=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=3,
        ffn_hidden_size=8,
        vocab_size=5,
        tied_embeddings=False,
    )
    trainer = TrainerLayout(world_size=8, tensor=2, pipeline=2)
    plan = plan_weights(
        model, trainer, bucket_bytes=10_000, dtype="bfloat16", engine=EngineLayout(tensor=4), adapted=("down_proj",)
    )
    assert [(source.stage, source.expert_rank, source.sender) for source in plan.sources] == [
        (0, None, 0),
        (1, None, 4),
    ]
    first, second = ({tensor.name: tensor for tensor in source.buckets[0].tensors} for source in plan.sources)
    assert set(first) - set(second) >= {EMBEDDING} and OUTPUT in second and "model.norm.weight" in second
    embedding = first[EMBEDDING]
    assert embedding.meta.shape == [5, 4] and embedding.meta.num_bytes == 40
    assert [(piece.rank, piece.start, piece.stop) for piece in embedding.pieces] == [(0, 0, 3), (1, 3, 5)]
    down = second["model.layers.1.mlp.down_proj.weight"]
    assert down.meta.shape == [4, 8] and down.merges_adapter
    assert [(piece.rank, piece.start, piece.stop) for piece in down.pieces] == [(4, 0, 4), (5, 4, 8)]
    assert down.shape_of(down.pieces[1]) == [4, 4]
    norm = second["model.norm.weight"]
    assert [(piece.rank, piece.start, piece.stop) for piece in norm.pieces] == [(4, 0, 1)]
    # The four ranks of the engine share two key heads of three rows, two ranks each, after one query head of three.
    keys = engine_shards(plan, first["model.layers.0.self_attn.k_proj.weight"])
    assert [(shard.start, shard.stop, shard.offset) for shard in keys] == [(0, 3, 3), (0, 3, 3), (3, 6, 3), (3, 6, 3)]
    assert keys[3].name == "model.layers.0.self_attn.qkv_proj.weight"
    assert [(piece.rank, piece.start, piece.stop) for piece in keys[3].feeds] == [(1, 3, 6)]
    # SGLang pads five rows to 64, sixteen for each of four ranks: the first has all of them.
    vocabulary = engine_shards(plan, embedding)
    assert [(shard.start, shard.stop) for shard in vocabulary] == [(0, 5), (5, 5), (5, 5), (5, 5)]
    up = engine_shards(plan, second["model.layers.1.mlp.up_proj.weight"])
    assert [(shard.name.split(".")[-2], shard.offset, shard.start) for shard in up] == [
        ("gate_up_proj", 2, start) for start in (0, 2, 4, 6)
    ]


def test_experts_are_sent_by_the_first_rank_that_holds_them() -> None:
    model = REAL_MODELS["Qwen3 30B-A3B"]
    trainer = TrainerLayout(world_size=8, tensor=4, expert=2, expert_tensor=2)
    plan = plan_weights(model, trainer, bucket_bytes=BUCKET_BYTES, dtype="bfloat16")
    assert [(source.expert_rank, source.sender) for source in plan.sources] == [(0, 0), (1, 2)]
    assert [source.ranks for source in plan.sources] == [{0, 1, 2, 3}, {2, 3}]
    names = [
        {
            int(tensor.name.split(".")[5])
            for bucket in source.buckets
            if bucket.is_of_experts
            for tensor in bucket.tensors
        }
        for source in plan.sources
    ]
    assert names == [set(range(64)), set(range(64, 128))]
    assert not any(not bucket.is_of_experts for bucket in plan.sources[1].buckets)


def test_a_critic_has_a_value_head_instead_of_an_output_layer() -> None:
    model = ModelWeights(**{**_fields(REAL_MODELS["Qwen2.5 0.5B"]), "has_value_head": True})
    plan = plan_weights(model, TrainerLayout(world_size=1), bucket_bytes=BUCKET_BYTES, dtype="float32")
    names = {tensor.name: tensor.meta.shape for tensor in tensors_of(plan)}
    assert names[VALUE_HEAD] == [1, 896] and OUTPUT not in names and EMBEDDING in names


@pytest.mark.parametrize("engine", [1, 2, 4, 8])
def test_engines_may_have_fewer_or_more_ranks_than_the_trainer(engine: int) -> None:
    plan = plan_weights(
        REAL_MODELS["Llama 3 8B"],
        LAYOUTS["tensor 2, pipeline 4"],
        bucket_bytes=BUCKET_BYTES,
        dtype="bfloat16",
        engine=EngineLayout(tensor=engine),
    )
    (query,) = (tensor for tensor in tensors_of(plan) if tensor.name == "model.layers.9.self_attn.q_proj.weight")
    shards = engine_shards(plan, query)
    assert [shard.stop - shard.start for shard in shards] == [4096 // engine] * engine
    # Layers 8 to 15 are on the second stage, ranks 2 and 3.
    feeding = [[piece.rank for piece in shard.feeds] for shard in shards]
    assert feeding == [[2, 3]] if engine == 1 else feeding == [[2]] * (engine // 2) + [[3]] * (engine // 2)


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        (3, {}, "rollout.tensor=3 must divide actor.parallelism.tensor=2 or be a multiple of it: else shards of the "
                "two overlap (use 1 or 2, or a multiple of 2)"),
        (4, {}, "rollout.tensor=4 must divide model.num_attention_heads=6 (use 1, 2, 3 or 6)"),
        (6, {"num_key_value_heads": 4}, "rollout.tensor=6 must divide model.num_key_value_heads=4 or be a multiple of "
                "it (use 1, 2 or 4, or a multiple of 4)"),
    ],
)  # fmt: skip
def test_engines_that_do_not_suit_are_refused_with_the_rule(engine: int, changes: dict[str, int], message: str) -> None:
    model = {**_fields(REAL_MODELS["Llama 3 8B"]), "num_attention_heads": 6, "num_key_value_heads": 6} | changes
    with pytest.raises(ConfigError) as caught:
        plan_weights(
            ModelWeights(**model | {"ffn_hidden_size": 12, "num_layers": 2}),
            TrainerLayout(world_size=2, tensor=2),
            bucket_bytes=BUCKET_BYTES,
            dtype="bfloat16",
            engine=EngineLayout(tensor=engine),
        )
    assert f"config error: {message}" in str(caught.value).splitlines()


def _fields(model: ModelWeights) -> dict[str, object]:
    return {name: getattr(model, name) for name in ModelWeights.__dataclass_fields__}
