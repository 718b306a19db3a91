"""Rules about which pipeline stage holds which layers of a model; the same before a run and where a model is built.

A part is what a stage counts: a layer, and the embedding or the head where the layout says that they count as one.
"""

from typing import Protocol

from megappo.config.parallelism import ParallelismConfig
from megappo.errors import Violation


class StageSizes(Protocol):
    """What says which stage holds how many layers; as in `ParallelismConfig`."""

    @property
    def pipeline(self) -> int: ...
    @property
    def first_stage_layers(self) -> int | None: ...
    @property
    def last_stage_layers(self) -> int | None: ...
    @property
    def embedding_is_layer(self) -> bool: ...
    @property
    def head_is_layer(self) -> bool: ...
    @property
    def virtual_pipeline(self) -> int | None: ...


def pipeline_violations(layout: ParallelismConfig, num_layers: int, *, key: str) -> list[Violation]:
    """Return the first reason why a model of `num_layers` layers cannot be cut into the stages of `layout`.

    Args:
        key: of the layout, for example actor.parallelism.
    """
    if layout.pipeline < 1 or (layout.virtual_pipeline or 1) < 1:
        return []  # refused as a value
    for rule in (_one_way_to_cut, _stages_share_the_layers, _chunks_divide_the_stages, _every_chunk_has_a_layer):
        violation = rule(layout, num_layers, key)
        if violation is not None:
            return [violation]
    return []


