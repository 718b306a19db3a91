"""The desk in front of a reward model: many ask for scores, its ranks get one pass after the other.

All ranks of a model must run the same passes in the same order, so one process alone tells them which. What is asked
while a pass runs goes into the next one together.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray

from megappo.balance.workload import workload_of_model
from megappo.batch.fields import select
from megappo.cluster.observed import Ask
from megappo.cluster.placement import Slot
from megappo.cluster.reward_model import RewardModelGroup
from megappo.cluster.runtime import Call, begin_worker, gather
from megappo.config.reward import terms_of
from megappo.config.reward_rules import REWARD_MODEL, reward_sections
from megappo.config.run import RunConfig
from megappo.controller.preference import deal_texts
from megappo.rewards.types import ModelScore, Sample


@dataclass(slots=True, eq=False)
class _Order:
    """Texts that are scored together."""

    tokens: list[list[int]]
    scores: list[float] | None = None


class PassQueue:
    """Runs one pass after the other; what is asked meanwhile goes into the next one together.

    Args:
        run: scores texts, given as token ids, in order; runs in a thread.
    """

    def __init__(self, run: Callable[[list[list[int]]], list[float]]) -> None:
        self._run = run
        self._waiting: list[_Order] = []
        self._running = asyncio.Lock()

    async def scores(self, tokens: list[list[int]]) -> list[float]:
        """Return the scores of texts, in order. Raises what `run` raises."""
        order = _Order(tokens)
        self._waiting.append(order)
        async with self._running:
            if order.scores is None:
                await self._run_waiting(order)
        assert order.scores is not None
        return order.scores

    async def between(self, function: Callable[[], None]) -> None:
        """Run something else, in a thread, while no pass runs."""
        async with self._running:
            await asyncio.to_thread(function)

    async def _run_waiting(self, own: _Order) -> None:
        taken, self._waiting = self._waiting, []
        try:
            scores = await asyncio.to_thread(self._run, [text for order in taken for text in order.tokens])
        except BaseException:
            # The others find out for themselves.
            self._waiting = [*(order for order in taken if order is not own), *self._waiting]
            raise
        for order in taken:
            order.scores, scores = scores[: len(order.tokens)], scores[len(order.tokens) :]


class RewardDesk:
    """Ray actor body. Its calls run in one event loop, so that several may wait at a time."""

    def __init__(self, config: RunConfig, group: RewardModelGroup, log_path: Path) -> None:
        begin_worker(log_path, role="reward_desk", rank=0, name="reward desk")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._config = config
        self._group = group
        self._passes = PassQueue(self._run_pass)

    def open(self) -> str:
        """Load the tokenizer; returns what it is beside the policy's, in words."""
        from megappo.data.tokenizer import load_tokenizer
        from megappo.models.architecture import read_config

        path = str(self._config.reward_model.path)
        model = read_config(Path(path))
        self._tokenizer = load_tokenizer(path)
        self._workload = workload_of_model(model)
        self._pad_token_id = cast(int | None, model.get("pad_token_id"))
        self._most_tokens = int(model["max_position_embeddings"])
        policy = load_tokenizer(self._config.model.path)
        if policy.get_vocab() == self._tokenizer.get_vocab():
            return "the reward model's tokenizer is the policy's; texts are rendered and tokenised for it all the same"
        return "the reward model has a tokenizer of its own: texts are tokenised anew for it"

    async def score(self, samples: Sequence[Sample]) -> list[ModelScore]:
        """Score samples, in order; what cannot be scored is told of in its place.

        Raises:
            WorkerError: the model's workers failed.
        """
        tokens = self._tokens(samples)
        problems = [self._problem(text) for text in tokens]
        fitting = [text for text, problem in zip(tokens, problems) if not problem]
        scores = iter(await self._passes.scores(fitting) if fitting else [])
        return [ModelScore(score=None, problem=text) if text else ModelScore(score=next(scores)) for text in problems]

    async def rest(self) -> None:
        """Move what `reward_model.offload` names out of device memory; the next pass brings it back."""
        await self._passes.between(self._group.offload)

    def _run_pass(self, tokens: list[list[int]]) -> list[float]:
        from megappo.data.preferences import text_batch

        batch = text_batch(tokens)
        parts, plan = deal_texts(
            batch, layout=self._group.layout, batching=self._config.batching, workload=self._workload
        )
        found = self._group.compute_scores([cast(Any, ray.put(select(batch, part))) for part in parts], plan)
        scores = np.empty(len(tokens), np.float32)
        # Of few texts some ranks have none, and an empty list is no list of integers.
        scores[np.concatenate([np.asarray(part, np.int64) for part in parts])] = np.concatenate(found)
        return scores.tolist()

    def _tokens(self, samples: Sequence[Sample]) -> list[list[int]]:
        from megappo.data.preferences import score_tokens

        return score_tokens(
            [sample.prompt + sample.response for sample in samples],
            [sample.finish_reason == "stop" for sample in samples],
            self._tokenizer,
            pad_token_id=self._pad_token_id,
        )

    def _problem(self, tokens: Sequence[int]) -> str:
        """Return why a text cannot be scored; empty: it can."""
        if 0 < len(tokens) <= self._most_tokens:
            return ""
        return (
            f"a text of {len(tokens)} tokens cannot be scored: {self._config.reward_model.path} takes 1 to "
            f"{self._most_tokens} (lower data.max_prompt_tokens or max_new_tokens)"
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class DeskClient:
    """What a process asks the desk with."""

    # Any: a Ray actor handle has no type of its own.
    handle: Any
    log_path: Path
    asking: frozenset[str]
    """Names of the rewards (`Sample.reward`) that want the score."""
    offloads: bool
    """Whether there is anything to move out of device memory."""
    timeout_s: float
    """Longest time of a pass."""
    start_timeout_s: float

    def open(self) -> str:
        """Open the desk; returns what is to be said of the tokenizer."""
        limit_s, key = self.start_timeout_s, "cluster.start_timeout_s"
        return gather([self._call("open")], phase="start", timeout_s=limit_s, key=key)[0]

    async def add_scores(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with their scores, those whose reward wants one.

        Raises:
            WorkerError: the model's workers failed.
        """
        wanting = [sample for sample in samples if sample.reward in self.asking]
        if not wanting:
            return list(samples)
        scores = iter(await self.handle.score.remote(wanting))
        return [
            replace(sample, model_score=next(scores)) if sample.reward in self.asking else sample for sample in samples
        ]

    def rest(self) -> None:
        """Move what `reward_model.offload` names out of device memory, once no pass runs."""
        if self.offloads:
            gather([self._call("rest")], phase="offload", timeout_s=2 * self.timeout_s)

    def _call(self, method: str) -> Call:
        return Call(ref=getattr(self.handle, method).remote(), worker="reward desk", log_paths=(self.log_path,))


class RewardModelService:
    """A reward model that scores for a run: its workers and the desk in front of them."""

    client: DeskClient
    """There after `start`."""

    def __init__(self, config: RunConfig, *, slots: Sequence[Slot], log_dir: Path) -> None:
        self._config = config
        self._log_path = log_dir / "reward-desk.log"
        self.group = RewardModelGroup(config, slots=slots, log_dir=log_dir)

    def start(self) -> list[Call]:
        """Begin to build the model; returns the calls to wait for."""
        calls, config = self.group.start(), self._config
        desk = ray.remote(RewardDesk).options(num_cpus=0)
        sections = reward_sections(config).items()
        asking = (name for name, section in sections if any(t.name == REWARD_MODEL for t in terms_of(section).values()))
        self.client = DeskClient(
            handle=desk.remote(config, self.group, self._log_path),
            log_path=self._log_path,
            asking=frozenset(asking),
            offloads=config.reward_model.offload.params,
            timeout_s=config.cluster.call_timeout_s,
            start_timeout_s=config.cluster.start_timeout_s,
        )
        return calls

    def observed(self) -> dict[str, Ask]:
        """Return how to ask each rank of the model what it does, by name."""
        return self.group.observed()

    def stop(self) -> None:
        """End all processes at once."""
        if hasattr(self, "client"):
            ray.kill(self.client.handle)
        self.group.stop()
