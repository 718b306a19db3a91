"""The samples of one batch of the transformers engine: what they hold so far, and which are still sampled.

Shapes: R samples of the batch, B of them still sampled, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.config.rollout import SamplingConfig
from megappo.rollout.continuation import OpenSample, open_samples
from megappo.rollout.engine import FinishReason, GenerateRequest, SampledResponse, VersionSpan
from megappo.rollout.stopping import StopStrings


@dataclass(kw_only=True, slots=True, frozen=True)
class ResponseEnds:
    """What ends a response besides its length."""

    tokens: torch.Tensor
    """[E] ids."""
    strings: StopStrings | None


class Rows:
    """The open samples of a batch, one row each. All rows that are not done have drawn the same number of tokens."""

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        sampling: SamplingConfig,
        *,
        ends: ResponseEnds,
        seed: int,
        device: torch.device,
    ) -> None:
        self._ends = ends
        self._min_new_tokens = sampling.min_new_tokens
        self._samples: list[tuple[int, OpenSample]] = []
        prompts: dict[tuple[int, ...], int] = {}
        prompt_of_row: list[int] = []
        numbers: list[torch.Tensor] = [torch.zeros(0, sampling.max_new_tokens, dtype=torch.float64)]
        for index, request in enumerate(requests):
            samples = open_samples(request, sampling.max_new_tokens)
            self._samples += [(index, sample) for sample in samples]
            # Samples of one request that begin alike share the computation of what they begin with.
            prompt_of_row += [prompts.setdefault((index, *sample.begun), len(prompts)) for sample in samples]
            uniform = _uniform_numbers(request, sampling.max_new_tokens, seed=seed)
            numbers.append(uniform[[sample.sample for sample in samples]])
        self.prompts = [requests[index].prompt_tokens + begun for index, *begun in prompts]
        self.prompt_of_row = torch.tensor(prompt_of_row, dtype=torch.long, device=device)
        """[R], into `prompts`."""
        self._num_requests = len(requests)
        self._numbers = torch.cat(numbers).to(device)
        self.count = len(self._samples)
        self._budgets = torch.tensor([sample.budget for _, sample in self._samples], dtype=torch.long, device=device)
        self._offsets = sampling.max_new_tokens - self._budgets
        self.largest_budget = max((sample.budget for _, sample in self._samples), default=0)
        self._active = torch.arange(self.count, device=device)
        """[B], rows of the model's batch to samples."""
        self._tokens = torch.zeros(self.count, self.largest_budget, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(self.count, self.largest_budget, device=device)
        self._lengths = torch.zeros(self.count, dtype=torch.long, device=device)
        self._ended = torch.zeros(self.count, dtype=torch.bool, device=device)
        self._done = torch.zeros(self.count, dtype=torch.bool, device=device)

    def numbers(self, step: int) -> torch.Tensor:
        """Return the uniform numbers [B] float64 that decide the tokens of a step."""
        position = (self._offsets[self._active] + step).clamp(max=self._numbers.shape[1] - 1)
        return self._numbers[self._active, position]

    def forbidden(self, step: int, logits: torch.Tensor) -> torch.Tensor | None:
        """Return which tokens [B, V] may not come in a step: those that would end a response too early."""
        if step >= self._min_new_tokens:
            return None
        early = self._offsets[self._active] + step < self._min_new_tokens
        ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        ends[self._ends.tokens] = True
        return early[:, None] & ends

    def record(self, step: int, tokens: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Add the tokens [B] of one step to rows that are not done; return which rows [B] are now."""
        active = self._active
        self._tokens[active, step] = tokens
        self._log_probs[active, step] = log_probs
        before = self._done[active]
        self._lengths[active] += (~before).long()
        ended = torch.isin(tokens, self._ends.tokens) & ~before
        if self._ends.strings is not None:
            ended |= self._complete_strings(self._ends.strings, step) & ~before
        self._ended[active] |= ended
        done = before | ended | (self._budgets[active] == step + 1)
        self._done[active] = done
        return done

    def _complete_strings(self, strings: StopStrings, step: int) -> torch.Tensor:
        """Return which rows [B] hold a stop string at their end."""
        first = max(0, step + 1 - strings.window)
        drawn = self._tokens[self._active, first : step + 1].tolist()
        rows = self._active.tolist()
        samples = [self._samples[row][1] for row in rows]
        found = [
            strings.complete(sample.begun[sample.call_start :] + tail)
            for sample, tail in zip(samples, drawn, strict=True)
        ]
        return torch.tensor(found, dtype=torch.bool, device=self._tokens.device)

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with these rows of the model's batch."""
        self._active = self._active[kept]

    def responses(self, version: int) -> list[dict[int, SampledResponse]]:
        """Return what was drawn, per request by number of the sample."""
        lengths, ended, done = self._lengths.tolist(), self._ended.tolist(), self._done.tolist()
        tokens, log_probs = self._tokens.tolist(), self._log_probs.tolist()
        drawn: list[dict[int, SampledResponse]] = [{} for _ in range(self._num_requests)]
        for row, (index, sample) in enumerate(self._samples):
            reason = FinishReason.stop if ended[row] else FinishReason.length if done[row] else FinishReason.abort
            drawn[index][sample.sample] = SampledResponse(
                tokens=tokens[row][: lengths[row]],
                log_probs=log_probs[row][: lengths[row]],
                finish_reason=reason,
                versions=[VersionSpan(version=version, tokens=lengths[row])],
            )
        return drawn


def _uniform_numbers(request: GenerateRequest, max_new_tokens: int, *, seed: int) -> torch.Tensor:
    """Return [num_samples, max_new_tokens] float64 in [0, 1) from a stream of the request's own."""
    # The hash of a tuple of integers is the same in every process.
    generator = torch.Generator().manual_seed(hash((seed, request.group_id)) % 2**63)
    return torch.rand(request.num_samples, max_new_tokens, generator=generator, dtype=torch.float64)