def chunk_layers(layout: ParallelismConfig, num_layers: int) -> list[int]:
    """Return the different numbers of layers of the model's chunks, or of its stages where these are not cut, smallest
    first. The layout must suit the model."""
    chunks = layout.virtual_pipeline or 1
    first, middle, last = (parts // chunks for parts in _parts_per_stage(layout, num_layers))
    # Only the first chunk of the first stage has the embedding, only the last one of the last stage the head.
    found = {first - layout.embedding_is_layer, last - layout.head_is_layer}
    if chunks > 1:
        found |= {first, last}
    if layout.pipeline > 2:
        found.add(middle)
    return sorted(found)


def place_of_layers(layout: StageSizes, num_layers: int) -> list[tuple[int, int]]:
    """Return (pipeline stage, chunk of the stage) of each layer: chunk after chunk, and in each of them stage after
    stage. The layout must suit the model."""
    given = {0: layout.first_stage_layers, layout.pipeline - 1: layout.last_stage_layers}
    sizes = {stage: size for stage, size in given.items() if size is not None}
    left = num_layers + layout.embedding_is_layer + layout.head_is_layer - sum(sizes.values())
    chunks = layout.virtual_pipeline or 1
    places: list[tuple[int, int]] = []
    for chunk in range(chunks):
        for stage in range(layout.pipeline):
            parts = sizes.get(stage, left // max(layout.pipeline - len(sizes), 1)) // chunks
            parts -= layout.embedding_is_layer and stage == 0 and chunk == 0
            parts -= layout.head_is_layer and stage == layout.pipeline - 1 and chunk == chunks - 1
            places += [(stage, chunk)] * parts
    assert len(places) == num_layers, f"{len(places)} of {num_layers} layers have a stage"
    return places


def divisors(number: int) -> str:
    """Return the divisors of a positive number in words: `1, 2 or 4`."""
    found = [str(candidate) for candidate in range(1, number + 1) if number % candidate == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _counted(layout: ParallelismConfig) -> int:
    """Parts beside the layers."""
    return layout.embedding_is_layer + layout.head_is_layer


def _given(layout: ParallelismConfig) -> list[int]:
    """Sizes of the stages that have one of their own."""
    return [size for size in (layout.first_stage_layers, layout.last_stage_layers) if size is not None]


def _one_way_to_cut(layout: ParallelismConfig, num_layers: int, key: str) -> Violation | None:
    options = ("first_stage_layers", "last_stage_layers", "embedding_is_layer", "head_is_layer")
    used = [name for name in options if getattr(layout, name)]
    if used and layout.pipeline == 1:
        rule, remedy = f"needs {key}.pipeline > 1", "leave it out"
    elif _counted(layout) and _given(layout):
        rule = f"cannot be combined with {key}.{used[0]}"
        remedy = "give the sizes of the first and last stage, or let the embedding and the head count"
    else:
        return None
    return Violation(key=f"{key}.{used[-1]}", value=getattr(layout, used[-1]), rule=rule, remedy=remedy)


def _stages_share_the_layers(layout: ParallelismConfig, num_layers: int, key: str) -> Violation | None:
    given = _given(layout)
    left, stages = num_layers + _counted(layout) - sum(given), layout.pipeline - len(given)
    if (left == 0) if stages == 0 else (left >= stages and left % stages == 0):
        return None
    if not given:
        counted = f" and {_counted(layout)} for embedding and head" if _counted(layout) else ""
        rule = f"must divide model.num_hidden_layers={num_layers}{counted}"
        remedy = f"use {divisors(left)}, or give first_stage_layers or last_stage_layers"
        return Violation(key=f"{key}.pipeline", value=layout.pipeline, rule=rule, remedy=remedy)
    name = "last_stage_layers" if layout.first_stage_layers is None else "first_stage_layers"
    both, others = (
        f"and last_stage_layers={given[-1]}",
        f"the other {stages} stages" if stages > 1 else "the other stage",
    )
    if stages == 0:
        rule = f"{both}, the only stages, must hold the {num_layers} layers of the model, not {sum(given)}"
        remedy = f"make their sum {num_layers}"
    else:
        taken = f"{both} leave" if len(given) == 2 else "leaves"
        rule = f"{taken} {max(left, 0)} of model.num_hidden_layers={num_layers} for {others}"
        remedy = f"leave {stages} or a multiple of it" if stages > 1 else "leave 1 or more"
    return Violation(key=f"{key}.{name}", value=given[0], rule=rule, remedy=remedy)


def _parts_per_stage(layout: ParallelismConfig, num_layers: int) -> tuple[int, int, int]:
    """Return the parts of the first, of a middle (the first again where there is none) and of the last stage."""
    given = _given(layout)
    stages = layout.pipeline - len(given)
    share = (num_layers + _counted(layout) - sum(given)) // stages if stages else None
    first, last = layout.first_stage_layers or share, layout.last_stage_layers or share
    assert first is not None and last is not None
    return first, share or first, last


def _chunks_divide_the_stages(layout: ParallelismConfig, num_layers: int, key: str) -> Violation | None:
    chunks = layout.virtual_pipeline or 1
    parts = _parts_per_stage(layout, num_layers)
    uneven = [size for size in parts if size % chunks]
    if not uneven:
        return None
    if len(set(parts)) == 1 and not _counted(layout):
        rule = f"times {layout.pipeline} stages must divide model.num_hidden_layers={num_layers}"
    else:
        rule = f"must divide the {uneven[0]} layers of a stage (embedding and head included where they count)"
    return Violation(
        key=f"{key}.virtual_pipeline",
        value=layout.virtual_pipeline,
        rule=rule,
        remedy=f"use one of {divisors(uneven[0])}, or null",
    )


def _every_chunk_has_a_layer(layout: ParallelismConfig, num_layers: int, key: str) -> Violation | None:
    chunks = layout.virtual_pipeline or 1
    first, _, last = _parts_per_stage(layout, num_layers)
    for name, size in (("embedding_is_layer", first), ("head_is_layer", last)):
        if getattr(layout, name) and size // chunks <= 1:
            rule = "leaves a model chunk without layers"
            remedy = f"use fewer stages or chunks, or {key}.{name}=false"
            return Violation(key=f"{key}.{name}", value=True, rule=rule, remedy=remedy)
    return None
