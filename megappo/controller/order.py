"""What follows from the order of a run: which passes it needs, and whether engines and trainers take turns."""

from megappo.config.algorithm import OldLogProbs
from megappo.config.algorithm_declarations import reads_old_log_probs
from megappo.config.layout_rules import engines_share_devices
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind


def engines_take_turns(config: RunConfig) -> bool:
    """Whether engines and trainers use the same devices one after the other, each making room for the other."""
    return config.controller is ControllerKind.synchronous and engines_share_devices(config)


def needs_old_log_probs(config: RunConfig) -> bool:
    """Whether log-probs are recomputed before the update.

    `auto` skips the pass when the batch is used for one optimizer step (then old equals current) and nothing before the
    update reads its numbers. A critic does not: it reads values. Nor does it matter which weights sampled the batch:
    the pass is of the weights at the start of the update, and so is the first step.
    """
    algorithm, batching = config.algorithm, config.batching
    if algorithm.old_log_probs is not OldLogProbs.auto:
        return algorithm.old_log_probs is OldLogProbs.recompute
    return batching.ppo_epochs * batching.num_mini_batches > 1 or reads_old_log_probs(algorithm)
