"""Weights of the transformers engine: their type, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from megappo.config.model import Dtype
from megappo.config.rollout import PauseMode
from megappo.errors import CapabilityError, EngineError
from megappo.rollout.hf_engine import HFEngine
from tests.rollout.conftest import engine_spec
from tests.rollout.subject import Run, Subject
from tests.rollout.trainer_process import Trainer, plan_sources

Folders = tuple[Path, Path]


@pytest.mark.parametrize("pause", [PauseMode.retract, PauseMode.in_place])
def test_a_way_to_pause_that_it_does_not_have_is_refused(folders: Folders, tmp_path: Path, pause: PauseMode) -> None:
    spec = engine_spec(folders[0], tmp_path / "unused.log", pause=pause)
    with pytest.raises(CapabilityError, match=rf"pause={pause.value} needs .*use wait or abort"):
        HFEngine(spec)


def test_an_engine_takes_weights_in_its_own_type(
    tmp_path: Path, folders: Folders, trainer: Trainer, run: Run[Any]
) -> None:
    spec = engine_spec(folders[0], tmp_path / "unused.log")
    spec.config.dtype = Dtype.bfloat16
    engine = HFEngine(spec)
    run(engine.start())
    subject = Subject(engine=engine, run=run, trainer=trainer, folder=tmp_path, source=folders[0])
    subject.join("narrow")
    subject.hand_over(folders[1], sources=plan_sources(folders[1], ["narrow"], dtype="bfloat16"))
    with pytest.raises(EngineError, match="verify: 27 of 27 tensors differ"):  # rounded when they arrive
        subject.hand_over(folders[1], sources=plan_sources(folders[1], ["narrow"], dtype="float32"))
    subject.leave("narrow")
    run(engine.stop())
