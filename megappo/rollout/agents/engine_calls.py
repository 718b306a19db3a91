"""The way of programs' calls to the engine: at once where it runs sequences beside each other, else batch by batch."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.engine import FinishReason, GenerateRequest, Generation, SampledResponse

_NOT_ASKED = SampledResponse(tokens=[], log_probs=[], finish_reason=FinishReason.stop, versions=[])
"""Stands for the samples of a group that wait for something else: engines return a finished response as it is."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiting:
    """A call that is on its way."""

    group: int
    """Position of its request."""
    sample: int
    response: SampledResponse
    answer: asyncio.Future[SampledResponse]


class EngineCalls:
    """The calls of all programs of one generate call. For one event loop.

    A call goes to the engine as the group's own request in which only one sample goes on: its tokens so far are begun
    ones, whoever has made them. So the budget of a sample, the random numbers of an engine that has them by position,
    and the way an aborted call goes on are those of any response.
    """

    def __init__(
        self,
        engine: Generation,
        requests: Sequence[GenerateRequest],
        sampling: SamplingConfig,
        *,
        seed: int,
        progressed: Callable[[], None],
    ) -> None:
        """`progressed` is told when a call has come back with new tokens."""
        self._engine = engine
        self._requests = requests
        self._sampling = sampling
        self._seed = seed
        self._progressed = progressed
        self._waiting: list[_Waiting] = []
        self._under_way: set[_Waiting] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = sum(request.num_samples for request in requests)
        """Programs that have not ended."""
        self.closed = False
        self.version_in_use: int | None = None
        """The oldest version that a call has come back with."""

    async def draw(self, group: int, sample: int, response: SampledResponse) -> SampledResponse:
        """Go on with one response; it comes back aborted only once the calls are closed. Raises EngineError."""
        while not self.closed:
            answer = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(group=group, sample=sample, response=response, answer=answer))
            self._send_what_may_go()
            response = await answer
            if response.finish_reason is not FinishReason.abort:
                break
        return response

    def program_ended(self) -> None:
        """Note that one program less is going to call."""
        self._running -= 1
        self._send_what_may_go()

    def close(self) -> None:
        """Send nothing more; what waits comes back as it is, what is under way when the engine gives it back."""
        self.closed = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            _settle(call, call.response)

    async def cancel(self) -> None:
        """End what is under way, too: nobody wants it any more."""
        self.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_what_may_go(self) -> None:
        """An engine that works batch by batch gets the calls of all programs that have not ended in one batch: one that
        came later would have to wait until the whole batch is done."""
        self._waiting = [call for call in self._waiting if not call.answer.done()]  # a program may have given up
        if self._engine.at_once is None:
            if self._waiting and not self._under_way and len(self._waiting) >= self._running:
                self._start(self._send(self._waiting))
                self._waiting = []
            return
        calls, self._waiting = self._waiting, []
        for call in calls:
            self._start(self._send([call]))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, calls: Sequence[_Waiting]) -> None:
        """Make one call to the engine."""
        self._under_way.update(calls)
        by_group: dict[int, list[_Waiting]] = {}
        for call in calls:
            by_group.setdefault(call.group, []).append(call)
        group_of = {self._requests[group].group_id: group for group in by_group}
        requests = [self._request(self._requests[group], members) for group, members in by_group.items()]
        try:
            async for output in self._engine.generate(requests, self._sampling, seed=self._seed):
                versions = (self.version_in_use, output.policy_version)
                self.version_in_use = min(version for version in versions if version is not None)
                for call in by_group[group_of[output.group_id]]:
                    self._under_way.discard(call)
                    answer = output.responses[call.sample]
                    if answer.tokens != call.response.tokens:
                        self._progressed()
                    _settle(call, answer)
            missing = [call for call in calls if call in self._under_way]
            if missing:
                raise EngineError(f"{len(missing)} of {len(calls)} calls never came back from the engine")
        except Exception as error:  # whatever it is, the programs that wait must hear of it
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
        finally:
            self._under_way.difference_update(calls)
            self._send_what_may_go()

    def _request(self, request: GenerateRequest, members: Sequence[_Waiting]) -> GenerateRequest:
        """Return the request in which some samples of a group go on."""
        responses = {call.sample: call.response for call in members}
        return replace(request, begun=[responses.get(sample, _NOT_ASKED) for sample in range(request.num_samples)])


def _settle(call: _Waiting, answer: SampledResponse) -> None:
    if not call.answer.done():  # the program may have been cancelled
        call.answer.set_result(answer)
