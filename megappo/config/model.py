"""Which model, in which precision, and how a model is made from nothing."""

from dataclasses import dataclass, field
from enum import Enum

from megappo.config.memory import RecomputeConfig


class Dtype(Enum):
    """Parameter and activation type of the Megatron model."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class FamilySource(Enum):
    """Who knows how a model's family is built and what its parameters are called."""

    auto = "auto"
    """megappo, by the `model_type` of config.json."""
    bridge = "bridge"
    """Megatron-Bridge. Refused: see the rule `bridge_cannot_be_installed_beside_the_engine`."""


class LayerSpec(Enum):
    """Which implementation of a transformer layer is built."""

    auto = "auto"
    local = "local"
    transformer_engine = "transformer_engine"


class Fp8Recipe(Enum):
    """How Transformer Engine scales the fp8 operands of the layers' matrix products."""

    delayed = "delayed"
    """One scale per tensor, from the largest values of earlier steps (Ada, Hopper and later)."""
    blockwise = "blockwise"
    """One scale per 1 x 128 or 128 x 128 block (Hopper)."""
    mxfp8 = "mxfp8"
    """One scale per 32 values (Blackwell)."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy model, a Hugging Face folder (config.json, safetensors, tokenizer)."""

    path: str = ""
    """Folder of the starting weights; actor, reference and (unless critic.path is set) critic start from it."""
    random_weights: bool = False
    """Start from random weights instead, drawn where they lie: `path` needs a config.json only. For measurements."""
    family: FamilySource = FamilySource.auto
    dtype: Dtype = Dtype.float32
    fp32_head: bool = False
    """Compute the logits of log-probs and entropy from 16-bit hidden states and weights in fp32, so that they are not
    rounded to 16 bits (bfloat16 keeps 8 bits: a logit of 30 is off by up to 0.06). The softmax is in fp32 either way.
    Costs the speed of 16-bit matrix products in the output projection."""
    layer_spec: LayerSpec = LayerSpec.auto
    """`auto`: Transformer Engine on CUDA where it is installed, else Megatron's local layers on torch attention."""
    fp8: Fp8Recipe | None = None
    """Matrix products of the layers in fp8; parameters stay in `dtype`. CUDA with Transformer Engine only."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)


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
