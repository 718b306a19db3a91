"""Which model, in which precision, and how a model is made from nothing."""

from dataclasses import dataclass
from enum import Enum


class Dtype(Enum):
    """Parameter and activation type of the Megatron model."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class LayerSpec(Enum):
    """Which implementation of a transformer layer is built."""

    auto = "auto"
    local = "local"
    transformer_engine = "transformer_engine"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy model, a Hugging Face folder (config.json, safetensors, tokenizer)."""

    path: str = ""
    """Folder of the starting weights; actor, reference and (unless critic.path is set) critic start from it."""
    dtype: Dtype = Dtype.float32
    layer_spec: LayerSpec = LayerSpec.auto
    """`auto`: Transformer Engine on CUDA where it is installed, else Megatron's local layers on torch attention."""


@dataclass(kw_only=True, slots=True)
class RandomModelConfig:
    """A small Qwen2-architecture model with random weights and a character tokenizer, made by `megappo sft`."""

    hidden_size: int = 128
    ffn_hidden_size: int = 344
    num_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 256
    vocab_multiple: int = 64
    """The vocabulary is padded up to a multiple of this."""
    init_std: float = 0.05
    """Standard deviation of all weight matrices but the embedding."""
    embedding_std: float = 1.0
    """Standard deviation of the token embedding: 1.0, since with 0.02 a model this small hardly learns."""
    tie_word_embeddings: bool = False
