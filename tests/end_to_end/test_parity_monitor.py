"""A real run whose engine goes wrong: fine, then worth a warning, then ended before it trains on rubbish."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run
from tests.end_to_end.wrong_engine import HOT_GROUPS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wrong_run(launch: Launch, sft_run: Run) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # the engine is a plug-in of this folder
        run = launch(
            "train",
            "wrong-engine",
            "experiment=quickstart",
            "rollout=hf",
            "cluster.pools.main=1",
            "actor.parallelism.tensor=1",
            "rollout.engine=tests.end_to_end.wrong_engine:WrongEngine",
            "rollout.parity.warn.max=1e-3",
            "rollout.parity.stop.mean=0.1",
            "rollout.parity.dump=3",
            "trainer.total_steps=5",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "data.validation=null",
            "tracking.trackers=[]",
        )
    assert run.wait(START_TIMEOUT_S) == 1, run.output
    return run


def test_the_clean_step_is_silent_and_measured(wrong_run: Run) -> None:
    first = wrong_run.metrics()[0]
    assert 0 < first["actor/rollout_log_prob_diff/mean"] <= first["actor/rollout_log_prob_diff/max"] <= 1e-4
    assert first["actor/rollout_log_prob_diff/compared_ratio"] == 1
    assert not (wrong_run.directory / "records" / "step_000001").exists()
    assert "step 1: log-probs" not in wrong_run.output


def test_the_warning_is_one_line_and_the_dump_names_the_hot_groups(wrong_run: Run) -> None:
    (line,) = [line for line in wrong_run.output.splitlines() if "step 2: log-probs of engine and trainer" in line]
    dump = json.loads((wrong_run.directory / "records" / "step_000002" / "parity.json").read_text())
    assert f"max {dump['max']:.3g} > rollout.parity.warn.max=0.001" in line and "records/step_000002" in line
    assert wrong_run.metrics()[1]["actor/rollout_log_prob_diff/max"] == dump["max"]
    assert len(dump["sequences"]) == 3
    for sequence in dump["sequences"]:
        assert sequence["group_id"] % HOT_GROUPS == 0 and sequence["policy_version"] == dump["trainer_version"] == 1
        assert len(sequence["response_tokens"]) == len(sequence["rollout_log_probs"]) > 0
        size = np.abs(np.subtract(sequence["rollout_log_probs"], sequence["training_log_probs"]))
        assert size.argmax() == sequence["worst_token"] and size.max() > 1e-3
        # One token per character, and the end token is not part of the text.
        assert len(sequence["response"]) == len(sequence["response_tokens"]) - (sequence["finish_reason"] == "stop")


def test_the_stop_ends_the_run_with_what_to_look_at(wrong_run: Run) -> None:
    assert [line["step"] for line in wrong_run.metrics()] == [1, 2]
    assert wrong_run.summary()["exit"] == "failed: ParityError"
    dump = wrong_run.directory / "records" / "step_000003" / "parity.json"
    assert json.loads(dump.read_text())["mean"] > 0.1
    for text in ("step 3: log-probs of engine and trainer are too far apart", "records/step_000003", "temperature"):
        assert text in wrong_run.output, text
