"""What a hand-over plan must know of a model, from its config.json alone. Without Megatron."""

from megappo.models.architecture import ModelArchitecture
from megappo.models.families import FAMILIES
from megappo.weights.layouts import ModelWeights


def weights_of(architecture: ModelArchitecture, *, has_value_head: bool = False) -> ModelWeights:
    """Return what says which tensors a policy (or a critic) of this architecture has.

    A critic's value head shares nothing with the embedding (`models.gpt.ValueModel`).
    """
    experts = architecture.experts
    return ModelWeights(
        table=FAMILIES.get(architecture.family).names,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size,
        vocab_size=architecture.vocab_size,
        tied_embeddings=architecture.tied_embeddings,
        has_value_head=has_value_head,
        num_experts=experts.num_experts if experts else 0,
        expert_ffn_hidden_size=experts.ffn_hidden_size if experts else 0,
        dense_layers=tuple(experts.dense_layers) if experts else (),
    )
