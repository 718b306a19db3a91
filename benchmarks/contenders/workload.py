"""Workload cpu-grpo-v1: GRPO steps of a tiny Qwen2 model on random prompts. The same files feed all contenders."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

SEED = 0
PROMPTS, SAMPLES, PROMPT_TOKENS = 32, 4, 32
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-4, 0.2, 1.0
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
STEPS_OF_PROMPTS = 8
"""Steps before a prompt comes again."""


@dataclass(kw_only=True, frozen=True)
class Workload:
    """One case of it."""

    key: str
    vocabulary: int
    new_tokens: int
    fixed_length: bool
    """All responses have `new_tokens` tokens; else an end token, about one in `vocabulary`, ends them."""

    @property
    def words(self) -> int:
        """Tokens that are no special ones; the token of id i is the word wi."""
        return self.vocabulary - 3

    @property
    def end_token(self) -> int:
        """Id of the end token."""
        return self.vocabulary - 2

    def prompts(self) -> list[str]:
        """Return random prompts."""
        numbers = random.Random(1)
        count = PROMPTS * STEPS_OF_PROMPTS
        return [" ".join(f"w{numbers.randrange(self.words)}" for _ in range(PROMPT_TOKENS)) for _ in range(count)]


WORKLOADS = {
    "A": Workload(key="A", vocabulary=1024, new_tokens=64, fixed_length=True),
    "B": Workload(key="B", vocabulary=64, new_tokens=256, fixed_length=False),
}


def even_share(text: str) -> float:
    """The reward: the share of words with an even number, of those that are left without special tokens."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def write_prompts(workload: Workload, path: Path) -> None:
    """Write the prompts as JSON lines."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in workload.prompts()), encoding="utf-8")
