"""What a plan must know of a model, from its config.json: all its parameters, as `megappo.planning` takes them."""

from math import prod

from megappo.models.architecture import ModelArchitecture
from megappo.models.weight_shapes import weights_of
from megappo.planning.parameters import ModelParameter, PlannedModel, WholeTensor
from megappo.weights.layouts import EngineLayout
from megappo.weights.name_map import EMBEDDING, OUTPUT, Size, Transform
from megappo.weights.plan import WeightPlan, exported_parameters


def planned_model(architecture: ModelArchitecture, *, has_value_head: bool = False) -> PlannedModel:
    """Return all parameters of a policy, or of a critic (`has_value_head`), of this architecture."""
    weights = weights_of(architecture, has_value_head=has_value_head)
    # A critic's head is its own, so nothing of it is tied (`models.gpt.ValueModel`).
    tied = architecture.tied_embeddings and not has_value_head
    lengths = weights.lengths()
    parameters = [
        ModelParameter(
            name=use.canonical,
            tensors=tuple(
                WholeTensor(name=name, shape=tuple(lengths[size] for size in shape))
                for name, shape in zip(use.hugging_face, use.rule.shapes)
            ),
            cut=use.rule.partition.value,
            layer=use.layer,
            expert=use.expert,
            is_padded=use.rule.transform is Transform.vocabulary,
        )
        for use in exported_parameters(weights)
    ]
    return PlannedModel(
        parameters=tuple(sorted(parameters, key=ModelParameter.order)),
        num_layers=weights.num_layers,
        num_experts=weights.num_experts,
        tied_embeddings=tied,
        has_value_head=has_value_head,
    )


def engine_padding(plan: WeightPlan, *, element_bytes: int) -> int:
    """Return the most bytes that a rank of an engine has in rows of a vocabulary that belong to no token."""
    engine, hidden = plan.engine, plan.model.hidden_size
    length = plan.model.vocab_size
    held = _rows(engine, length)
    rows = engine.padded_vocabulary(length) // engine.tensor - min(held)
    matrices = [name for name in (EMBEDDING, OUTPUT) if name == EMBEDDING or not plan.model.tied_embeddings]
    return len(matrices) * prod((rows, hidden, element_bytes))


def _rows(engine: EngineLayout, length: int) -> list[int]:
    return [
        len(engine.part(Size.vocabulary, length, rank=rank, num_key_value_heads=1)) for rank in range(engine.tensor)
    ]
