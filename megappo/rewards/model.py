"""Scores of a reward model: a transformers sequence-classification folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.errors import DataError
from megappo.rewards.checks import check_count, check_switch
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True)
class ModelReward:
    """Score prompt + response text by the first label of a sequence-classification model, read at the last token.

    The text is tokenised by the reward model's own tokenizer, so it need not be the policy's, and read as the workers
    of `reward_model` read it (`megappo.data.preferences`). Sequences run in batches of like length, padded right.
    """

    path: str | None
    """`reward.model_path`."""
    batch_size: int = 16
    """Sequences per forward pass."""
    device: str = "cpu"
    """Torch device that holds the model."""
    end_token: bool = True
    """Put the tokenizer's end token behind a response that ended by itself, as models of `megappo rm` have seen it."""
    # Any: transformers is imported when a model reward is made, not with this module.
    _model: Any = field(init=False)
    _tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if self.path is None or not Path(self.path).is_dir():
            raise DataError(f"reward model: reward.model_path={self.path} is not a folder (give a Hugging Face model)")
        check_count("model", "batch_size", self.batch_size, least=1)
        check_switch("model", "end_token", self.end_token)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
            self._model = AutoModelForSequenceClassification.from_pretrained(self.path, local_files_only=True)
            self._model.to(self.device).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DataError(f"reward model: {self.path} cannot be loaded: {error}") from error
        if self.end_token and self._tokenizer.eos_token_id is None:
            raise DataError(f"reward model: {self.path} has no end token (set params.end_token=false)")
        if self._model.config.get_text_config().pad_token_id is None:
            # Without it the model cannot tell the last token of a padded sequence.
            raise DataError(f"reward model: {self.path} has no pad token (set pad_token_id in its config.json)")

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when a text is empty or too long for the model."""
        sequences = [self._tokens(sample) for sample in samples]
        scores = [0.0] * len(samples)
        for positions in self._batches(sequences):
            for position, score in zip(positions, self._forward([sequences[position] for position in positions])):
                scores[position] = score
        return [Reward(score=score) for score in scores]

    def _tokens(self, sample: Sample) -> list[int]:
        text = sample.prompt + sample.response
        # The prompt is rendered already: a begin token that the template wrote must not be doubled.
        begin = self._tokenizer.bos_token
        tokens: list[int] = self._tokenizer(text, add_special_tokens=not (begin and text.startswith(begin)))[
            "input_ids"
        ]
        if self.end_token:
            end: int = self._tokenizer.eos_token_id
            while tokens and tokens[-1] == end:
                tokens.pop()
            tokens += [end] if sample.finish_reason == "stop" else []
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if not tokens or (limit is not None and len(tokens) > limit):
            raise DataError(
                f"reward model: a text of {len(tokens)} tokens cannot be scored, {self.path} takes 1 to {limit} "
                "(shorten max_prompt_tokens or max_new_tokens)"
            )
        return tokens

    def _batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield positions in batches of like length."""
        order = sorted(range(len(sequences)), key=lambda position: len(sequences[position]))
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        import torch

        width = max(len(tokens) for tokens in sequences)
        ids = torch.full((len(sequences), width), self._model.config.get_text_config().pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(sequences):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            logits = self._model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores
