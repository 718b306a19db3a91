"""`megappo evaluate` with real engines, on two sets."""

import json

import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run

SETS = [
    f"data.validation_sets.{name}.{setting}"
    for name, skip in (("first", 0), ("second", 20))
    for setting in (
        "kind=reasoning_gym",
        "task=spell_backward",
        r'question_pattern=": (\w+)$"',
        "params={min_word_len:3,max_word_len:5}",
        f"skip={skip}",
        f"size={skip + 20}",
    )
]


@pytest.mark.slow
def test_an_evaluation_starts_no_trainer_and_writes_what_it_found(launch: Launch, sft_run: Run) -> None:
    run = launch(
        "evaluate",
        "judged",
        "runs/quickstart-sft/model",
        "experiment=quickstart",
        "rollout=hf",
        "data.validation=null",
        "data.on_shared=keep",  # the rows of both sets are among those of the training
        *SETS,
        "rollout.validation.temperature=1.0",
        "validation.samples_per_prompt=4",
        "validation.pass_at=[1,4]",
        "validation.majority=response",
        "tracking.trackers=[]",
    )
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    folder = run.directory.with_name("judged-evaluation")
    assert {path.name for path in (folder / "logs").iterdir()} == {"controller.log", "rollout-0.log", "reward-0.log"}
    facts = json.loads((folder / "evaluation.json").read_text())
    lines = [json.loads(text) for text in (folder / "generations.jsonl").read_text().splitlines()]
    assert set(facts["sets"]) == {"first", "second"}
    for name, found in facts["sets"].items():
        scores = [line["score"] for line in lines if line["set"] == name]
        assert len(scores) == found["answers"] == 80
        assert found["reward"]["mean"]["value"] == pytest.approx(sum(scores) / 80)
        assert set(found["reward"]) == {"mean", "best", "majority", "pass_at_1", "pass_at_4"}
        low, high = found["reward"]["mean"]["interval"]
        assert 0 <= low <= found["reward"]["mean"]["value"] <= high <= 1  # a model of 25 steps knows little
