"""Advantages, KL in reward and step metrics on packed tokens against verl's on padded ones.

Ours is the path of a training step: token rewards -> experience -> merged totals -> whitening applied.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils import torch_functional
from verl.utils.debug.metrics import calculate_debug_metrics

from benchmarks.algorithm_cases.workloads import (
    SAMPLES,
    PackedResponses,
    PaddedResponses,
    draw_prompt_lengths,
    draw_responses,
)
from benchmarks.harness import Case, Contender, Goal, Ratio
from benchmarks.memory import METHOD, peak_extra_bytes
from megappo.algo import tensor_scan
from megappo.algo.advantages import compute_sequence_advantages
from megappo.algo.advantages.base import SequenceInputs
from megappo.algo.experience import (
    ExperienceTotals,
    build_experience,
    compute_token_rewards,
    merge_experience_metrics,
    merge_whitening,
)
from megappo.algo.masked import sequence_runs, whiten
from megappo.algo.scan import COMPILED_FROM
from megappo.batch.fields import PackedBatch
from megappo.batch.stages import Experience
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, KLConfig, KLInRewardConfig
from megappo.observability.metrics import Metrics, merge

GAMMA, LAM, KL_COEF = 0.99, 0.95, 0.001
LONGEST_PROMPT = 1024
GAE = AlgorithmConfig(
    advantage=AdvantageConfig(name="gae", gamma=GAMMA, lam=LAM),
    kl=KLConfig(in_reward=KLInRewardConfig(estimator="k3", coef=KL_COEF)),
)
GRPO = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))


def make_gae(quick: bool) -> Case:
    """GAE and whitening only; the rewards are placed."""
    responses = draw_responses(*_sizes(quick))
    packed = PackedResponses(responses, draw_prompt_lengths(len(responses.lengths), LONGEST_PROMPT))
    batch, mask = packed.batch, responses.mask.long()
    rewards, values = packed.field(responses.rewards), packed.field(responses.values)
    arrays = (rewards.values, values.values, batch.response_mask, batch.offsets)
    tensors = [torch.from_numpy(array) for array in arrays]
    source = np.ones(2 * batch.num_tokens, dtype=np.float32)
    target = np.ones_like(source)

    def ours() -> tuple[np.ndarray, np.ndarray]:
        experience, totals = build_experience(
            batch,
            rewards=rewards,
            truncated=np.zeros(batch.num_sequences, dtype=bool),
            sequence_advantages=None,
            values=values,
            old_log_probs=None,
            ref_log_probs=None,
            algorithm=GAE,
        )
        assert experience.returns is not None
        return _whitened(experience, totals), experience.returns

    return Case(
        key="gae",
        question="GAE and whitening",
        sizes=_describe(responses, packed),
        contenders=[
            Contender(
                name="verl",
                run=lambda: core_algos.compute_gae_advantage_return(
                    responses.rewards, responses.values, mask, torch.tensor(GAMMA), torch.tensor(LAM)
                ),
            ),
            Contender(name="megappo", run=ours),
            Contender(name="megappo, torch", run=partial(_gae_in_torch, *tensors)),
            Contender(name="copy of both", run=lambda: np.copyto(target, source)),
        ],
        ratios=[
            Ratio(name="speedup", numerator="verl", denominator="megappo"),
            Ratio(name="speedup, torch", numerator="verl", denominator="megappo, torch"),
            Ratio(name="times one copy", numerator="megappo", denominator="copy of both"),
        ],
        goals=[
            Goal(figure="speedup", at_least=100),
            Goal(figure="speedup, torch", at_least=25),
            Goal(figure="difference", at_most=1e-5),
            Goal(figure="difference, torch", at_most=1e-5),
        ],
        quantities=partial(_gae_errors, responses, packed),
    )


def _gae_errors(responses: PaddedResponses, packed: PackedResponses, results: Mapping[str, object]) -> dict[str, float]:
    """Return the largest difference of advantages and returns to the peer's."""
    theirs = [field[responses.mask].numpy() for field in cast("tuple[Tensor, Tensor]", results["verl"])]
    compiled = [packed.responses_of(field) for field in cast("tuple[np.ndarray, np.ndarray]", results["megappo"])]
    in_torch = [
        packed.responses_of(field.numpy()) for field in cast("tuple[Tensor, Tensor]", results["megappo, torch"])
    ]
    return {
        "difference": max(map(_largest_difference, compiled, theirs)),
        "difference, torch": max(map(_largest_difference, in_torch, theirs)),
    }


