"""Sampling with a transformers model: one batch of left-padded prompts, a KV cache, rows dropped as they finish.

A loop of our own rather than `generate`: it computes each prompt once for all its samples, stops paying for finished
rows, takes nothing from the model folder's generation settings, and keeps the log-probs that it sampled from.

Shapes: P prompts, B rows (samples) still sampled, L longest prompt, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.rollout.engine import FinishReason, GenerateRequest, SampledResponse
from megappo.rollout.hf_decoding import make_room

_KEEP_SHARE = 0.75
"""Finished rows are dropped once fewer than this share is left: a drop copies the cache of the rest."""


class SamplingCancelled(RuntimeError):
    """Sampling ended before its end, since it was told to."""


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    sampling: SamplingConfig,
    *,
    end_tokens: torch.Tensor,
    seed: int,
    cancelled: Callable[[], bool],
) -> list[list[SampledResponse]]:
    """Sample all responses to some requests in one batch.

    Args:
        end_tokens: ids that end a response.
        seed: with the group id and the sample's number it decides a response, whatever else is in the batch.
        cancelled: asked before every step.

    Returns:
        Per request, its responses.

    Raises:
        SamplingCancelled: `cancelled` answered yes.
    """
    rows = _Rows(requests, sampling.max_new_tokens, seed=seed, device=model.device)
    cache, logits = _prefill(model, requests)
    mask = _prompt_mask(requests, model.device)[rows.prompt_of_row]
    logits = logits[rows.prompt_of_row]
    make_room(cache, rows.prompt_of_row, mask.shape[1] + sampling.max_new_tokens)
    for step in range(sampling.max_new_tokens):
        if cancelled():
            raise SamplingCancelled("the samples are not wanted any more")
        tokens, log_probs = choose_tokens(logits, sampling, rows.numbers[rows.active, step])
        finished = rows.record(step, tokens, log_probs, end_tokens)
        alive = ~finished
        if step + 1 == sampling.max_new_tokens or not alive.any():
            break
        if alive.sum() <= _KEEP_SHARE * alive.numel():
            kept = alive.nonzero()[:, 0]
            rows.keep(kept)
            cache.batch_select_indices(kept)
            mask, tokens = mask[kept], tokens[kept]
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        logits = model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    return rows.responses()


def choose_tokens(
    logits: torch.Tensor, sampling: SamplingConfig, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row, by inverting the cumulative distribution at a uniform number.

    Args:
        logits: [B, V]
        numbers: [B] float64 in [0, 1).

    Returns:
        Tokens [B] and their log-probs [B] float32 under softmax(logits / temperature) over all tokens, whatever top_k
        and top_p leave out; at temperature 0 the likeliest token, under softmax(logits).
    """
    temperature = sampling.temperature
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = log_probs.argmax(-1)
    else:
        weights = _allowed_weights(log_probs, sampling)
        # float64: with a large vocabulary the rounding of a float32 sum could reach a token of weight 0
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        target = numbers[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _allowed_weights(log_probs: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Return probabilities [B, V], 0 where top_k or top_p leave a token out; ties with the last kept token are kept."""
    weights = log_probs.exp()
    if 0 < sampling.top_k < weights.shape[-1]:
        least = weights.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0)
    if sampling.top_p < 1:
        ordered = weights.sort(dim=-1, descending=True).values
        before = ordered.cumsum(-1) - ordered  # weight of all likelier tokens
        # A token stays while the likelier ones hold less than top_p of what top_k left.
        kept = before < sampling.top_p * ordered.sum(-1, keepdim=True)
        least = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0)
    return weights


class _Rows:
    """The samples of a batch: what they hold so far, and which are still sampled.

    `numbers` [rows, max_new_tokens] decide the tokens; `active` [B] maps rows of the model's batch to samples.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], max_new_tokens: int, *, seed: int, device: torch.device
    ) -> None:
        self._counts = [request.num_samples for request in requests]
        total = sum(self._counts)
        self.prompt_of_row = torch.repeat_interleave(
            torch.arange(len(requests), device=device), torch.tensor(self._counts, device=device)
        )
        self.numbers = torch.cat([_uniform_numbers(request, max_new_tokens, seed=seed) for request in requests]).to(
            device
        )
        self.active = torch.arange(total, device=device)
        self._tokens = torch.zeros(total, max_new_tokens, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(total, max_new_tokens, device=device)
        self._lengths = torch.zeros(total, dtype=torch.long, device=device)
        self._ended = torch.zeros(total, dtype=torch.bool, device=device)

    def record(
        self, step: int, tokens: torch.Tensor, log_probs: torch.Tensor, end_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Add the tokens [B] of one step to rows that have not ended; return which rows [B] have."""
        self._tokens[self.active, step] = tokens
        self._log_probs[self.active, step] = log_probs
        before = self._ended[self.active]
        self._lengths[self.active] += (~before).long()
        after = before | torch.isin(tokens, end_tokens)
        self._ended[self.active] = after
        return after

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with these rows of the model's batch."""
        self.active = self.active[kept]

    def responses(self) -> list[list[SampledResponse]]:
        """Return the samples, per request."""
        lengths, ended = self._lengths.tolist(), self._ended.tolist()
        tokens, log_probs = self._tokens.tolist(), self._log_probs.tolist()
        samples = iter(
            SampledResponse(
                tokens=tokens[row][:length],
                log_probs=log_probs[row][:length],
                finish_reason=FinishReason.stop if ended[row] else FinishReason.length,
            )
            for row, length in enumerate(lengths)
        )
        return [[next(samples) for _ in range(count)] for count in self._counts]


def _uniform_numbers(request: GenerateRequest, max_new_tokens: int, *, seed: int) -> torch.Tensor:
    """Return [num_samples, max_new_tokens] float64 in [0, 1) from a stream of the request's own."""
    # The hash of a tuple of integers is the same in every process.
    generator = torch.Generator().manual_seed(hash((seed, request.group_id)) % 2**63)
    return torch.rand(request.num_samples, max_new_tokens, generator=generator, dtype=torch.float64)


def _prefill(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> tuple[DynamicCache, torch.Tensor]:
    """Compute each prompt once; return the cache and the logits [P, V] of the first response token."""
    mask = _prompt_mask(requests, model.device)
    tokens = torch.zeros_like(mask)
    for row, request in enumerate(requests):
        tokens[row, -len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache, output.logits[:, -1]


def _prompt_mask(requests: Sequence[GenerateRequest], device: torch.device) -> torch.Tensor:
    """Return [P, L] int64: 1 on prompt tokens, 0 on the padding before them."""
    lengths = torch.tensor([len(request.prompt_tokens) for request in requests], device=device)
    longest = int(lengths.max())
    return (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
