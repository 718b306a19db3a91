"""What a checkpoint holds, from config.json alone, is what a model that runs says of itself."""

import pytest

from megappo.config.lora import LoraConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.conversion.layout import cut_tensors
from megappo.conversion.stored import StoredTensor, stored_adapters, stored_tensors
from megappo.models.architecture import read_architecture
from megappo.models.build import Head
from megappo.models.families import FAMILIES
from megappo.models.weight_shapes import weights_of
from tests.conversion.conversion_jobs import Case, parts_of_all
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel

LORA = LoraConfig(rank=2, targets=["q_proj", "v_proj", "o_proj"])
LAYOUTS = {
    "one process": (ParallelismConfig(), 1),
    "tensor and pipeline": (ParallelismConfig(tensor=2, pipeline=2, sequence=True), 4),
    "expert": (ParallelismConfig(expert=2, pipeline=2), 4),
    "expert tensor": (ParallelismConfig(tensor=2, expert_tensor=2, sequence=True), 2),
}


def _cases(make_model: MakeModel, layout: ParallelismConfig) -> list[Case]:
    has_experts = layout.expert * layout.expert_tensor > 1
    cases: list[Case] = []
    for name in FAMILIES.names():
        if has_experts and not FAMILIES.get(name).traits.experts:
            continue
        folder = str(make_model(name, vocab_size=97, tie_word_embeddings=name == "qwen3"))
        cases.append((folder, Head.language_model, None))
        cases.append((folder, Head.value_function, None))
        cases.append((folder, Head.language_model, LORA))
    return cases


def _expected(case: Case) -> list[StoredTensor]:
    folder, head, lora = case
    model = weights_of(read_architecture(folder), has_value_head=head is Head.value_function)
    return stored_tensors(model) if lora is None else stored_adapters(model, lora)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_shapes_and_cuts_are_those_of_the_ranks_of_every_family(
    world: DistWorld, make_model: MakeModel, layout: str
) -> None:
    parallelism, size = LAYOUTS[layout]
    cases = _cases(make_model, parallelism)
    ranks = world.run(parts_of_all, world_size=size, parallelism=parallelism, layout=parallelism, cases=cases)
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        held = [part for rank in of_ranks for part in rank.meta]
        tensors = _expected(case)
        assert {part.key: part.global_shape for part in held} == {tensor.key: tensor.shape for tensor in tensors}
        cut = cut_tensors(tensors, parallelism, num_layers=4)
        assert {(part.key, part.global_offset, part.local_shape) for part in held} == {
            (part.tensor.key, part.offset, part.shape) for part in cut
        }
        for rank, parts in enumerate(of_ranks):
            own = {(part.tensor.key, part.offset) for part in cut if part.rank == rank}
            assert own <= {(part.key, part.global_offset) for part in parts.meta}, (case, rank)
