"""Models and layouts that plans are tried on."""

from hypothesis import strategies as st

from megappo.weights.layouts import ModelWeights, TrainerLayout
from megappo.weights.name_map import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, NameTable

BUCKET_BYTES = 512 * 1024**2
_LLAMA_8B = {
    "table": LLAMA,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "ffn_hidden_size": 14336,
    "vocab_size": 128256,
    "tied_embeddings": False,
}
_SIZES: dict[str, dict[str, object]] = {
    "Llama 3 8B": {},
    "Llama 3 70B": {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28672},
    "Qwen2.5 0.5B": {
        "table": QWEN2, "num_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "ffn_hidden_size": 4864, "vocab_size": 151936, "tied_embeddings": True,
    },
    "Qwen2.5 7B": {
        "table": QWEN2, "num_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "ffn_hidden_size": 18944, "vocab_size": 152064,
    },
    "Qwen3 32B": {
        "table": QWEN3, "num_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "ffn_hidden_size": 25600,
        "vocab_size": 151936,
    },
    "Qwen3 30B-A3B": {
        "table": QWEN3_MOE, "num_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "expert_ffn_hidden_size": 768,
    },
    "Mixtral 8x7B": {"table": MIXTRAL, "vocab_size": 32000, "num_experts": 8, "expert_ffn_hidden_size": 14336},
}  # fmt: skip
REAL_MODELS = {name: ModelWeights(**(_LLAMA_8B | changes)) for name, changes in _SIZES.items()}  # type: ignore[arg-type]


def _powers(most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([size for size in (1, 2, 4, 8) if size <= most])


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelWeights, TrainerLayout, int]:
    """A tiny model, a trainer's layout and the ranks of an engine that suit it."""
    tensor, pipeline, engine = draw(_powers(4)), draw(st.integers(1, 3)), draw(_powers(8))
    chunks = draw(st.integers(1, 2)) if pipeline > 1 else 1
    table: NameTable = draw(st.sampled_from([LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL]))
    expert, expert_tensor = 1, 1
    experts: dict[str, object] = {}
    # Embedding and head may count as layers; the other stages then have one layer more per chunk.
    counted = {name: pipeline > 1 and draw(st.booleans()) for name in ("embedding_is_layer", "head_is_layer")}
    parts = draw(st.integers(2 if any(counted.values()) else 1, 3)) * chunks
    num_layers = parts * pipeline - sum(counted.values())
    first = None
    if pipeline > 1 and not any(counted.values()) and draw(st.booleans()):
        first = draw(st.integers(1, 2)) * chunks
        num_layers = first + parts * (pipeline - 1)
    if table in (QWEN3_MOE, MIXTRAL):
        expert, expert_tensor = draw(_powers(4)), draw(_powers(2))
        dense = draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1)) if table is QWEN3_MOE else set()
        experts = {
            "num_experts": expert * draw(st.integers(1, 2)),
            "expert_ffn_hidden_size": 8 * draw(st.integers(1, 2)),
            "dense_layers": tuple(sorted(dense)),
        }
    key_value_heads = tensor * draw(st.integers(1, 2))
    model = ModelWeights(
        table=table,
        num_layers=num_layers,
        hidden_size=6,
        num_attention_heads=max(key_value_heads, 8) * draw(st.integers(1, 2)),
        num_key_value_heads=key_value_heads,
        head_dim=draw(st.integers(1, 3)),
        ffn_hidden_size=8 * draw(st.integers(1, 2)),
        vocab_size=draw(st.integers(1, 200)),
        tied_embeddings=draw(st.booleans()),
        **experts,  # type: ignore[arg-type]
    )
    stage = tensor * expert * expert_tensor * draw(st.integers(1, 2))
    layout = TrainerLayout(
        world_size=stage * pipeline,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=chunks if chunks > 1 else None,
        first_stage_layers=first,
        expert=expert,
        expert_tensor=expert_tensor,
        **counted,
    )
    return model, layout, engine
