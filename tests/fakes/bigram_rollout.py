"""FakeRollout: engines that sample from a bigram table, behind the port of the loop. A Ref is the object itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megappo.batch.fields import concat, empty, offsets_of, select
from megappo.batch.stages import BegunBatch, RolloutBatch
from megappo.config.rollout import SamplingConfig
from megappo.controller.ports import Draw, FinishedGroup, HeldRollouts, SequenceInfo, Shard
from megappo.data.types import Prompt
from megappo.observability.metrics import Metrics
from megappo.rewards.types import Sample

EOS = 0
_ENDS = [None, "stop", "length"]


def as_ref(value: Any) -> Any:
    """In one process a Ref is the object itself."""
    return value


@dataclass
class FakeAnswer:
    """One response so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version that sampled each token."""
    finish_reason: str | None = None

    def advance(self, last: int, table: torch.Tensor, version: int, sampling: SamplingConfig, random: Any) -> None:
        """Sample one more token; `last` is the one before it."""
        row = torch.log_softmax(table[last] / (sampling.temperature or 1.0), dim=-1).double().numpy()
        greedy = sampling.temperature == 0
        token = int(row.argmax()) if greedy else int(random.choice(len(row), p=np.exp(row) / np.exp(row).sum()))
        self.tokens.append(token)
        self.log_probs.append(float(row[token]))
        self.versions.append(version)
        if token == EOS:
            self.finish_reason = "stop"
        elif len(self.tokens) >= sampling.max_new_tokens:
            self.finish_reason = "length"


@dataclass
class FakeRollout:
    """Samples from its own copy of the table, all sequences one token at a time; the copy moves when weights are
    pushed. What is aborted stays in `begun` and goes on from there."""

    table: torch.Tensor
    version: int = -1
    calls: list[str] = field(default_factory=list)
    stored: dict[int, tuple[Draw, FakeAnswer]] = field(default_factory=dict)
    """Complete sequences, by id."""
    begun: dict[int, FakeAnswer] = field(default_factory=dict)
    """Sequences of aborted groups, by id."""
    generating: bool = False

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        assert self.version >= 0, "generate before the first weight push"
        assert not self.generating, "two calls of generate at a time"
        assert wanted is None or wanted <= len(draws)
        self.calls.append("generate")
        self.generating = True
        randoms = {draw.group_id: np.random.default_rng((seed, draw.group_id)) for draw in draws}
        answers = {number: self.begun.pop(number, FakeAnswer()) for draw in draws for number in draw.sequence_ids}
        under_way, complete = list(reversed(draws)), 0  # engines finish in any order
        while under_way and (wanted is None or complete < wanted):
            for draw in under_way:
                self._advance(draw, answers, sampling, randoms[draw.group_id])
            done = [draw for draw in under_way if all(answers[number].finish_reason for number in draw.sequence_ids)]
            under_way = [draw for draw in under_way if draw not in done]
            complete += len(done)
            for draw in done:
                yield self._finish(draw, answers)
        self.begun |= {number: answers[number] for draw in under_way for number in draw.sequence_ids}
        self.generating = False

    def _advance(self, draw: Draw, answers: dict[int, FakeAnswer], sampling: SamplingConfig, random: Any) -> None:
        sampling = replace(sampling, temperature=0.0) if draw.greedy else sampling
        for answer in (answers[number] for number in draw.sequence_ids):
            if answer.finish_reason is None:
                last = [*draw.prompt.tokens, *answer.tokens][-1]
                answer.advance(last, self.table, self.version, sampling, random)

    def _finish(self, draw: Draw, answers: dict[int, FakeAnswer]) -> FinishedGroup:
        infos, samples = [], []
        for sequence_id in draw.sequence_ids:
            answer = answers[sequence_id]
            reason = answer.finish_reason
            assert reason is not None
            self.stored[sequence_id] = (draw, answer)
            infos.append(
                SequenceInfo(
                    sequence_id=sequence_id,
                    group_id=draw.group_id,
                    prompt_tokens=len(draw.prompt.tokens),
                    response_tokens=len(answer.tokens),
                    finish_reason=reason,
                    policy_version=min(answer.versions),
                    row=draw.prompt.row,
                )
            )
            text = " ".join(map(str, answer.tokens))
            samples.append(Sample(prompt=draw.prompt.text, response=text, answer=None, finish_reason=reason))
        return FinishedGroup(sequences=infos, samples=as_ref(samples))

    def pack(self, shards: Sequence[Sequence[int]], *, forget: Sequence[int] = ()) -> list[Shard]:
        self.calls.append("pack")
        packed = [
            Shard(sequence_ids=list(ids), pieces=[as_ref(self._pack([sequence_id])) for sequence_id in reversed(ids)])
            for ids in shards
        ]
        for sequence_id in (*forget, *(sequence_id for ids in shards for sequence_id in ids)):
            del self.stored[sequence_id]
        return packed

    def _pack(self, sequence_ids: Sequence[int]) -> RolloutBatch:
        draw, answer = self.stored[sequence_ids[0]]
        prompt, response = draw.prompt.tokens, answer.tokens
        return RolloutBatch(
            offsets=offsets_of([len(prompt) + len(response)]),
            tokens=np.array([*prompt, *response], dtype=np.int32),
            response_mask=np.array([False] * len(prompt) + [True] * len(response)),
            rollout_log_probs=np.array([0.0] * len(prompt) + answer.log_probs, dtype=np.float32),
            sequence_ids=np.array(sequence_ids, dtype=np.int64),
            group_ids=np.array([draw.group_id], dtype=np.int64),
        )

    def read(self, sequence_ids: Sequence[int]) -> HeldRollouts:
        assert not self.generating, "tokens are read while engines sample"
        complete = [self._pack([number]) for number in sorted(sequence_ids) if number in self.stored]
        begun = sorted(number for number in sequence_ids if number in self.begun)
        answers = [self.begun[number] for number in begun]
        return HeldRollouts(
            complete=concat(complete or [empty(RolloutBatch)]),
            begun=BegunBatch(
                offsets=offsets_of([len(answer.tokens) for answer in answers]),
                tokens=np.array([token for answer in answers for token in answer.tokens], dtype=np.int32),
                log_probs=np.array([value for answer in answers for value in answer.log_probs], dtype=np.float64),
                versions=np.array([number for answer in answers for number in answer.versions], dtype=np.int64),
                sequence_ids=np.array(begun, dtype=np.int64),
                group_ids=np.zeros(len(begun), dtype=np.int64),
                ends=np.array([_ENDS.index(answer.finish_reason) for answer in answers], dtype=np.int8),
            ),
        )

    def adopt(self, held: HeldRollouts) -> None:
        assert not self.stored and not self.begun, "a new process holds nothing"
        for row, number in enumerate(held.complete.sequence_ids.tolist()):
            one = select(held.complete, [row])
            mask = one.response_mask
            prompt = Prompt(row=-1, text="", tokens=one.tokens[~mask].tolist(), answer=None, source="")
            draw = Draw(group_id=int(one.group_ids[0]), prompt=prompt, sequence_ids=[number])
            log_probs = one.rollout_log_probs[mask].tolist()
            self.stored[number] = (draw, FakeAnswer(tokens=one.tokens[mask].tolist(), log_probs=log_probs))
        for row, number in enumerate(held.begun.sequence_ids.tolist()):
            part = select(held.begun, [row])
            self.begun[number] = FakeAnswer(
                tokens=part.tokens.tolist(),
                log_probs=part.log_probs.tolist(),
                versions=part.versions.tolist(),
                finish_reason=_ENDS[part.ends[0]],
            )

    def take_metrics(self) -> Metrics:
        return {}

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_weights(self) -> None:
        self.calls.append("wake_weights")

    def wake_cache(self) -> None:
        self.calls.append("wake_cache")
