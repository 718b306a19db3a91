"""The invariants of megappo/models/sharded_state.py."""

import math

import numpy as np
import pytest

from megappo.config.lora import LoraConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.models.build import Head
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel
from tests.models.sharded_jobs import Part, RankParts, parts_of

ONE = ParallelismConfig()
LORA = LoraConfig(rank=2)
# family, changes of the model, head, adapters, layouts with their numbers of processes.
CASES = {
    "dense": (
        "qwen2",
        {"vocab_size": 97},
        Head.language_model,
        None,
        [
            (ParallelismConfig(tensor=2), 4),
            (ParallelismConfig(tensor=2, sequence=True, context=1, pipeline=2), 4),
            (ParallelismConfig(pipeline=2, virtual_pipeline=2), 2),
            (ParallelismConfig(pipeline=2, first_stage_layers=3), 2),
            (ParallelismConfig(context=2), 4),
        ],
    ),
    "tied": (
        "qwen3",
        {"tie_word_embeddings": True, "vocab_size": 97},
        Head.language_model,
        None,
        [(ParallelismConfig(pipeline=2), 4), (ParallelismConfig(tensor=2, pipeline=2, virtual_pipeline=2), 4)],
    ),
    "experts": (
        "qwen3_moe",
        {},
        Head.language_model,
        None,
        [
            (ParallelismConfig(expert=2), 2),
            (ParallelismConfig(tensor=2, sequence=True, expert=2, expert_tensor=1), 2),
            (ParallelismConfig(tensor=2, sequence=True, expert_tensor=2), 4),
        ],
    ),
    "critic": ("qwen3", {"tie_word_embeddings": True}, Head.value_function, None, [(ParallelismConfig(pipeline=2), 2)]),
    "adapters": ("qwen2", {}, Head.language_model, LORA, [(ParallelismConfig(tensor=2, pipeline=2), 4)]),
}


def _shapes(ranks: list[RankParts]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for rank in ranks for part in rank.real):
        assert shapes.setdefault(part.key, part.global_shape) == part.global_shape
    return shapes


def _writes_per_element(ranks: list[RankParts], key: str, shape: tuple[int, ...]) -> np.ndarray:
    count = np.zeros(shape, int)
    for part in (part for rank in ranks for part in rank.real):
        if part.key == key and part.is_main:
            count[_slices(part)] += 1
    return count


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.global_offset, part.local_shape))


@pytest.mark.parametrize("case", CASES)
def test_keys_and_shapes_are_the_same_in_every_layout_and_are_stored_once(
    world: DistWorld, make_model: MakeModel, case: str
) -> None:
    family, changes, head, lora, layouts = CASES[case]
    folder = str(make_model(family, **changes))

    def run(layout: ParallelismConfig, size: int) -> list[RankParts]:
        return world.run(
            parts_of, world_size=size, parallelism=layout, folder=folder, layout=layout, head=head, lora=lora
        )

    expected = _shapes(run(ONE, 1))
    assert expected
    for layout, size in layouts:
        ranks = run(layout, size)
        assert _shapes(ranks) == expected, layout
        for key, shape in expected.items():
            assert (_writes_per_element(ranks, key, shape) == 1).all(), (layout, key)
        for rank in ranks:
            assert rank.meta == rank.real
            assert rank.meta_devices == {"meta"}


def test_a_checkpoint_holds_the_numbers_of_the_model_and_nothing_else(world: DistWorld, make_model: MakeModel) -> None:
    """Counted by hand for the tied critic-less model of one vocabulary row that no layout divides."""
    folder = make_model("qwen2", vocab_size=97, tie_word_embeddings=True)
    ranks = world.run(parts_of, parallelism=ONE, folder=str(folder), layout=ONE, head=Head.language_model, lora=None)
    shapes = _shapes(ranks)
    # hidden 32, 4 query and 2 key heads of 12 (48 queries, 24 keys and values each), 48 feed-forward features.
    layer = 32 + (48 + 24 + 24) * 33 + 32 * 48 + 32 + 2 * 48 * 32 + 32 * 48
    assert sum(math.prod(shape) for shape in shapes.values()) == 97 * 32 + 4 * layer + 32
    assert shapes["decoder.layers.3.mlp.linear_fc1.weight_v"] == (48, 32)
    assert "output_layer.weight" not in shapes
