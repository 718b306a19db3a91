"""Prompts of random tokens, and responses whose lengths are drawn by the model itself.

A model with random weights finds all tokens about equally likely. With k of its V tokens as stop tokens a response ends
at each token with probability k / V: its length is geometric with mean V / k, cut off at the longest, on every engine
and without telling it. Some prompts may have fewer stop tokens: the long tail.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.training.workload import LengthDistribution
from megappo.config.rollout import SamplingConfig
from megappo.rollout.engine import GenerateRequest

PROBES = 256
"""Prompts that only probes use; with more probes than that an engine may know a prefix."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Lengths:
    """How long prompts and responses are, in tokens."""

    prompts: LengthDistribution
    response_mean: float
    """Before the cut; 0: only the cut ends a response, all are equally long."""
    longest_response: int
    tail_share: float
    """Share of the prompts with longer responses."""
    tail_factor: float
    """How many times longer their mean is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Generation:
    """Groups to be sampled, apart by how."""

    requests: Mapping[int, GenerateRequest]
    """By group id."""
    batch: Mapping[int, int]
    """Group id -> index of its sampling."""
    samplings: list[SamplingConfig]
    probes: list[list[int]]
    """Other prompts, to measure the time to the first token with."""

    @property
    def sequences(self) -> int:
        """All samples of all groups."""
        return sum(request.num_samples for request in self.requests.values())


def make_generation(
    lengths: Lengths, sampling: SamplingConfig, model: Mapping[str, Any], *, prompts: int, samples: int, seed: int
) -> Generation:
    """Return groups of random prompts; the same arguments give the same ones. `model`: config.json (Any: JSON)."""
    random, vocabulary = np.random.default_rng(seed), int(model["vocab_size"])
    drawn = lengths.prompts.draw(prompts + PROBES, seed=seed).tolist()
    texts = [random.integers(0, vocabulary, count).tolist() for count in drawn]
    requests = {
        group: GenerateRequest(group_id=group, prompt_tokens=tokens, num_samples=samples)
        for group, tokens in enumerate(texts[:prompts])
    }
    tail = random.permutation(prompts)[: round(lengths.tail_share * prompts)].tolist()
    order = random.permutation(vocabulary)
    samplings = [
        replace(
            sampling,
            max_new_tokens=lengths.longest_response,
            stop_token_ids=sorted(order[: round(vocabulary / mean)].tolist()) if mean else [],
        )
        for mean in (lengths.response_mean, lengths.response_mean * lengths.tail_factor)
    ]
    return Generation(
        requests=requests,
        batch={group: int(group in tail) for group in requests},
        samplings=samplings,
        probes=texts[prompts:],
    )
