"""The workload's reward behind the port of a run, named in `reward.name`."""

from benchmarks.contenders.workload import even_share
from megappo.rewards.types import Sample


def score(sample: Sample) -> float:
    """Score one sample."""
    return even_share(sample.response)
