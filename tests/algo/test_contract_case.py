"""`megappo inspect algorithm` against hostile input: no traceback, nothing ignored, the fault under its own name."""

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.cli.main import main

ONE = {"mask": [1, 1], "score": 1.0}
PLAIN = {"advantage": {"name": "reinforce_plus_plus", "whiten": False}}
HUGE = 10**400
"""JSON has integers that no float can hold."""

Outcome = tuple[int, str, str]


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:  # Any: a function of loose JSON
    def run(case: Any) -> Outcome:
        file = tmp_path / "case.json"
        file.write_bytes(case if isinstance(case, bytes) else json.dumps(case).encode())
        code = main(["inspect", "algorithm", str(file)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(outcome: Outcome, message: str) -> None:
    code, out, error = outcome
    assert code == 2 and out == "" and message in error, error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"sequences": [{"mask": [1], "score": 1, "score": 2}]}', "key 'score' is given twice"),
        (b'{"sequences": [], "algorithm": {"seed": 1, "seed": 2}}', "key 'seed' is given twice"),
        (b'{"sequences": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"sequences": [{"group": "\xe9"}]}', "is not JSON"),
        (b"", "is not JSON"),
    ],
)
def test_a_file_that_would_lose_or_break_something_is_refused(inspect: Any, text: bytes, message: str) -> None:
    refused(inspect(text), message)


def test_a_byte_order_mark_and_a_null_algorithm_are_taken(inspect: Any) -> None:
    assert inspect(b'\xef\xbb\xbf{"sequences": [], "algorithm": null}')[0] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": HUGE}, "sequence 1: score must be a number"),
        ({"score": {"score": HUGE}}, "sequence 1: score must hold numbers only"),
        ({"log_probs": [HUGE, 0]}, "sequence 1: log_probs must be a list of numbers"),
        ({"greedy_score": -HUGE}, "sequence 1: greedy_score must be a number"),
    ],
)
def test_an_integer_that_no_float_can_hold_is_refused(inspect: Any, fields: dict[str, Any], message: str) -> None:
    same = {name: [0, 0] if name == "log_probs" else 1 for name in fields if name != "score"}
    refused(inspect({"sequences": [ONE | same, ONE | fields], "algorithm": PLAIN}), message)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"advantage": "grpo"}, "algorithm.advantage=grpo must be a section with the keys name, gamma"),
    ({"advantage": None}, "algorithm.advantage=null must be a section"),
    ({"advantage": {"name": None}}, "algorithm.advantage.name=null must be text"),
    ({"advantage": {"name": 5}}, "algorithm.advantage.name=5 must be text"),
    ({"advantage": {"name": "???"}}, "algorithm.advantage.name=??? is unknown"),
    ({"seed": "${oc.env:UID,3}"}, "algorithm.seed=${oc.env:UID,3} must be an integer"),
    ({"seed": 1.5}, "algorithm.seed=1.5 must be an integer"),
    ({"seed": True}, "algorithm.seed=True must be an integer"),
    ({"entropy": {"coef": True}}, "algorithm.entropy.coef=True must be a number"),
    ({"entropy": {"coef": "0.5"}}, "algorithm.entropy.coef=0.5 must be a number"),
    ({"entropy": {"coef": HUGE}}, "algorithm.entropy.coef=a number that is too large must be a number"),
    ({"mask_truncated": 1}, "algorithm.mask_truncated=1 must be true or false"),
    ({"policy_loss": {"clip": 0.2}}, "algorithm.policy_loss.clip=0.2 must be a section with the keys low, high, dual"),
    ({"policy_loss": {"aggregation": "seq-mean"}}, "algorithm.policy_loss.aggregation=seq-mean must be one of"),
    ({"correction": {"reject": {"level": "token"}}}, "algorithm.correction.reject={'level': 'token'} must be a list"),
    ({"correction": {"reject": [None]}}, "algorithm.correction.reject[0]=null must be a section"),
    ({"correction": {"reject": [{"level": "sequence"}]}}, "algorithm.correction.reject[0].level=sequence must be one"),
    ({"correction": {"reject": [{"levle": "token"}]}}, "did you mean algorithm.correction.reject[0].level?"),
    ({"advantage": {"reward_keys": "a"}}, "algorithm.advantage.reward_keys=a must be a list"),
    ({"advantage": {"weights": [None]}}, "algorithm.advantage.weights[0]=null must be a number"),
    ({"overlong": 5}, "algorithm.overlong=5 must be a section"),
    ({"old_log_probs": None}, "algorithm.old_log_probs=null must be one of auto, recompute, rollout"),
    ({"sampling": {"max_rounds": 4}}, "algorithm.sampling.max_rounds=4 cannot be used here: inspect draws no samples"),
    ({"sampling": {"on_exhausted": "stop"}}, "algorithm.sampling.on_exhausted=stop cannot be used here"),
    ({"sampling": {"oversample": 1.5}}, "algorithm.sampling.oversample=1.5 cannot be used here"),
    ({"ppo_epochs": 2}, "algorithm.ppo_epochs=2 is not a key of the configuration"),
]


