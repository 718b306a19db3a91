"""Sizes of a training step."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class BatchingConfig:
    """prompts -> sequences -> mini-batches (one optimizer step each) -> micro-batches (one forward pass each)."""

    prompts_per_step: int = 32
    """Prompts drawn per step."""
    samples_per_prompt: int = 8
    """Responses sampled per prompt (the group)."""
    ppo_epochs: int = 1
    """Passes over the step's sequences."""
    mini_batch_prompts: int | None = None
    """Prompts whose sequences form one optimizer step; must divide prompts_per_step; None: all."""
    micro_batch_tokens: int = 4096
    """Hard cap of tokens in one micro-batch; a longer sequence runs alone."""
    min_micro_batches: int | None = None
    """Fewest micro-batches per rank and mini-batch; None: 2 * pipeline stages under pipeline parallelism, else 1."""
    balance: bool = True
    """Balance sequence lengths over data-parallel ranks; off: sequences are dealt in order."""

    @property
    def sequences_per_step(self) -> int:
        """Sequences sampled per step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def num_mini_batches(self) -> int:
        """Mini-batches (optimizer steps per epoch) of a full step."""
        return self.prompts_per_step // (self.mini_batch_prompts or self.prompts_per_step)
