"""An engine that goes wrong as the run goes on: named in the configuration as `tests.end_to_end.wrong_engine:...`."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from megappo.config.rollout import SamplingConfig
from megappo.rollout.engine import GenerateRequest, GroupOutput
from megappo.rollout.hf_engine import HFEngine

HOT_GROUPS = 8
"""One group of so many is sampled at another temperature by version 1."""


class WrongEngine(HFEngine):
    """Right with the weights it starts with, hot for some groups with version 1, for all with any later one."""

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Sample some groups at a temperature that nobody asked for."""
        version = await self.weight_version()
        wrong = [request for request in requests if version >= 1 and (version > 1 or not request.group_id % HOT_GROUPS)]
        right = [request for request in requests if request not in wrong]
        hot = replace(sampling, temperature=0.9 if version == 1 else 0.3)
        for some, how in ((right, sampling), (wrong, hot)):
            async for output in super().generate(some, how, seed=seed):
                yield output
