"""`megappo inspect algorithm`: JSON in, JSON out, refusals with sequence number and field."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megappo.cli.algorithm_case import CaseError
from megappo.cli.inspect_algorithm import inspect_algorithm
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS, LOSS_DECLARATIONS
from megappo.errors import ConfigError, DataError


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:  # Any: a function of loose JSON
    def run(sequences: list[dict[str, Any]], **algorithm: Any) -> Any:
        file = tmp_path / "case.json"
        file.write_text(json.dumps({"sequences": sequences, "algorithm": algorithm}))
        assert inspect_algorithm(str(file)) == 0
        return json.loads(capsys.readouterr().out)

    return run


GAE = {"gamma": 0.9, "lam": 0.8, "whiten": False}


def test_a_reward_on_a_masked_tail_is_moved_and_masked_values_are_never_read(inspect: Any) -> None:
    for garbage in (3.0, 1e6, math.nan, math.inf):
        sequence = {
            "mask": [1, 1, 1, 0, 0],
            "values": [0.5, 0.4, 0.2, garbage, garbage],
            "rewards": [0, 0, 0, 0, 1.0],
            "log_probs": [-1, -1, -1, garbage, garbage],
            "old_log_probs": [-1, -1.5, -1, garbage, garbage],
        }
        found = inspect([sequence], advantage=GAE)
        assert found["token_rewards"] == [[0, 0, 1, 0, 0]]
        assert found["advantages"][0] == pytest.approx([0.11632, 0.356, 0.8, 0, 0])
        assert found["returns"][0] == pytest.approx([0.61632, 0.756, 1.0, 0, 0])
        assert found["mask"] == [[1, 1, 1, 0, 0]]
        # The second ratio, e^.5, is above 1.2 with a positive advantage: clipped.
        assert found["loss"] == pytest.approx(-(0.11632 + 1.2 * 0.356 + 0.8) / 3)
        assert found["gradient"][0] == pytest.approx([-0.11632 / 3, 0, -0.8 / 3, 0, 0])
        assert found["value_loss"] is None
        assert found["metrics"]["actor/clip_fraction"] == pytest.approx(1 / 3)


def test_defaults_whiten_over_all_response_tokens(inspect: Any) -> None:
    sequences = [{"mask": [1, 1], "values": [0, 0], "score": 1.0}, {"mask": [0, 1], "values": [9, 0], "score": -3.0}]
    found = inspect(sequences)
    raw = np.array([1, 1, -3])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    assert [*found["advantages"][0], found["advantages"][1][1]] == pytest.approx(expected.tolist())


def test_without_log_probs_loss_and_gradient_are_null(inspect: Any) -> None:
    found = inspect([{"group": "a", "mask": [1], "score": 1.0}], advantage={"name": "grpo"})
    assert found["loss"] is None and found["gradient"] is None and found["advantages"] == [[0]]


def test_an_unnamed_estimator_that_cannot_run_leaves_the_rest(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect([{"mask": [], "score": 10}, {"mask": [1, 1, 0], "score": 1}])
    assert found["token_rewards"] == [[], [0, 1, 0]]
    assert found["advantages"] is None and found["loss"] is None
    assert found["metrics"]["rollout/empty_ratio"] == 0.5


def test_without_any_reward_only_the_mask_is_known(inspect: Any) -> None:
    found = inspect([{"mask": [1, 0], "log_probs": [-1, -2]}])
    assert found["mask"] == [[1, 0]]
    assert all(found[key] is None for key in ("token_rewards", "advantages", "returns", "loss", "gradient"))


def test_new_values_give_the_value_loss(inspect: Any) -> None:
    sequence = {"mask": [1, 0, 1], "score": 1.0, "values": [0, 9, 0], "new_values": [0.5, math.nan, 0.1]}
    found = inspect([sequence], advantage={"whiten": False}, value_loss={"clip": 0.2})
    assert found["returns"] == [[1, 0, 1]]
    assert found["value_loss"] == pytest.approx(0.5 * (0.64 + 0.81) / 2)
    assert found["metrics"]["critic/value_clip_fraction"] == 0.5


def test_groups_are_told_apart_by_id_and_never_by_position(inspect: Any) -> None:
    scores = {"a": [1, 0, 0, 1], "b": [1, 1], "c": [0, 0, 1]}
    rows = [(group, score) for group, listed in scores.items() for score in listed]
    order = np.random.default_rng(0).permutation(len(rows))
    sequences = [{"group": rows[row][0], "mask": [1], "score": rows[row][1]} for row in order]
    found = inspect(sequences, advantage={"name": "grpo"})
    expected = {("a", 1): 0.86602, ("a", 0): -0.86602, ("b", 1): 0, ("c", 0): -0.57735, ("c", 1): 1.1547}
    for row, (advantage,) in zip(order, found["advantages"]):
        assert advantage == pytest.approx(expected[rows[row]], abs=1e-5)
    assert found["metrics"]["rollout/groups"] == 3


def test_text_and_number_are_different_groups(inspect: Any) -> None:
    sequences = [{"group": "1", "mask": [1], "score": 1}, {"group": 1, "mask": [1], "score": 0}]
    assert inspect(sequences, advantage={"name": "rloo"})["advantages"] == [[0], [0]]


def test_score_parts_of_gdpo(inspect: Any) -> None:
    sequences = [
        {"group": 0, "mask": [1], "score": {"correct": 1, "format": 0}},
        {"group": 0, "mask": [1], "score": {"correct": 0, "format": 0}},
    ]
    advantage = {"name": "gdpo", "reward_keys": ["correct", "format"], "weights": [2, 1], "whiten": False}
    found = inspect(sequences, advantage=advantage)
    assert found["token_rewards"] == [[2], [0]]
    assert found["advantages"][0][0] == pytest.approx(2 * 0.5 / (0.5**0.5 + 1e-6))


def test_a_score_object_has_its_total_under_score(inspect: Any) -> None:
    found = inspect([{"mask": [1], "score": {"score": 0.5, "format": 1}}], advantage={"name": "reinforce_plus_plus"})
    assert found["token_rewards"] == [[0.5]]


def test_kl_in_reward_moves_the_adaptive_coefficient(inspect: Any) -> None:
    sequence = {"mask": [1, 0], "score": 1.0, "old_log_probs": [-1, 0], "ref_log_probs": [-1.2, 0]}
    kl = {"in_reward": {"coef": 0.1, "controller": "adaptive", "target": 0.1, "horizon": 10000}}
    found = inspect([sequence] * 256, advantage={"name": "reinforce_plus_plus", "whiten": False}, kl=kl)
    assert found["token_rewards"][0] == pytest.approx([0.98, 0])
    assert found["metrics"]["kl/in_reward/next_coef"] == pytest.approx(0.100512)


def test_rejection_leaves_the_denominator_and_the_mask(inspect: Any) -> None:
    ratios = [1.1, 0.2, 2.3, 1e-5, 1.3]
    sequence = {
        "mask": [1] * 5,
        "score": 1.0,
        "log_probs": [-1] * 5,
        "old_log_probs": [-1] * 5,
        "rollout_log_probs": [-1 - math.log(ratio) for ratio in ratios],
    }
    algorithm = {"advantage": {"name": "reinforce_plus_plus", "whiten": False}}
    found = inspect([sequence], **algorithm, correction={"reject": [{"level": "token", "estimator": "ratio"}]})
    assert found["mask"] == [[1, 0, 0, 0, 1]] and found["advantages"] == [[1] * 5]
    assert found["loss"] == pytest.approx(-1)
    assert found["gradient"] == [[-0.5, 0, 0, 0, -0.5]]
    assert found["metrics"]["correction/kept_fraction"] == pytest.approx(0.4)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_correction_weights_reach_token_and_sequence_losses(inspect: Any, name: str) -> None:
    sequences = [
        {"mask": [1, 1, 1], "score": 1.0, "old_log_probs": old, "log_probs": old, "rollout_log_probs": rollout}
        for old, rollout in (([-1, -2, -0.5], [-1, -4, -0.5]), ([-1, -1, -1], [-1, -1, -1]))
    ]
    found = inspect(
        sequences,
        advantage={"name": "reinforce_plus_plus", "whiten": False},
        policy_loss={"name": name},
        correction={"weight": {"level": "token", "mode": "truncate", "high": 2.0}},
    )
    assert found["gradient"][0] == pytest.approx([-1 / 6, -2 / 6, -1 / 6])
    assert found["metrics"]["correction/capped_fraction"] == pytest.approx(1 / 6)


def test_truncated_samples_leave_the_mask_when_asked(inspect: Any) -> None:
    sequences = [
        {"mask": [1], "score": 1, "finish_reason": "length", "log_probs": [-1]},
        {"mask": [1], "score": 1, "log_probs": [-1]},
    ]
    advantage = {"name": "reinforce_plus_plus", "whiten": False}
    assert inspect(sequences, advantage=advantage, mask_truncated=True)["mask"] == [[0], [1]]
    assert inspect(sequences, advantage=advantage)["mask"] == [[1], [1]]


def test_old_log_probs_follow_the_configured_source(inspect: Any) -> None:
    sequence = {"mask": [1], "score": 1, "log_probs": [-1], "old_log_probs": [-1.1], "rollout_log_probs": [-0.9]}
    advantage = {"name": "reinforce_plus_plus", "whiten": False}
    for source, old in (("auto", -1.1), ("recompute", -1.1), ("rollout", -0.9)):
        found = inspect([sequence], advantage=advantage, old_log_probs=source)
        assert found["loss"] == pytest.approx(-math.exp(-1 - old)), source
    del sequence["old_log_probs"]
    assert inspect([sequence], advantage=advantage)["loss"] == -1, "the current ones stand for them"


def test_numbers_that_are_not_finite_are_reported_and_never_hidden(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text('{"sequences": [{"mask": [1, 1], "score": 1, "values": [0, 0], "log_probs": [NaN, -1]}]}')
    import contextlib
    import io

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        assert inspect_algorithm(str(file)) == 0
    found = json.loads(out.getvalue())
    assert math.isnan(found["loss"]) and math.isnan(found["gradient"][0][0])
    assert "would skip this step" in error.getvalue()


def case_of(name: str) -> dict[str, Any]:
    """A sequence with every field."""
    return {
        "group": name,
        "mask": [1, 0, 1],
        "score": {"score": 0.25 * len(name), "part": 1.0},
        "values": [0.1, 0.2, 0.3],
        "new_values": [0.2, 0.2, 0.2],
        "log_probs": [-1.0, -2.0, -0.5],
        "old_log_probs": [-1.1, -2.0, -0.4],
        "ref_log_probs": [-1.2, -2.0, -0.6],
        "rollout_log_probs": [-1.1, -2.0, -0.45],
        "finish_reason": "stop",
        "greedy_score": 0.5,
        "entropy": [0.5, 0.6, 0.7],
        "sum_pi_squared": [0.3, 0.3, 0.3],
    }


@pytest.mark.parametrize("estimator", sorted(ESTIMATOR_DECLARATIONS))
@pytest.mark.parametrize("loss", sorted(LOSS_DECLARATIONS))
def test_every_estimator_goes_with_every_loss(inspect: Any, estimator: str, loss: str) -> None:
    sequences = [case_of("a"), case_of("a") | {"score": {"score": 1.0, "part": 0.0}}, case_of("bb"), case_of("bb")]
    advantage = {"name": estimator} | ({"reward_keys": ["part"]} if estimator == "gdpo" else {})
    found = inspect(sequences, advantage=advantage, policy_loss={"name": loss}, entropy={"coef": 0.01})
    assert math.isfinite(found["loss"]) and math.isfinite(found["value_loss"])
    flat = [number for row in found["gradient"] for number in row]
    assert all(map(math.isfinite, flat)) and any(flat)
    assert all(row[1] == 0 for row in found["gradient"])


CORRECTED = {
    "mask": [1, 0, 1, 1],
    "old_log_probs": [-1.0, 9.0, -1.0, -2.0],
    "rollout_log_probs": [-1.0, 9.0, -3.0, -2.0],
    "finish_reason": "length",
}
REJECT = {"correction": {"reject": [{"level": "token", "estimator": "k1", "low": -1.0, "high": 1.0}]}}


@pytest.mark.parametrize("rest", [{"score": 1.0}, {}, {"score": 1.0, "values": [0.0] * 4}])
def test_correction_and_its_metrics_are_given_whether_or_not_there_are_advantages(
    inspect: Any, rest: dict[str, Any]
) -> None:
    # gae is the default: it has advantages in the last case only. d = rollout - old = 0, -2, 0.
    found = inspect([CORRECTED | rest], **REJECT)
    assert (found["advantages"] is not None) == ("values" in rest)
    assert found["mask"] == [[1, 0, 0, 1]]
    assert found["metrics"]["correction/kept_fraction"] == pytest.approx(2 / 3)
    assert found["metrics"]["actor/loss_token_ratio"] == pytest.approx(2 / 3)
    assert found["metrics"]["actor/rollout_log_prob_diff/max"] == 2
    assert found["metrics"]["correction/perplexity_ratio"] == pytest.approx(math.exp(-2 / 3))
    assert inspect([CORRECTED | rest], mask_truncated=True)["mask"] == [[0, 0, 0, 0]]


def test_old_log_probs_beside_those_of_the_engine_are_compared_with_them(inspect: Any) -> None:
    sequence = CORRECTED | {"score": 1.0, "log_probs": [-1.5, 9.0, -1.0, -2.0]}
    advantage = {"name": "reinforce_plus_plus", "whiten": False}
    found = inspect([sequence], advantage=advantage, old_log_probs="rollout")
    plain = {name: value for name, value in sequence.items() if name != "old_log_probs"}
    alone = inspect([plain], advantage=advantage, old_log_probs="rollout")
    assert found["loss"] == alone["loss"] and found["gradient"] == alone["gradient"]
    assert found["metrics"]["correction/perplexity_ratio"] == pytest.approx(math.exp(-2 / 3))
    assert alone["metrics"].items() <= found["metrics"].items(), "nothing else changes"


def test_order_changes_no_number(inspect: Any) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        {
            "group": int(group),
            "mask": rng.integers(0, 2, 6).tolist(),
            "score": float(rng.random()),
            **{field: (-rng.random(6)).tolist() for field in ("log_probs", "old_log_probs", "rollout_log_probs")},
        }
        for group in rng.integers(0, 3, 12)
    ]
    order = rng.permutation(12)
    algorithm = {"advantage": {"name": "grpo"}, "policy_loss": {"aggregation": "prompt_mean"}}
    straight = inspect(sequences, **algorithm)
    mixed = inspect([sequences[row] for row in order], **algorithm)
    assert [straight["advantages"][row] for row in order] == mixed["advantages"], "bitwise"
    assert straight["loss"] == pytest.approx(mixed["loss"], abs=1e-12)
    np.testing.assert_allclose(
        [number for row in order for number in straight["gradient"][row]],
        [number for row in mixed["gradient"] for number in row],
        atol=1e-12,
    )
    assert straight["metrics"] == pytest.approx(mixed["metrics"])


OK = {"mask": [1, 1], "score": 1.0}
REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    (
        [{"mask": [1], "rollout_log_probs": [-1]}],
        {"correction": {"reject": [{}]}},
        "sequence 0: old_log_probs is missing, rollout correction needs it",
    ),
    ([OK, {"mask": [1, 2], "score": 1}], {}, "sequence 1: mask must be a list of 0 and 1"),
    ([{"score": 1.0}], {}, "sequence 0: mask must be"),
    ([OK, "text"], {}, "sequence 1: sequence must be an object"),
    ([OK | {"value": [1, 2]}], {}, "sequence 0: value is not a field"),
    ([OK, OK | {"log_probs": [-1]}], {}, "sequence 1: log_probs has 1 entries, mask has 2"),
    ([OK, OK | {"log_probs": [-1, -1]}], {}, "sequence 0: log_probs is missing, other sequences have it"),
    ([OK | {"values": [1, "x"]}], {}, "sequence 0: values must be a list of numbers"),
    ([OK | {"score": "high"}], {}, "sequence 0: score must be a number"),
    ([OK | {"score": True}], {}, "sequence 0: score must be a number"),
    ([OK | {"score": {"a": "x"}}], {}, "sequence 0: score must hold numbers only"),
    ([OK | {"score": {"a": 1}}], {"advantage": {"name": "rloo"}}, "sequence 0: score has no part 'score'"),
    ([OK | {"rewards": [0, 1]}], {}, "sequence 0: rewards cannot be given beside score"),
    ([OK, {"mask": [1]}], {}, "sequence 1: score is missing"),
    ([{"mask": [1, 0], "rewards": [0, math.nan]}], {}, "sequence 0: rewards is nan at token 1, off the mask"),
    ([OK | {"finish_reason": "lenght"}], {}, "sequence 0: finish_reason is 'lenght'"),
    ([OK | {"group": [1]}], {}, "sequence 0: group must be text or an integer"),
    ([OK], {"advantage": {"name": "gae"}}, "sequence 0: values is missing, gae needs it"),
    ([OK], {"advantage": {"name": "grpo"}}, "sequence 0: group is missing, grpo compares"),
    ([OK], {"advantage": {"name": "remax"}}, "sequence 0: greedy_score is missing"),
    ([OK | {"greedy_score": "x"}], {"advantage": {"name": "remax"}}, "sequence 0: greedy_score must be a number"),
    ([OK | {"group": 1}], {"advantage": {"name": "grpo_passk"}}, "sequence 0: group has one sequence only"),
    (
        [OK | {"group": 1}, OK | {"group": 1, "score": -1}],
        {"advantage": {"name": "maxrl"}},
        "sequence 1: score is negative",
    ),
    (
        [OK | {"group": 1, "old_log_probs": [-1, -1]}],
        {"advantage": {"name": "optimal_token_baseline"}},
        "sequence 0: sum_pi_squared is missing",
    ),
    ([OK | {"group": 1}], {"advantage": {"name": "gdpo", "reward_keys": ["a"]}}, "sequence 0: score has no part 'a'"),
    (
        [OK | {"old_log_probs": [-1, -1]}],
        {"kl": {"in_reward": {"coef": 0.1}}},
        "sequence 0: ref_log_probs is missing, KL in reward",
    ),
    (
        [OK | {"log_probs": [-1, -1]}],
        {"kl": {"in_loss": {"coef": 0.1}}},
        "sequence 0: ref_log_probs is missing, KL in loss",
    ),
    ([OK | {"log_probs": [-1, -1]}], {"entropy": {"coef": 0.1}}, "sequence 0: entropy is missing"),
    (
        [OK | {"log_probs": [-1, -1]}],
        {"correction": {"weight": {}}},
        "sequence 0: rollout_log_probs is missing, rollout correction",
    ),
    ([OK | {"log_probs": [-1, -1]}], {"old_log_probs": "rollout"}, "sequence 0: rollout_log_probs is missing"),
    ([OK | {"log_probs": [-1, -1]}], {"old_log_probs": "recompute"}, "sequence 0: old_log_probs is missing"),
    (
        [OK | {"log_probs": [-1, -1]}],
        {"policy_loss": {"aggregation": "prompt_mean"}},
        "sequence 0: group is missing, prompt_mean",
    ),
    ([OK | {"new_values": [1, 1]}], {}, "sequence 0: values is missing, new_values"),
]


@pytest.mark.parametrize(("sequences", "algorithm", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_the_algorithm_cannot_take_is_refused_with_sequence_and_field(
    inspect: Any, sequences: list[Any], algorithm: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaseError) as refused:
        inspect(sequences, **algorithm)
    assert message in str(refused.value) and refused.value.exit_code == 2
    assert capsys.readouterr().out == ""


def test_a_field_may_be_left_out_of_an_empty_sequence(inspect: Any) -> None:
    found = inspect([{"mask": [0, 0]}, {"mask": [1], "score": 1, "values": [0], "log_probs": [-1]}])
    assert found["advantages"] == [[0, 0], [1]] and found["gradient"] == [[0, 0], [-1]]


def test_broken_rules_are_refused_with_their_keys(inspect: Any) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.kl.in_loss.estimator=k1 has zero expected gradient"):
        inspect([OK], kl={"in_loss": {"estimator": "k1", "coef": 0.1}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be an object"),
        ('{"sequences": 3}', "must be an object"),
        ('{"sequences": [], "algorithms": {}}', "unknown key 'algorithms'"),
        ('{"sequences": [], "algorithm": []}', "algorithm must be an object"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_is_not_a_case_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "case.json"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        inspect_algorithm(str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        inspect_algorithm(str(tmp_path / "none.json"))


def test_a_case_without_sequences_is_legal(inspect: Any) -> None:
    found = inspect([])
    assert found["mask"] == [] and found["loss"] is None