@pytest.mark.parametrize(("algorithm", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_setting_is_refused_under_its_own_key(inspect: Any, algorithm: dict[str, Any], message: str) -> None:
    outcome = inspect({"sequences": [ONE], "algorithm": algorithm})
    refused(outcome, message)
    assert outcome[2].count("config error") == 1


@pytest.mark.parametrize("name", ["no.such:thing", ":", "math:", "math:pi", "..x:y"])
def test_a_plug_in_that_is_none_is_refused_whether_or_not_it_would_be_called(inspect: Any, name: str) -> None:
    refused(inspect({"sequences": [], "algorithm": {"advantage": {"name": name}}}), name)
    # Without log_probs no loss is computed.
    refused(inspect({"sequences": [ONE], "algorithm": PLAIN | {"policy_loss": {"name": name}}}), name)


def test_an_estimator_from_outside_gives_one_number_a_sequence(inspect: Any) -> None:
    case = {"sequences": [ONE, ONE], "algorithm": {"advantage": {"name": "tests.algo.plugins:one_number"}}}
    refused(inspect(case), "gave advantages of shape (), must give one for each of 2 sequences")


NEEDS = {
    "kl": {"in_reward": {"coef": 0.1}, "in_loss": {"coef": 0.1}},
    "entropy": {"coef": 0.1},
    "correction": {"weight": {}},
}


@pytest.mark.parametrize("source", ["auto", "recompute"])
@pytest.mark.parametrize("name", ["grpo", "gae", "optimal_token_baseline", "remax", "gdpo"])
def test_fields_may_be_absent_where_every_sequence_is_empty(inspect: Any, name: str, source: str) -> None:
    advantage = {"name": name} | ({"reward_keys": ["a"]} if name == "gdpo" else {})
    algorithm = NEEDS | {"advantage": advantage, "old_log_probs": source}
    if name == "gdpo":
        algorithm["kl"] = {"in_loss": {"coef": 0.1}}
    for loss in ("ppo_clip", "kl_cov"):
        sequences = [{"mask": [0], "score": 1.0, "log_probs": [-1]}, {"mask": []}]
        case = {"sequences": sequences, "algorithm": algorithm | {"policy_loss": {"name": loss}}}
        code, out, error = inspect(case)
        assert code == 0, error
        found = json.loads(out)
        assert (found["loss"], found["gradient"], found["advantages"]) == (0, [[0], []], [[0], []])
        assert found["value_loss"] is None and found["metrics"]["rollout/empty_ratio"] == 1


def test_a_group_of_one_among_others_gets_nothing_and_alone_it_is_refused(inspect: Any) -> None:
    pair = [ONE | {"group": "a"}, ONE | {"group": "a", "score": 0}]
    algorithm = {"advantage": {"name": "grpo_passk"}}
    code, out, _ = inspect({"sequences": [*pair, ONE | {"group": "b"}], "algorithm": algorithm})
    assert code == 0 and json.loads(out)["advantages"][2] == [0, 0]
    message = "sequence 0: group has one sequence only"
    refused(inspect({"sequences": [pair[0], ONE | {"group": "b"}], "algorithm": algorithm}), message)


def test_numbers_that_overflow_are_in_the_result_and_stdout_stays_json(inspect: Any) -> None:
    sequences = [
        {"group": 1, "mask": [1], "score": score, "log_probs": [-1], "old_log_probs": [old], "rollout_log_probs": [-1]}
        for score, old in ((float("-inf"), -1), (1e308, -1e308), (-1e308, float("nan")))
    ]
    for name in ("grpo", "rloo", "reinforce_plus_plus", "opo"):
        code, out, error = inspect({"sequences": sequences, "algorithm": {"advantage": {"name": name}}})
        assert code == 0 and json.loads(out)["loss"] != json.loads(out)["loss"], "NaN"
        assert error == "the loss or its gradient is not finite: a run would skip this step and count it\n"


def test_both_kl_terms_and_a_rejection_of_agreement_are_said_on_stderr(inspect: Any) -> None:
    kl = {"in_reward": {"coef": 0.1}, "in_loss": {"coef": 0.1}}
    sequence = ONE | {"log_probs": [-1, -1], "ref_log_probs": [-1, -1], "rollout_log_probs": [-1, -1]}
    correction = {"reject": [{"estimator": "k3"}]}
    code, _, error = inspect({"sequences": [sequence], "algorithm": PLAIN | {"kl": kl, "correction": correction}})
    assert code == 0 and "counts twice" in error and "removes tokens on which both engines agree" in error
