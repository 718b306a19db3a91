"""What the plan says, from config.json and the layout alone, is what the ranks hold, send and feed.

By brute force: the tensors of the folder, cut at the places of the plan, are the shards of the ranks' own parameters.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors.torch import load_file

from megappo.config.parallelism import ParallelismConfig
from megappo.device.process_group import init_model_parallel
from megappo.errors import WorkerError
from megappo.models.architecture import read_architecture
from megappo.models.build import Head
from megappo.models.export import WeightExport, iter_export_buckets, plan_export, weight_plan
from megappo.models.families import FAMILIES
from megappo.models.parameters import mapped_parameters
from megappo.models.weight_shapes import weights_of
from megappo.weight_sync.source import WeightSource
from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.layouts import TrainerLayout
from megappo.weights.plan import WeightPlan, plan_weights
from megappo.weights.transforms import split
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel
from tests.models.expert_layouts import EXPERT_LAYOUTS
from tests.models.model_jobs import loaded_model
from tests.train import test_parity

BUCKET_BYTES = 5000
DENSE = [
    (case.layout, case.layout.model_size * len(case.deal))
    for parameters in (*test_parity.LAYOUTS, *test_parity.TIED_LAYOUTS)
    for case in parameters.values
]
SPARSE = [
    *EXPERT_LAYOUTS.values(),
    *(
        (case.layout, case.layout.model_size * len(case.deal))
        for parameters in test_parity.EXPERT_LAYOUTS
        for case in parameters.values
    ),
]


def distinct(rows: list[tuple[ParallelismConfig, int]], world_size: int) -> list[ParallelismConfig]:
    """The layouts of the parity table on so many ranks; each once, whatever moves no weights."""
    found: dict[TrainerLayout, ParallelismConfig] = {}
    for layout, size in rows:
        if size == world_size:
            plain = replace(layout, sequence=layout.tensor > 1)
            found.setdefault(TrainerLayout.of(plain, world_size), plain)
    return list(found.values())


@pytest.mark.parametrize(
    "every", [pytest.param(True, marks=pytest.mark.slow), False], ids=["every model", "one or two models"]
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_plan_of_every_layout_is_what_ranks_hold_and_send(
    world: DistWorld, make_model: MakeModel, world_size: int, every: bool
) -> None:
    """Of every model; or of a sparse one and of two dense ones, which differ in family and in tied embeddings."""
    experts = [name for name in FAMILIES.names() if FAMILIES.get(name).traits.experts]
    dense = [(family, tied) for family in FAMILIES.names() if family not in experts for tied in (False, True)]
    pairs: list[tuple[ParallelismConfig, str]] = []
    for number, layout in enumerate(distinct(DENSE, world_size)):
        # An odd distance: the second one is tied where the first is not.
        chosen = dense if every else [dense[(number + distance) % len(dense)] for distance in (0, 3)]
        # 95 rows: two and four ranks pad them.
        pairs += [(layout, str(make_model(name, tie_word_embeddings=tied, vocab_size=95))) for name, tied in chosen]
    for number, layout in enumerate(distinct(SPARSE, world_size)):
        pairs += [(layout, str(make_model(name))) for name in (experts if every else [experts[number % len(experts)]])]
    assert len(pairs) >= (2 if world_size < 4 else 15) * (3 if every else 1)
    results = world.run(check_plans, world_size=world_size, parallelism=ParallelismConfig(), pairs=pairs)
    for index, (layout, folder) in enumerate(pairs):
        sent = [name for names, _ in (rank[index] for rank in results) for name in names]
        assert sorted(sent) == sorted(load_file(Path(folder) / "model.safetensors")), (layout, folder)
        # Every piece of the plan was compared on the rank that has it.
        plan = plan_of(layout, folder, world_size)
        assert sum(checked for _, checked in (rank[index] for rank in results)) == num_pieces(plan)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TrainerLayout, int]:
    """Stages and chunks of a layout, and a number of layers that they share."""
    pipeline, chunks = draw(st.integers(2, 5)), draw(st.sampled_from([None, 2, 3]))
    share = draw(st.integers(2, 3)) * (chunks or 1)
    sizes = {name: draw(st.integers(1, 3)) * (chunks or 1) for name in ("first_stage_layers", "last_stage_layers")}
    sized = draw(st.sampled_from([(), ("first_stage_layers",), ("last_stage_layers",), tuple(sizes)]))
    counted = draw(st.sampled_from([(), ("embedding_is_layer",), ("embedding_is_layer", "head_is_layer")]))
    counted = () if sized else counted
    chosen = {name: sizes[name] for name in sized} | dict.fromkeys(counted, True)
    num_layers = share * (pipeline - len(sized)) + sum(sizes[name] for name in sized) - len(counted)
    return TrainerLayout(world_size=pipeline, pipeline=pipeline, virtual_pipeline=chunks, **chosen), num_layers


@given(layouts())
def test_stages_hold_the_layers_that_megatron_gives_them(drawn: tuple[TrainerLayout, int]) -> None:
    layout, num_layers = drawn
    given_last = layout.pipeline > 2 or layout.first_stage_layers is None  # as models.build tells Megatron
    config: Any = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers if given_last else None,
        account_for_embedding_in_pipeline_split=layout.embedding_is_layer,
        account_for_loss_in_pipeline_split=layout.head_is_layer,
    )
    stages: dict[int, int] = {}
    for stage in range(layout.pipeline):
        for chunk in range(layout.virtual_pipeline) if layout.virtual_pipeline else [None]:
            first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
            layers = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
            stages |= dict.fromkeys(range(first, first + layers), stage)
    assert layout.stage_of_layers(num_layers) == [stages[layer] for layer in range(num_layers)]


def plan_of(layout: ParallelismConfig, folder: str, world_size: int) -> WeightPlan:
    return plan_weights(
        weights_of(read_architecture(folder)),
        TrainerLayout.of(layout, world_size),
        bucket_bytes=BUCKET_BYTES,
        dtype="float32",
    )


def num_pieces(plan: WeightPlan) -> int:
    return sum(len(tensor.pieces) for source in plan.sources for bucket in source.buckets for tensor in bucket.tensors)


def check_plans(pairs: list[tuple[ParallelismConfig, str]]) -> list[tuple[list[str], int]]:
    """Names that this rank sends and number of pieces that it holds, for each pair."""
    found: list[tuple[list[str], int]] = []
    for layout, of_layout in groupby(pairs, key=lambda pair: pair[0]):
        parallel_state.destroy_model_parallel()
        init_model_parallel(layout, seed=1)
        found += [check_plan(layout, folder) for _, folder in of_layout]
    return found


@torch.no_grad()
def check_plan(layout: ParallelismConfig, folder: str) -> tuple[list[str], int]:
    plan = plan_of(layout, folder, dist.get_world_size())
    chunks = loaded_model(folder, Head.language_model, layout)
    assert weight_plan(chunks, BUCKET_BYTES).sources == plan.sources
    expected = load_file(Path(folder) / "model.safetensors")
    rank = dist.get_rank()
    pieces = {
        tensor.name: (tensor, piece)
        for source in plan.sources
        for bucket in source.buckets
        for tensor, piece in bucket.pieces_of(rank)
    }
    held = dict(shards_of_this_rank(chunks))
    for name, (tensor, piece) in pieces.items():
        dim = tensor.partition.value
        part = expected[name] if dim is None else expected[name].narrow(dim, piece.start, piece.stop - piece.start)
        own = held[name].reshape(-1, *part.shape[1:])[: len(part)]
        assert torch.equal(own, part), f"{layout}, {folder}, rank {rank}: {name}"
        assert tensor.meta.shape == list(expected[name].shape)
    sent: list[str] = []
    shared = {
        name: tensor.clone()
        for meta, flat in iter_export_buckets(chunks, BUCKET_BYTES, shared=True)
        for name, tensor in open_bucket(meta, flat).items()
    }
    mine = [source for source in plan.sources if source.sender == rank]
    buckets = iter(mine[0].buckets) if mine else iter(())
    for meta, flat in iter_export_buckets(chunks, BUCKET_BYTES):
        assert meta == next(buckets).meta and len(flat) == meta.num_bytes
        for name, tensor in open_bucket(meta, flat).items():
            assert torch.equal(tensor, expected[name]) and torch.equal(shared.pop(name), tensor)
        sent += meta.names
    assert next(buckets, None) is None and not shared
    return sent, len(pieces)


class FailingSender:
    """Keeps what it is to send, and fails at one bucket."""

    def __init__(self, fails_at: int = 0) -> None:
        self._fails_at = fails_at
        self._number = 0
        self.sent: dict[str, torch.Tensor] = {}

    def open(self) -> None: ...

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        self._number += 1
        if self._number == self._fails_at:
            raise RuntimeError("Connection closed by an engine")
        self.sent |= open_bucket(bucket, flat.clone())
        return {}

    def close(self) -> None: ...


def test_a_failed_hand_over_leaves_no_rank_waiting_and_the_next_one_is_right(
    world: DistWorld, make_model: MakeModel
) -> None:
    folder = str(make_model("qwen2"))
    # Ranks that wait for ever fail it: the time limit ends them.
    first, second = world.run(
        fail_and_send_again, parallelism=ParallelismConfig(tensor=2), timeout_s=100.0, folder=folder
    )
    assert sorted(first + second) == sorted(2 * list(load_file(Path(folder) / "model.safetensors")))


def fail_and_send_again(folder: str) -> list[str]:
    """For each way of gathering: the sender fails at a bucket, is told to drop the rest, and sends all. Returns the
    names of what it then sent."""
    chunks = loaded_model(folder, Head.language_model, ParallelismConfig(tensor=2))
    expected = load_file(Path(folder) / "model.safetensors")
    plan = plan_export(chunks, BUCKET_BYTES)
    assert plan.takes_part and (len(plan.buckets) >= 3 if plan.sends else not plan.buckets)
    names: list[str] = []
    for shared in (False, True):
        source = WeightSource(
            iter_export_buckets(chunks, BUCKET_BYTES, shared=shared), FailingSender(2) if plan.sends else None
        )
        if plan.sends:
            with pytest.raises(WorkerError, match=r"^bucket from .*: send: Connection closed by an engine$"):
                source.send_rest()
        else:
            assert source.send_rest() == {}
        source = WeightSource(iter_export_buckets(chunks, BUCKET_BYTES, shared=shared), FailingSender())
        if plan.sends:
            source.send_next()
            source.drop_rest()
        else:
            source.send_rest()
        sender = FailingSender()
        WeightSource(iter_export_buckets(chunks, BUCKET_BYTES, shared=shared), sender).send_rest()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in sender.sent.items())
        names += sender.sent
    return names


def test_an_export_used_again_sends_the_weights_of_that_moment_through_the_same_memory(
    world: DistWorld, make_model: MakeModel
) -> None:
    folder = str(make_model("qwen2"))
    first, second = world.run(export_twice, parallelism=ParallelismConfig(tensor=2), folder=folder)
    assert first == list(load_file(Path(folder) / "model.safetensors")) and second == []


@torch.no_grad()
def export_twice(folder: str) -> list[str]:
    """Export, change all weights, export again. Returns the sorted names of what this rank sent."""
    chunks = loaded_model(folder, Head.language_model, ParallelismConfig(tensor=2))
    expected = load_file(Path(folder) / "model.safetensors")
    export = WeightExport(chunks, BUCKET_BYTES, shared=True)
    sent: list[str] = []
    places: set[int] = set()
    for factor in (1.0, 2.0):
        for meta, flat in export.buckets():
            places.add(flat.data_ptr())
            for name, tensor in open_bucket(meta, flat).items():
                assert torch.equal(tensor, factor * expected[name])
                sent.append(name)
        for parameter in chunks[0].parameters():
            parameter *= 2.0
    assert len(places) == (1 if sent else 0)
    half = len(sent) // 2
    assert sent[:half] == sent[half:]
    return sorted(sent[:half])


def shards_of_this_rank(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    for chunk in chunks:
        architecture = chunk.architecture
        for parameter, mapped in mapped_parameters(chunk):  # type: ignore[arg-type]
            for part, name in enumerate(mapped.hugging_face):
                yield (
                    name,
                    split(
                        mapped.transform,
                        parameter,
                        part,
                        num_groups=architecture.num_key_value_heads // tensor,
                        queries_per_group=architecture.num_attention_heads // architecture.num_key_value_heads,
                    ),
                )
