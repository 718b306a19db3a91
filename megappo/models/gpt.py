"""The Megatron models that are built: a language model and, with another head, a value model."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megappo.models.architecture import ModelArchitecture
from megappo.models.attention import PackedSequences, rotation_at
from megappo.models.output_layer import UnprojectedOutput
from megappo.models.value_head import ValueHead


class LanguageModel(GPTModel):
    """One chunk of a language model. On the last stage forward returns hidden states [1, T, hidden] of all T tokens, to
    be multiplied by `output_weight`; their gradient is summed over the tensor-parallel ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        architecture: ModelArchitecture,
        *,
        vp_stage: int | None,
        tied: bool | None = None,
    ) -> None:
        """Build the chunk of this pipeline rank and virtual stage (None: stages are not cut further).

        Args:
            tied: whether the output layer is the token embedding; None: what the architecture says.
        """
        super().__init__(
            config,
            spec,  # type: ignore[arg-type]  # transformer_block.py:199 takes both
            vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,  # type: ignore[arg-type]  # any positive number
            share_embeddings_and_output_weights=architecture.tied_embeddings if tied is None else tied,
            vp_stage=vp_stage,
        )
        self.architecture = architecture
        if self.post_process:
            projection: Any = self.output_layer  # Any: what Megatron made there
            self.output_layer = UnprojectedOutput(projection)

    @property
    def output_weight(self) -> torch.Tensor:
        """[vocab / tensor, hidden] output weight of this rank, on the last stage: the token embedding where tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None, "not the last stage"
        return weight

    def _preprocess(self, *args: Any, **options: Any) -> tuple[Any, ...]:  # Any: GPTModel's arguments
        """Embed tokens, wanting a gradient; leave the rotation of packed sequences to the local core attention."""
        hidden, angles, *rest = super()._preprocess(*args, **options)
        if hidden is not None and torch.is_grad_enabled() and not hidden.requires_grad:
            # Over a frozen embedding: recomputation is an autograd function, which drops the gradients of what is
            # trained inside where no input wants one (tensor_parallel/random.py, CheckpointFunction).
            hidden.requires_grad_()
        packed = options.get("packed_seq_params")
        # The fused rotation is the one of Transformer Engine, which does it by itself.
        if isinstance(packed, PackedSequences) and angles is not None and not self.config.apply_rope_fusion:
            packed.rotation = rotation_at(packed.positions, angles, dtype=self.config.params_dtype)
            angles = None
        return hidden, angles, *rest


class ValueModel(LanguageModel):
    """One chunk of a value model. On the last stage forward returns values [1, T] float32."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        architecture: ModelArchitecture,
        *,
        vp_stage: int | None,
    ) -> None:
        # A value head shares nothing with the embedding.
        super().__init__(config, spec, architecture, vp_stage=vp_stage, tied=False)
        if self.post_process:
            # Megatron offers no way to leave the vocabulary projection out; it is freed here.
            self.output_layer = ValueHead(config)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # Any: GPTModel's arguments
        output = super().forward(*args, **kwargs)
        return output.squeeze(-1) if self.post_process else output
