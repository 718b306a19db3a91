"""Every metric by name: unit, meaning, and what a mean is taken over.

docs/metrics.md is this list (`make docs`). A part in angle brackets stands for one or more names that are not known
beforehand: `reward/<part>/mean`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class MetricDoc:
    """One metric, or a family of metrics with a placeholder in its name."""

    name: str
    unit: str
    meaning: str
    denominator: str
    """What a mean or ratio is over; `-` for sums, extremes and single numbers."""


def _area(*rows: tuple[str, str, str, str]) -> list[MetricDoc]:
    return [
        MetricDoc(name=name, unit=unit, meaning=meaning, denominator=denominator)
        for name, unit, meaning, denominator in rows
    ]


_STEP = "all sequences of the step"
_PROMPTS = "validation prompts with a scored answer"
_PAIRS = "pairs of the step"
_HELD = "held-out pairs"
_ANSWERS = "scored answers to the validation prompts"
_TOKENS = "response tokens of the step, over all ranks"
_COMPARED = (
    "tokens compared: of sequences that the current weights sampled; loss tokens where no pass is before the update"
)
_LOSS_TOKENS = "loss tokens of the update, over all ranks and optimizer steps"
_OPTIMIZER_STEPS = "optimizer steps of the update"
_APPLIED = "optimizer steps that were applied"
_WEIGHTED = "loss tokens, by their weight in the loss"

CATALOGUE: dict[str, list[MetricDoc]] = {
    "Rewards": _area(
        ("reward/mean", "score", "score of a response", _STEP),
        ("reward/max", "score", "largest score", "-"),
        (
            "reward/<part>/mean",
            "score",
            "one part of the score, by its name; of reward.terms: the score of a term before its weight, and its own "
            "parts as <term>/<part>",
            "sequences that have it",
        ),
        ("reward/failed", "count", "answers whose reward failed, in all rounds of generation", "-"),
        ("reward/failed/<kind>", "count", "those of one kind: raised, timed_out, died, none, not_finite, ...", "-"),
        (
            "reward/failed_groups",
            "count",
            "groups of which nothing was left, or whose greedy answer had no score (reward.on_failure=drop)",
            "-",
        ),
        ("reward/overlong_penalty/mean", "score", "penalty for long responses (0 or negative)", _STEP),
    ),
    "Validation": _area(
        (
            "val/reward/mean",
            "score",
            "mean@n: score of an answer; a prompt's is the mean of its answers",
            _PROMPTS,
        ),
        ("val/reward/best", "score", "best@n: the best of a prompt's answers, with samples_per_prompt > 1", _PROMPTS),
        ("val/reward/majority", "score", "majority@n: the commonest answer (validation.majority)", _PROMPTS),
        (
            "val/reward/pass_at_<k>",
            "0-1",
            "pass@k: chance that k of a prompt's answers hold a correct one, unbiased (validation.pass_at)",
            "validation prompts with k scored answers",
        ),
        ("val/reward/<statistic>/low", "as it", "lower end of its confidence interval, by bootstrap over prompts", "-"),
        ("val/reward/<statistic>/high", "as it", "upper end", "-"),
        ("val/part/<part>/mean", "score", "one part of the score, by its name", "answers that have it"),
        ("val/response_tokens/mean", "tokens", "length of an answer", _ANSWERS),
        ("val/response_tokens/max", "tokens", "longest answer", "-"),
        ("val/truncated_ratio", "0-1", "answers that ended by length", _ANSWERS),
        ("val/failed_rewards", "count", "answers whose reward failed; nothing else counts them", "-"),
        ("val/source/<source>/<metric>", "as it", "the same (no interval) of one source, where there are several", "-"),
        ("val/<set>/<metric>", "as it", "the same of one set of data.validation_sets, by its name", "-"),
    ),
    "Rollouts": _area(
        ("rollout/sequences", "count", "sampled sequences", "-"),
        ("rollout/tokens", "tokens", "tokens of all sequences, prompts included", "-"),
        ("rollout/response_tokens/mean", "tokens", "length of a response, its end token included", _STEP),
        ("rollout/response_tokens/max", "tokens", "longest response", "-"),
        ("rollout/sampled_tokens/mean", "tokens", "sampled tokens of a response (rollout programs)", _STEP),
        ("rollout/observation_tokens/mean", "tokens", "its other tokens, which the model only read", _STEP),
        (
            "rollout/agent/<name>/mean",
            "count",
            "what a rollout program counts: turns; tool_loop: tool_calls, tool_errors",
            "sequences that have it",
        ),
        ("rollout/truncated_ratio", "0-1", "responses that ended by length", _STEP),
        ("rollout/empty_ratio", "0-1", "responses without a sampled token", _STEP),
        ("rollout/groups", "count", "groups: samples of one drawn prompt", "-"),
        ("rollout/group_size/mean", "sequences", "size of a group", "groups of the step"),
        (
            "rollout/groups_without_signal",
            "0-1",
            "groups that teach the estimator nothing: scores equal but for rounding error (gdpo: weighted parts; "
            "grpo_passk: a tie for the best; remax: all equal to the greedy answer's)",
            "groups of the step",
        ),
        ("rollout/sampling_rounds", "count", "rounds of generation of the step (dynamic sampling)", "-"),
        ("rollout/groups_filtered", "count", "groups dropped because they carry no signal", "-"),
        ("rollout/groups_carried", "count", "groups kept for a later step", "-"),
        ("rollout/policy_version/min", "steps", "oldest version of the weights that sampled a sequence", "-"),
        (
            "rollout/policy_lag/max",
            "steps",
            "version that was trained, minus the oldest version that sampled a token of a sequence: 0 in the "
            "synchronous loop, 1 with controller=one_step_off, more where groups are carried over or go on",
            "-",
        ),
        ("rollout/policy_lag/mean", "steps", "the same", _STEP),
        ("rollout/partial/unfinished", "count", "groups that the next step goes on with (rollout.partial)", "-"),
        ("rollout/partial/continued", "count", "groups completed in this step that an earlier one began", "-"),
        (
            "rollout/partial/first_response_tokens/mean",
            "tokens",
            "length of the answers completed in the step that began them; how far it is below that of continued ones "
            "shows what finishing first selects for",
            "sequences of such groups",
        ),
        (
            "rollout/partial/continued_response_tokens/mean",
            "tokens",
            "length of the answers that an earlier step began",
            "sequences of such groups",
        ),
    ),
    "KL to the reference policy": _area(
        ("kl/in_reward/mean", "nats", "KL in the reward: masked mean of a sequence", "non-empty sequences"),
        ("kl/in_reward/coef", "1", "its coefficient in this step", "-"),
        ("kl/in_reward/next_coef", "1", "its coefficient in the next step (`inspect algorithm` only)", "-"),
        ("actor/kl/mean", "nats", "KL in the loss, before its coefficient", _LOSS_TOKENS),
        ("kl/in_reward/capped_fraction", "0-1", "tokens whose k3 in the reward was capped", _TOKENS),
        ("kl/capped_fraction", "0-1", "tokens whose k3 in the loss was capped", _LOSS_TOKENS),
    ),
    "Actor": _area(
        ("actor/loss/mean", "1", "whole loss: policy, KL and entropy terms", _OPTIMIZER_STEPS),
        ("actor/policy_loss", "1", "policy loss of a token", _WEIGHTED),
        ("actor/kl_loss", "1", "coefficient * KL of a token", _WEIGHTED),
        ("actor/entropy_loss", "1", "- coefficient * entropy of a token", _WEIGHTED),
        ("actor/entropy/mean", "nats", "entropy of the policy", "response tokens before the update, else loss tokens"),
        ("actor/advantages/mean", "1", "advantage before whitening", _TOKENS),
        ("actor/advantages/max", "1", "largest advantage before whitening", "-"),
        ("actor/advantages/min", "1", "smallest advantage before whitening", "-"),
        ("actor/whitening_skipped", "0 or 1", "whether there were too few tokens to whiten", "-"),
        ("actor/loss_token_ratio", "0-1", "response tokens that take part in the loss", _TOKENS),
        ("actor/approx_kl", "nats", "k3 estimate of the KL to the policy before the update", _LOSS_TOKENS),
        ("actor/clip_fraction", "0-1", "tokens where the clip binds: their gradient is cut", _LOSS_TOKENS),
        ("actor/dual_clip_fraction", "0-1", "tokens where the dual clip binds", _LOSS_TOKENS),
        ("actor/ratio/mean", "1", "probability ratio to the policy before the update", _LOSS_TOKENS),
        ("actor/ratio/min", "1", "smallest ratio", "-"),
        ("actor/ratio/max", "1", "largest ratio", "-"),
        (
            "actor/first_step_log_ratio/max",
            "nats",
            "largest |log ratio| before any step: a drift monitor, about 0",
            "-",
        ),
        ("actor/grad_norm", "1", "gradient norm before clipping", _APPLIED),
        ("actor/lr", "1", "learning rate", _OPTIMIZER_STEPS),
        ("actor/skipped_steps", "count", "optimizer steps skipped since the start: gradient not finite", "-"),
        ("actor/first_step/loss", "1", "loss of the first optimizer step of the update", "-"),
        ("actor/first_step/grad_norm", "1", "gradient norm of that step, also when it was skipped", "-"),
    ),
    "Critic": _area(
        ("critic/loss/mean", "1", "value loss", _OPTIMIZER_STEPS),
        ("critic/value_loss", "1", "value loss of a token", _WEIGHTED),
        ("critic/values/mean", "score", "value of the state before a token", _LOSS_TOKENS),
        ("critic/returns/mean", "score", "target of the value", _TOKENS),
        ("critic/value_clip_fraction", "0-1", "tokens whose value moved further than the clip", _LOSS_TOKENS),
        ("critic/grad_norm", "1", "gradient norm before clipping", _APPLIED),
        ("critic/lr", "1", "learning rate", _OPTIMIZER_STEPS),
        ("critic/skipped_steps", "count", "optimizer steps skipped since the start: gradient not finite", "-"),
        ("critic/first_step/loss", "1", "loss of the first optimizer step of the update", "-"),
        ("critic/first_step/grad_norm", "1", "gradient norm of that step, also when it was skipped", "-"),
    ),
    "Rollout engine against trainer": _area(
        ("actor/rollout_log_prob_diff/mean", "nats", "|log-prob of the engine - log-prob of the trainer|", _COMPARED),
        ("actor/rollout_log_prob_diff/max", "nats", "largest such; first step in float32: at most 1e-4", "-"),
        (
            "actor/rollout_log_prob_diff/compared_ratio",
            "0-1",
            "tokens that were compared: the current weights sampled them; absent where the update's own log-probs are "
            "compared",
            _TOKENS,
        ),
        ("correction/probability_diff/mean", "0-1", "|difference of the two probabilities|", _TOKENS),
        ("correction/probability_diff/max", "0-1", "largest such difference", "-"),
        ("correction/k3", "nats", "k3 estimate of the KL between the two", _TOKENS),
        ("correction/chi2", "1", "chi-squared distance of the two", _TOKENS),
        ("correction/perplexity_ratio", "1", "perplexity under the trainer over that under the engine", _TOKENS),
        ("correction/probability_pearson_r", "-1 to 1", "correlation of the two probabilities", "tokens compared"),
        ("correction/weight/mean", "1", "importance weight", _TOKENS),
        ("correction/weight/max", "1", "largest importance weight", "-"),
        ("correction/capped_fraction", "0-1", "importance weights that a bound changed", _TOKENS),
        ("correction/effective_sample_share", "0-1", "effective sample size of the weights", _TOKENS),
        ("correction/kept_fraction", "0-1", "response tokens that no rejection removed", _TOKENS),
    ),
    "Supervised training": _area(
        ("sft/loss", "nats", "cross-entropy of the tokens trained on (`megappo sft`)", "those of the step"),
        ("sft/loss_tokens", "tokens", "tokens that are trained on", "-"),
        ("sft/val_loss", "nats", "cross-entropy of the held-out rows, after the step (sft.test_freq)", "their tokens"),
        (
            "reward_model/preference_loss",
            "nats",
            "loss of a pair (`megappo rm`): -log sigmoid(difference of the scores - margin)",
            _PAIRS,
        ),
        ("reward_model/accuracy", "0-1", "pairs whose preferred text scores higher; equal scores are wrong", _PAIRS),
        ("reward_model/difference/mean", "score", "score of the preferred text minus that of the other", _PAIRS),
        ("reward_model/chosen/mean", "score", "score of the preferred text", _PAIRS),
        ("reward_model/rejected/mean", "score", "score of the other text", _PAIRS),
        ("reward_model/loss/mean", "nats", "preference loss of the optimizer steps", _OPTIMIZER_STEPS),
        ("reward_model/grad_norm", "1", "gradient norm before clipping", _APPLIED),
        ("reward_model/lr", "1", "learning rate", _OPTIMIZER_STEPS),
        ("reward_model/skipped_steps", "count", "optimizer steps skipped since the start: gradient not finite", "-"),
        ("reward_model/first_step/loss", "nats", "loss of the first optimizer step of the update", "-"),
        ("reward_model/first_step/grad_norm", "1", "gradient norm of that step, also when it was skipped", "-"),
        (
            "reward_model/val_loss",
            "nats",
            "preference loss of the held-out pairs, after the step (rm.test_freq)",
            _HELD,
        ),
        ("reward_model/val_accuracy", "0-1", "held-out pairs whose preferred text scores higher", _HELD),
        ("reward_model/val_difference/mean", "score", "difference of their scores", _HELD),
        ("data/rows", "count", "rows of the step", "-"),
        ("data/tokens", "tokens", "tokens of the step, those included that are not trained on", "-"),
        ("timing/update_s", "s", "forward, backward and optimizer step", "-"),
    ),
    "Time": _area(
        (
            "timing/unix_s",
            "s",
            "when the line was written, since 1970; trackers take it as the time of its points",
            "-",
        ),
        ("timing/step_s", "s", "whole step, wall clock on the controller; the others are parts of it", "-"),
        (
            "timing/save_s",
            "s",
            "writing a checkpoint, in steps that do; with checkpoint.asynchronous copying the state, and waiting for "
            "the save before",
            "-",
        ),
        ("timing/export_hf_s", "s", "writing a Hugging Face folder, in steps that do (trainer.export_hf_freq)", "-"),
        ("timing/validate_s", "s", "validation, after the step", "-"),
        ("timing/draw_s", "s", "taking prompts from the data: they are tokenised before the run, so about 0", "-"),
        (
            "timing/generate_s",
            "s",
            "generation, scoring beside it included; with controller=one_step_off it ran beside the training of the "
            "step before and is no part of this one",
            "-",
        ),
        ("timing/score_s", "s", "waiting for scores after generation, likewise", "-"),
        ("timing/reward_s", "s", "scoring: of the process that did so longest, beside generation or not", "-"),
        (
            "timing/wait_for_rollouts_s",
            "s",
            "controller=one_step_off: waiting for the engines before the hand-over; in the first step also for its own "
            "rollouts",
            "-",
        ),
        ("timing/log_probs_s", "s", "log-probs before the update, reference included", "-"),
        ("timing/values_s", "s", "values of the critic", "-"),
        ("timing/experience_s", "s", "token rewards, KL, advantages, correction", "-"),
        ("timing/update_critic_s", "s", "critic update", "-"),
        ("timing/update_actor_s", "s", "actor update", "-"),
        ("timing/weight_sync_s", "s", "hand-over of the weights to the engines", "-"),
        ("timing/engine_recovery_s/max", "s", "longest time from the discovery of a failure to prompts again", "-"),
    ),
    "Throughput and engines": _area(
        ("perf/restarts", "count", "restarts of the run by itself so far; with restart.max", "-"),
        ("perf/tokens_per_s", "tokens/s", "tokens of the step, prompts included, over its wall time", "-"),
        ("perf/tokens_per_s_per_device", "tokens/s", "the same, over all devices of the run", "-"),
        (
            "perf/tflops_per_device/<phase>",
            "TFLOP/s",
            "useful matmul FLOPs of actor_update, critic_update, log_probs or values over its time and devices: valid "
            "tokens, causal pairs, active experts, predicted rows of the head; nothing that is recomputed",
            "-",
        ),
        ("perf/mfu/<phase>", "0-1", "the same over the device's dense peak; absent where that is not known", "-"),
        ("perf/hfu/<phase>", "0-1", "the same with recomputed layers; absent where none are", "-"),
        ("perf/weight_sync_bytes_per_s", "bytes/s", "bytes handed over, over the time it took", "-"),
        (
            "perf/goodput_tokens_per_s",
            "tokens/s",
            "response tokens that were kept, of finished groups and of those that go on",
            "time in which anything was generated, validation included",
        ),
        ("perf/engine_idle_share/mean", "0-1", "time in which an engine has no prompts", "that time, over all engines"),
        ("perf/engine_idle_share/<engine>", "0-1", "the same of one engine", "that time"),
        (
            "perf/busy_share/<process>",
            "0-1",
            "steps that are traced: time in which a process (actor_0, critic_1, engine_0, reward_0) had something to "
            "do, waiting for its peers in a collective included",
            "timing/step_s",
        ),
        ("perf/engines", "count", "engines that take prompts", "-"),
        ("perf/reward_hidden_ratio", "0-1", "scoring that the step did not wait for", "timing/reward_s"),
        ("perf/reward_retries", "count", "samples scored again because their reward failed (reward.retries)", "-"),
        ("perf/reward_restarts", "count", "scoring processes killed or lost, and started anew", "-"),
        ("perf/rollout_retries", "count", "groups sent again, since an engine failed", "-"),
        ("perf/groups_moved", "count", "groups that went on elsewhere, since their engine was slow", "-"),
        ("perf/engine_restarts", "count", "restarts of engines that failed", "-"),
        (
            "perf/weight_sync_verified_tensors",
            "1",
            "tensors of an engine compared with what was sent, by checksums",
            "-",
        ),
        ("perf/weight_sync_failed_attempts", "1", "attempts at the hand-over that failed before one ended well", "-"),
    ),
    "State": _area(
        ("weights/version", "steps", "version of the weights that the engines hold after the step", "-"),
        ("weights/bytes", "bytes", "weights handed to each engine", "-"),
        (
            "schedule/mini_batches_without_tokens",
            "count",
            "mini-batches that made no optimizer step: truncation and rejection left none of their tokens",
            "-",
        ),
        ("schedule/imbalance", "1", "cost of the fullest data-parallel rank over the mean of all, minus 1", "-"),
        ("data/epoch", "passes", "passes over the training prompts that are finished", "-"),
        ("data/epoch/<source>", "passes", "the same of one of several sources (data.train_sources)", "-"),
    ),
}


MEASURED = ("timing/", "perf/")
"""Beginnings of the names of all metrics that another run of the same configuration may give other numbers for."""


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<[^>]+>", name)
    return re.compile(".+".join(re.escape(part) for part in parts))


_PATTERNS = [_pattern(doc.name) for docs in CATALOGUE.values() for doc in docs]


def undocumented(names: Iterable[str]) -> list[str]:
    """Return the names that no row of the catalogue describes, sorted."""
    return sorted({name for name in names if not any(pattern.fullmatch(name) for pattern in _PATTERNS)})


def catalogue_markdown() -> str:
    """Return docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "What `metrics.jsonl` and the trackers hold, by name: `area/thing/stat`. A metric is absent where there is",
        "nothing to count, never 0 or NaN. Means are exact: totals and counts are added up over micro-batches, ranks",
        "and mini-batches before they are divided.",
        "",
        "What depends on time, on load or on failures is named `timing/...` or `perf/...`. All other numbers are",
        "bitwise the same in a run that is repeated, or killed and resumed, on the same layout in fp32 with one",
        "`rollout=hf` engine. Several engines share prompts out by their speed, and SGLang batches as requests come:",
        "both can change the last bits of log-probs, and with them a sampled token. `rollout.partial` stops engines by",
        "the clock.",
        "",
        "This page is written by `make docs` from `megappo/observability/metric_catalogue.py`.",
    ]
    for area, docs in CATALOGUE.items():
        lines += ["", f"## {area}", "", "| name | unit | meaning | mean over |", "|---|---|---|---|"]
        lines += [f"| `{doc.name}` | {doc.unit} | {_cell(doc.meaning)} | {doc.denominator} |" for doc in docs]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(catalogue_markdown(), end="")
