"""What asks an engine to generate while weights are handed over gets answers by the new ones, and no refusal."""

import asyncio

from megappo.config.rollout import SamplingConfig
from megappo.rollout.engine import GroupOutput
from megappo.rollout.held_generation import HeldGeneration
from megappo.weight_sync.receive import Reception
from tests.rollout.subject import TIMEOUT_S, Subject, group_loads
from tests.rollout.test_engine_contract import Folders, Models, ask, largest_difference
from tests.rollout.trainer_process import plan_sources


def test_a_call_in_the_middle_of_a_hand_over_waits_and_is_of_the_new_version(
    subject: Subject, folders: Folders, models: Models
) -> None:
    sources = plan_sources(folders[1], subject.groups)
    loads = group_loads(sources)
    held = HeldGeneration(subject.engine)
    version = subject.version + 1

    async def call() -> list[GroupOutput]:
        return [output async for output in held.generate(ask(2), SamplingConfig(max_new_tokens=8), seed=0)]

    async def both() -> list[GroupOutput]:
        reception = Reception(subject.engine, version, timeout_s=TIMEOUT_S)
        held.hold()
        await reception.begin()
        answers = asyncio.create_task(call())
        await reception.load(loads)
        await reception.close({})
        assert not answers.done()
        held.release()
        return await answers

    subject.trainer.start("send", folder=folders[1], sources=sources, wanted=[])
    outputs = subject.run(both())
    subject.trainer.finish()
    subject.version = version
    assert {span.version for output in outputs for response in output.responses for span in response.versions} == {
        version
    }
    assert largest_difference(models[1], outputs) < 1e-4
