"""Sampling with a transformers model: one batch of left-padded prompts, a KV cache, rows dropped as they finish.

A loop of our own rather than `generate`: it computes each prompt once for all its samples, stops paying for finished
rows, takes nothing from the model folder's generation settings, and keeps the log-probs that it sampled from.

Shapes: P prompts, B rows (samples) still sampled, L longest prompt, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.rollout.continuation import join_group
from megappo.rollout.engine import GenerateRequest, GroupOutput
from megappo.rollout.hf_decoding import make_room
from megappo.rollout.hf_rows import ResponseEnds, Rows

_KEEP_SHARE = 0.75
"""Finished rows are dropped once fewer than this share is left: a drop copies the cache of the rest."""


class SamplingCancelled(RuntimeError):
    """Sampling ended before its end, since it was told to."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingSignals:
    """Asked before every step."""

    cancelled: Callable[[], bool]
    """Nobody wants the samples any more."""
    aborted: Callable[[], bool]
    """Return what there is."""


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel,
    requests: Sequence[GenerateRequest],
    sampling: SamplingConfig,
    *,
    ends: ResponseEnds,
    seed: int,
    version: int,
    signals: SamplingSignals,
) -> list[GroupOutput]:
    """Draw all open samples of some requests in one batch.

    Args:
        seed: with the group id and the sample's number it decides a response, whatever else is in the batch and
            however often the response was aborted and continued.
        version: of the model's weights.

    Raises:
        SamplingCancelled: the samples are not wanted any more.
    """
    rows = Rows(requests, sampling, ends=ends, seed=seed, device=model.device)
    if rows.count and not signals.aborted():
        _draw(model, rows, sampling, signals)
    drawn = rows.responses(version)
    return [
        join_group(request, responses, max_new_tokens=sampling.max_new_tokens, version_in_use=version)
        for request, responses in zip(requests, drawn, strict=True)
    ]


def _draw(model: PreTrainedModel, rows: Rows, sampling: SamplingConfig, signals: SamplingSignals) -> None:
    """Draw tokens until all rows are done or the call is aborted."""
    cache, logits, mask = _prefill(model, rows.prompts)
    mask, logits = mask[rows.prompt_of_row], logits[rows.prompt_of_row]
    make_room(cache, rows.prompt_of_row, mask.shape[1] + rows.largest_budget)
    for step in range(rows.largest_budget):
        if signals.cancelled():
            raise SamplingCancelled("the samples are not wanted any more")
        if signals.aborted():
            return
        tokens, log_probs = choose_tokens(logits, sampling, rows.numbers(step), forbidden=rows.forbidden(step, logits))
        alive = ~rows.record(step, tokens, log_probs)
        if not alive.any():
            return
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


def choose_tokens(
    logits: torch.Tensor,
    sampling: SamplingConfig,
    numbers: torch.Tensor,
    *,
    forbidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row, by inverting the cumulative distribution at a uniform number.

    Args:
        logits: [B, V]
        numbers: [B] float64 in [0, 1).
        forbidden: [B, V] bool, tokens that may not come now.

    Returns:
        Tokens [B] and their log-probs [B] float32 under softmax(logits / temperature) over all tokens, whatever is
        left out; at temperature 0 the likeliest token, under softmax(logits).
    """
    temperature = sampling.temperature
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    allowed = log_probs if forbidden is None else log_probs.masked_fill(forbidden, -torch.inf)
    if temperature == 0:
        tokens = allowed.argmax(-1)
    else:
        weights = _allowed_weights(allowed, sampling)
        # float64: with a large vocabulary the rounding of a float32 sum could reach a token of weight 0
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        target = numbers[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _allowed_weights(log_probs: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Return probabilities [B, V], 0 where top_k, top_p or min_p leave a token out; ties with the last kept token are
    kept. Each looks at the whole distribution, as in SGLang, not at what another has left."""
    whole = log_probs.exp()
    weights = whole
    if 0 < sampling.top_k < whole.shape[-1]:
        least = whole.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(whole < least, 0)
    if sampling.top_p < 1:
        ordered = whole.sort(dim=-1, descending=True).values
        before = ordered.cumsum(-1) - ordered  # weight of all likelier tokens
        # A token stays while the likelier ones hold less than top_p.
        kept = before < sampling.top_p * ordered.sum(-1, keepdim=True)
        least = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        weights = weights.masked_fill(whole < least, 0)
    if sampling.min_p > 0:
        weights = weights.masked_fill(whole < sampling.min_p * whole.amax(-1, keepdim=True), 0)
    return weights


def _prefill(model: PreTrainedModel, prompts: Sequence[list[int]]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
    """Compute each prompt once; return the cache, the logits [P, V] of the next token and the mask [P, L] int64: 1 on
    tokens, 0 on the padding before them."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    longest = int(lengths.max())
    mask = (torch.arange(longest, device=model.device) >= longest - lengths[:, None]).long()
    tokens = torch.zeros_like(mask)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = torch.tensor(prompt)
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache, output.logits[:, -1], mask
