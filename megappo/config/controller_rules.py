"""Rules about the order of the loop: what may run beside what, and what the algorithm must know of it."""

from megappo.config.algorithm import OldLogProbs
from megappo.config.algorithm_declarations import reads_greedy_scores
from megappo.config.cluster import DeviceKind
from megappo.config.layout_rules import engines_share_devices
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.errors import Violation


def engines_beside_training_have_devices_of_their_own(config: RunConfig) -> list[Violation]:
    """A GPU is either the engines' or the trainers' at a time, so what runs at the same time needs pools of its own."""
    one_step_off = config.controller is ControllerKind.one_step_off
    if not one_step_off or config.cluster.device is not DeviceKind.cuda or not engines_share_devices(config):
        return []
    return [
        Violation(
            key="controller",
            value=config.controller.name,
            rule=f"lets engines sample while models train, and both are on the GPUs of pool {config.cluster.rollout!r}",
            remedy="add placement=split, or use controller=synchronous",
        )
    ]


def early_stop_leaves_no_prompt_without_its_greedy_answer(config: RunConfig) -> list[Violation]:
    """A greedy answer is a group of its own, so stopping at N complete groups would part it from its samples."""
    if not config.rollout.partial.extra_prompts or not reads_greedy_scores(config.algorithm):
        return []
    return [
        Violation(
            key="rollout.partial.extra_prompts",
            value=config.rollout.partial.extra_prompts,
            rule=f"cannot be used with algorithm.advantage.name={config.algorithm.advantage.name}: engines stop when "
            "enough groups are complete, whether or not the greedy answers to their prompts are",
            remedy="leave it out, or use an advantage without greedy answers, such as rloo",
        )
    ]


def controller_notes(config: RunConfig) -> list[str]:
    """Return one line for each legal setting around the order of the loop that is likely a mistake."""
    return _stale_rollouts(config) + _steps_per_batch(config)


def _steps_per_batch(config: RunConfig) -> list[str]:
    """Losses and baselines of exact on-policy training know no ratio, or no clip, that makes up for more steps."""
    algorithm, batching = config.algorithm, config.batching
    steps = batching.ppo_epochs * batching.num_mini_batches
    methods = {f"policy_loss.name={algorithm.policy_loss.name}": algorithm.policy_loss.name == "gpg"}
    methods[f"advantage.name={algorithm.advantage.name}"] = algorithm.advantage.name == "opo"
    return [
        f"algorithm.{method} is meant for one optimizer step per batch, and batching makes {steps} (ppo_epochs="
        f"{batching.ppo_epochs} times {batching.num_mini_batches} mini-batches): all but the first are off-policy"
        for method, is_on_policy in methods.items()
        if is_on_policy and steps > 1
    ]


def _stale_rollouts(config: RunConfig) -> list[str]:
    algorithm, notes = config.algorithm, list[str]()
    corrected = algorithm.correction.is_on or algorithm.old_log_probs is OldLogProbs.rollout
    if not corrected and config.controller is ControllerKind.one_step_off:
        notes.append(
            "controller=one_step_off: rollouts are one version old and nothing corrects for it "
            "(algorithm.correction.weight is off and algorithm.old_log_probs is not rollout)"
        )
    if not corrected and algorithm.sampling.max_rounds > 0 and algorithm.sampling.oversample > 1:
        notes.append(
            f"algorithm.sampling.oversample={algorithm.sampling.oversample:g}: groups that a step does not need are "
            "trained on in a later one, after the weights that sampled them, and nothing corrects for it (set "
            "algorithm.correction.weight.high=2.0, or algorithm.old_log_probs=rollout)"
        )
    if not corrected and config.rollout.partial.extra_prompts > 0:
        notes.append(
            "rollout.partial: answers that go on in a later step were begun by older weights and nothing corrects for "
            "it (set algorithm.correction.weight.high=2.0, or algorithm.old_log_probs=rollout)"
        )
    return notes
