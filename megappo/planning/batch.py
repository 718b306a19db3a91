"""From prompts to micro-batches: how often what is computed in one step, and why a number is what it is.

Lengths are not known before a run, so what depends on them is reckoned for the longest sequences that there may be.
"""

from dataclasses import dataclass, field
from math import lcm

from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS, AdvantageScope, reads_greedy_scores
from megappo.config.batching import BatchingConfig
from megappo.config.layout_rules import trained_models
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleBatch:
    """What one trained model makes of a step."""

    role: str
    data_ranks: int
    sequences_per_rank: int
    """Most sequences of a mini-batch on one data-parallel rank, when all are equally long."""
    micro_batches: int
    """Per rank and mini-batch, when all sequences are as long as they may be."""
    fewest_micro_batches: int
    """The same when they are short."""
    forward_micro_batches: int
    """Per rank in a pass over the whole step (log-probs, values), when all are as long as they may be."""
    sequences_per_micro_batch: int
    """Of the longest."""
    reasons: tuple[str, ...]
    """Why numbers are rounded, or what is wasted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepBatch:
    """The algebra of one step."""

    prompts: int
    samples_per_prompt: int
    sequences: int
    """Trained on."""
    greedy_answers: int
    """Sampled beside them as a baseline."""
    longest_tokens: int
    """Prompt and response of the longest sequence."""
    tokens_at_most: int
    shards: int
    mini_batches: int
    epochs: int
    optimizer_steps: int
    sequences_per_mini_batch: int
    roles: tuple[RoleBatch, ...]
    reasons: tuple[str, ...] = field(default=())


def step_batch(config: RunConfig) -> StepBatch:
    """Return the algebra of a step. The configuration must keep its rules."""
    batching = config.batching
    sequences = batching.sequences_per_step
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    data_ranks = {
        role: config.cluster.pools[pool] // layout.model_size for role, layout, pool in trained_models(config)
    }
    shards = lcm(*data_ranks.values())
    mini_batches = batching.num_mini_batches
    mini = sequences // mini_batches
    reasons: list[str] = []
    if shards > max(data_ranks.values()):
        reasons.append(
            f"{shards} shards, the least common multiple of the data-parallel sizes "
            f"({', '.join(f'{role} {ranks}' for role, ranks in data_ranks.items())}): each rank owns whole shards"
        )
    keeps_groups = _keeps_groups(config)
    if keeps_groups:
        name = config.algorithm.advantage.name
        reasons.append(f"all samples of a prompt are on one shard: advantage {name} compares their tokens")
    return StepBatch(
        prompts=batching.prompts_per_step,
        samples_per_prompt=batching.samples_per_prompt,
        sequences=sequences,
        greedy_answers=batching.prompts_per_step if reads_greedy_scores(config.algorithm) else 0,
        longest_tokens=longest,
        tokens_at_most=sequences * longest,
        shards=shards,
        mini_batches=mini_batches,
        epochs=batching.ppo_epochs,
        optimizer_steps=mini_batches * batching.ppo_epochs,
        sequences_per_mini_batch=mini,
        roles=tuple(
            _role_batch(
                role,
                layout,
                batching,
                ranks=data_ranks[role],
                mini=_Spread(units=mini, shards=shards, unit=1)
                if not keeps_groups
                else _Spread(
                    units=mini // batching.samples_per_prompt, shards=shards, unit=batching.samples_per_prompt
                ),
                longest=longest,
            )
            for role, layout, _ in trained_models(config)
        ),
        reasons=tuple(reasons),
    )


def _keeps_groups(config: RunConfig) -> bool:
    declaration = ESTIMATOR_DECLARATIONS.get(config.algorithm.advantage.name)
    return declaration is not None and declaration.scope is AdvantageScope.group_token


@dataclass(kw_only=True, slots=True, frozen=True)
class _Spread:
    """A mini-batch, dealt over shards in units of one sequence or of one group."""

    units: int
    shards: int
    unit: int

    def most_of_rank(self, ranks: int) -> int:
        """Return the most sequences on one of so many ranks, each of which owns whole shards."""
        even, rest = divmod(self.units, self.shards)
        shards_of_rank = self.shards // ranks
        return (even * shards_of_rank + min(rest, shards_of_rank)) * self.unit


def _role_batch(
    role: str, layout: ParallelismConfig, batching: BatchingConfig, *, ranks: int, mini: _Spread, longest: int
) -> RoleBatch:
    cap = batching.micro_batch_tokens
    fitting = max(1, cap // longest)
    reasons: list[str] = []
    if longest > cap:
        reasons.append(
            f"a sequence of {longest} tokens is longer than batching.micro_batch_tokens={cap} and runs alone, above it"
        )
    elif cap % longest:
        reasons.append(
            f"{fitting} of the longest sequences fit into batching.micro_batch_tokens={cap}, {cap - fitting * longest} "
            "tokens are left; shorter ones fill them"
        )
    least = batching.min_micro_batches or (2 * layout.pipeline if layout.pipeline > 1 else 1)
    multiple = layout.pipeline if (layout.virtual_pipeline or 1) > 1 else 1

    def count(sequences: int) -> int:
        return -(-max(-(-sequences // fitting), least) // multiple) * multiple

    most = mini.most_of_rank(ranks)
    if (mini.units * mini.unit) % ranks:
        reasons.append(
            f"{mini.units * mini.unit} sequences of a mini-batch do not divide over {ranks} data-parallel ranks: "
            f"some have {most}, others fewer"
        )
    if -(-most // fitting) < least:
        why = "batching.min_micro_batches" if batching.min_micro_batches else f"2 per stage of {layout.pipeline} stages"
        reasons.append(f"at least {least} micro-batches per mini-batch: {why}")
    if multiple > 1:
        reasons.append(f"micro-batches come in multiples of {multiple} stages: virtual_pipeline runs them in groups")
    if most < least:
        reasons.append(
            f"{least - most} of {least} micro-batches are empty: a rank has {most} sequences of a mini-batch"
        )
    step = _Spread(units=mini.units * batching.num_mini_batches, shards=mini.shards, unit=mini.unit)
    return RoleBatch(
        role=role,
        data_ranks=ranks,
        sequences_per_rank=most,
        micro_batches=count(most),
        fewest_micro_batches=count(0),
        forward_micro_batches=count(step.most_of_rank(ranks)),
        sequences_per_micro_batch=fitting,
        reasons=tuple(reasons),
    )