def _gae_in_torch(rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return whitened advantages and returns of packed tokens, in torch operations only."""
    advantages, returns = tensor_scan.generalized_advantages(rewards, values, mask, offsets, gamma=GAMMA, lam=LAM)
    moments, _, _ = tensor_scan.masked_moments(advantages, mask)
    whitening = moments.whitening
    assert whitening is not None
    return advantages.sub_(whitening.mean).mul_(whitening.inverse_std), returns


def make_kl_gae_metrics(quick: bool) -> Case:
    """The whole way from scores to whitened advantages, with the metrics of the step."""
    sizes = _sizes(quick)
    step = PackedStep(*sizes)
    responses = step.responses
    theirs = _PaddedStep(responses, step.padded_log_probs)

    def quantities(results: Mapping[str, object]) -> dict[str, float]:
        experience, whitened, _ = cast("tuple[Experience, np.ndarray, Metrics]", results["megappo"])
        assert experience.returns is not None
        ours = [step.packed.responses_of(field) for field in (whitened, experience.returns)]
        peers = [field[responses.mask].numpy() for field in cast("tuple[Tensor, Tensor]", results["verl"])]
        extra = peak_extra_bytes(partial(_make_step, *sizes))
        return {
            "difference": max(map(_largest_difference, ours, peers)),
            "packed batch MB": step.num_bytes / 1e6,
            "extra memory MB": extra / 1e6,
            "extra memory / packed batch": extra / step.num_bytes,
        }

    return Case(
        key="kl_gae_metrics",
        question="KL in reward, GAE, whitening and step metrics, engines compared",
        sizes={
            **_describe(responses, step.packed),
            "kl": "k3",
            "packed batch": "tokens, mask, rollout, old and reference log-probs, values, ids and offsets",
            "memory": METHOD,
        },
        contenders=[
            Contender(name="verl", run=theirs.run_and_compare),
            Contender(name="verl, engines not compared", run=theirs.run),
            # Always compares the log-probs of both engines.
            Contender(name="megappo", run=step.run),
        ],
        ratios=[
            Ratio(name="speedup, engines compared", numerator="verl", denominator="megappo"),
            # The goal is held against the peer's shorter way.
            Ratio(name="speedup", numerator="verl, engines not compared", denominator="megappo"),
        ],
        goals=[
            Goal(figure="speedup", at_least=30),
            Goal(figure="extra memory / packed batch", at_most=1),
            Goal(figure="difference", at_most=1e-5),
        ],
        quantities=quantities,
    )


class PackedStep:
    """Our side of a step: what the workers of one shard hold before it, and the step."""

    def __init__(self, num_sequences: int, padded_to: int) -> None:
        self.responses = draw_responses(num_sequences, padded_to)
        self.packed = PackedResponses(self.responses, draw_prompt_lengths(num_sequences, LONGEST_PROMPT))
        self.padded_log_probs = _draw_log_probs(self.responses)
        old, ref, rollout = self.padded_log_probs
        self.batch = self.packed.batch
        self.batch.rollout_log_probs[:] = self.packed.field(rollout).values
        self.old, self.ref = self.packed.field(old), self.packed.field(ref)
        self.values = self.packed.field(self.responses.values)
        self.scores = self.responses.scores
        self.truncated = np.zeros(num_sequences, dtype=bool)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed batch: every array of the rollout batch and of the three computed fields."""
        arrays = {id(array): array for part in self._parts() for array in _arrays_of(part)}
        return sum(array.nbytes for array in arrays.values())

    def _parts(self) -> list[PackedBatch]:
        return [self.batch, self.old, self.ref, self.values]

    def run(self) -> tuple[Experience, np.ndarray, Metrics]:
        """Return the experience, its whitened advantages and the metrics of the step."""
        rewards, reward_totals = compute_token_rewards(
            self.batch,
            scores=self.scores,
            truncated=self.truncated,
            old_log_probs=self.old,
            ref_log_probs=self.ref,
            algorithm=GAE,
            kl_coef=KL_COEF,
        )
        experience, totals = build_experience(
            self.batch,
            rewards=rewards,
            truncated=self.truncated,
            sequence_advantages=None,
            values=self.values,
            old_log_probs=self.old,
            ref_log_probs=self.ref,
            algorithm=GAE,
        )
        metrics = merge([reward_totals.metrics, merge_experience_metrics([totals])])
        return experience, _whitened(experience, totals), metrics


def _whitened(experience: Experience, totals: ExperienceTotals) -> np.ndarray:
    """Return the advantages as the update sees them, [N], whitened as there: micro-batch by micro-batch."""
    whitening = merge_whitening([totals])
    whitened = np.empty_like(experience.advantages)
    for first, last in sequence_runs(experience.offsets):
        run = slice(experience.offsets[first], experience.offsets[last])
        whitened[run] = whiten(experience.advantages[run], whitening)
    return whitened


def _arrays_of(part: PackedBatch) -> list[np.ndarray]:
    fields = (getattr(part, name) for name in type(part).__dataclass_fields__)  # type: ignore[attr-defined]
    return [array for array in fields if isinstance(array, np.ndarray)]


def _make_step(num_sequences: int, padded_to: int) -> Callable[[], object]:
    """Return the step of a batch; what happens once per process has happened on a small one."""
    warm_up = PackedStep(512, 512)
    assert warm_up.batch.num_tokens > COMPILED_FROM
    warm_up.run()
    return PackedStep(num_sequences, padded_to).run


class _PaddedStep:
    """The peer's side of a step: what its trainer does in `apply_kl_penalty`, `compute_advantage`,
    `compute_data_metrics` and, when the engine gives log-probs, `calculate_debug_metrics`."""

    def __init__(self, responses: PaddedResponses, log_probs: tuple[Tensor, Tensor, Tensor]) -> None:
        self._responses, self._mask = responses, responses.mask.long()
        self._old, self._ref, rollout = log_probs
        prompts = draw_prompt_lengths(len(responses.lengths), LONGEST_PROMPT)
        prompt_mask = torch.arange(LONGEST_PROMPT)[None] >= LONGEST_PROMPT - torch.from_numpy(prompts)[:, None]
        self._data = DataProto.from_single_dict(
            {
                "token_level_scores": responses.rewards,
                "values": responses.values,
                "prompts": torch.zeros_like(prompt_mask, dtype=torch.long),
                "responses": torch.zeros_like(self._mask),
                "attention_mask": torch.cat([prompt_mask.long(), self._mask], dim=1),
                "response_mask": self._mask,
                "old_log_probs": self._old,
                "rollout_log_probs": rollout,
            }
        )

    def run_and_compare(self) -> tuple[Tensor, Tensor]:
        """Return what `run` does; the log-probs of the engine are compared with the trainer's, too."""
        calculate_debug_metrics(self._data)
        return self.run()

    def run(self) -> tuple[Tensor, Tensor]:
        """Return whitened advantages and returns."""
        mask, values = self._mask, self._responses.values
        kl = core_algos.kl_penalty(self._old, self._ref, kl_penalty="k3") * mask
        rewards = self._responses.rewards - KL_COEF * kl
        torch_functional.masked_mean(kl, mask=mask, axis=-1).mean().item()
        advantages, returns = core_algos.compute_gae_advantage_return(
            rewards, values, mask, torch.tensor(GAMMA), torch.tensor(LAM)
        )
        fields = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        self._data.batch.update(fields)
        compute_data_metrics(self._data, use_critic=True)
        return advantages, returns


def _draw_log_probs(responses: PaddedResponses) -> tuple[Tensor, Tensor, Tensor]:
    """Return old, reference and rollout log-probs, [B, T]: close to each other, as they are in a run."""
    generator = torch.Generator().manual_seed(1)
    shape = responses.values.shape
    old = -torch.rand(shape, generator=generator)
    ref = old + 0.05 * torch.randn(shape, generator=generator)
    rollout = old + 0.01 * torch.randn(shape, generator=generator)
    return tuple(field * responses.mask for field in (old, ref, rollout))  # type: ignore[return-value]


def make_grpo(quick: bool) -> Case:
    """One score per sequence, groups of eight."""
    num_sequences, padded_to = (1024, 256) if quick else (32768, 1024)
    responses = draw_responses(num_sequences, padded_to)
    packed = PackedResponses(responses, draw_prompt_lengths(num_sequences, padded_to // 4))
    mask = responses.mask.long()
    batch = packed.batch
    names = np.array([f"prompt-{group}" for group in batch.group_ids], dtype=object)
    inputs = SequenceInputs(
        scores=responses.scores,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        response_tokens=responses.lengths,
    )
    rewards = packed.field(responses.rewards)

    def with_tokens() -> np.ndarray:
        experience, _ = build_experience(
            batch,
            rewards=rewards,
            truncated=np.zeros(num_sequences, dtype=bool),
            sequence_advantages=compute_sequence_advantages(inputs, GRPO),
            values=None,
            old_log_probs=None,
            ref_log_probs=None,
            algorithm=GRPO,
        )
        return experience.advantages

    def errors(results: Mapping[str, object]) -> dict[str, float]:
        theirs = cast("tuple[Tensor, Tensor]", results["verl"])[0]
        ours = packed.responses_of(cast("np.ndarray", results["megappo, with tokens"]))
        of_sequences = cast("np.ndarray", results["megappo"])
        return {
            "difference": _largest_difference(of_sequences, theirs[:, 0].numpy()),
            "difference, with tokens": _largest_difference(ours, theirs[responses.mask].numpy()),
        }

    return Case(
        key="grpo",
        question=f"GRPO over {num_sequences:,} sequences",
        sizes={**_describe(responses, packed), "samples per prompt": SAMPLES},
        contenders=[
            Contender(
                name="verl",
                run=lambda: core_algos.compute_grpo_outcome_advantage(responses.rewards, mask, names),
            ),
            # What a step computes: a number per sequence. The experience, which every estimator needs, spreads it.
            Contender(name="megappo", run=lambda: compute_sequence_advantages(inputs, GRPO), repeats=5),
            Contender(name="megappo, with tokens", run=with_tokens),
        ],
        ratios=[
            Ratio(name="speedup", numerator="verl", denominator="megappo"),
            Ratio(name="speedup, with tokens", numerator="verl", denominator="megappo, with tokens"),
        ],
        goals=[Goal(figure="speedup", at_least=50), Goal(figure="difference", at_most=1e-5)],
        quantities=errors,
    )


def _sizes(quick: bool) -> tuple[int, int]:
    """Sequences and padded response length."""
    return (128, 512) if quick else (4096, 8192)


def _describe(responses: PaddedResponses, packed: PackedResponses) -> dict[str, object]:
    return {
        "sequences": len(responses.lengths),
        "padded to": responses.mask.shape[1],
        "response tokens": int(responses.lengths.sum()),
        "packed tokens": packed.batch.num_tokens,
        "seed": 0,
    }


def _largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max())
