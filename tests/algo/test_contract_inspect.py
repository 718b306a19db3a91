"""Everything that `megappo inspect algorithm` prints equals a second implementation in plain Python (plain_algorithm),
for every policy loss and aggregation with changing estimators, KL forms, corrections and penalties; off the mask there
is anything."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megappo.cli.algorithm_case import read_case
from megappo.cli.inspect_algorithm import run_case
from megappo.config.algorithm import Aggregation
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS, LOSS_DECLARATIONS
from tests.algo.plain_algorithm import Plain

ESTIMATORS = sorted(ESTIMATOR_DECLARATIONS)
GROUPS: list[object] = ["a", "b", 1, "1", -5, "", 10**30]
TOKEN_FIELDS = [
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "entropy",
    "sum_pi_squared",
    "values",
    "new_values",
]


def pairs() -> list[tuple[str, str | None]]:
    """Every loss with every aggregation that it takes; None is its own."""
    return [
        (loss, mode)
        for loss, declared in LOSS_DECLARATIONS.items()
        for mode in (None, *([] if declared.fixed_aggregation else [mode.value for mode in Aggregation]))
    ]


def random_case(random: Random, estimator: str, loss: str, aggregation: str | None) -> dict[str, Any]:
    sequences = [random_sequence(random, estimator) for _ in range(random.randint(2, 6))]
    # Somebody has a response token and, for gdpo, both parts; everybody else may be empty.
    sequences.append(random_sequence(random, estimator, mask=[1, 0, 1]))
    if estimator == "gdpo":
        sequences[-1]["score"] = {"x": 1, "y": 0}
    if random.random() < 0.3:
        for sequence in sequences:
            del sequence["old_log_probs"]
    # grpo_passk refuses a case of groups of one.
    sequences.append(random_sequence(random, estimator) | {"group": sequences[0]["group"]})
    if "old_log_probs" not in sequences[0]:
        del sequences[-1]["old_log_probs"]
    return {"sequences": sequences, "algorithm": random_algorithm(random, estimator, loss, aggregation, sequences)}


def random_sequence(random: Random, estimator: str, mask: list[int] | None = None) -> dict[str, Any]:
    mask = [int(random.random() < 0.7) for _ in range(random.choice([0, 1, 2, 3, 6]))] if mask is None else mask
    base = [-random.expovariate(1) - 0.05 for _ in mask]
    sequence: dict[str, Any] = {
        "group": random.choice(GROUPS[: random.choice([2, 7])]),
        "mask": mask,
        "greedy_score": random.random(),
        "finish_reason": random.choice(["stop", "length", "abort"]),
    }
    for field in TOKEN_FIELDS:
        if field.endswith("log_probs"):
            on = [min(x + random.gauss(0, 0.4), -0.01 - 0.001 * random.random()) for x in base]
        else:
            on = [random.random() if field in ("entropy", "sum_pi_squared") else random.gauss(0, 1) for _ in mask]
        garbage = [random.choice([math.nan, math.inf, -math.inf, 1e6, -3.0]) for _ in mask]
        sequence[field] = [value if m else junk for value, m, junk in zip(on, mask, garbage)]

    def reward() -> float:
        return random.choice([0, 1, 0.5, random.random() if estimator == "maxrl" else random.gauss(0, 2)])

    if estimator == "gdpo":
        sequence["score"] = {key: reward() for key in ("x", "y") if random.random() < 0.8}
    elif random.random() < 0.5:
        sequence["score"] = random.choice([reward(), {"score": reward(), "part": 1.0}])
    else:
        sequence["rewards"] = [reward() if random.random() < 0.6 else 0 for _ in mask]
    return sequence


LOSS_KEYS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip": {"low": 0.1, "high": 0.05, "dual": 1.3}},
    "gspo": {"clip": {"low": 0.1, "high": 0.05}},
    "cispo": {"clip": {"low": 1.0, "high": 0.3}},
    "sapo": {"tau_positive": 0.7},
    "gmpo": {"clip": {"low": 0.1, "high": 0.28}},
    "dppo": {"divergence": "binary_kl", "delta": 0.02},
    "clip_cov": {"selected_fraction": 1.0, "covariance_low": -0.2, "covariance_high": 0.3},
    "kl_cov": {"selected_fraction": 0.3, "selected_kl_coef": 0.7},
}
REJECTIONS: list[dict[str, Any]] = [
    *({"level": level, "estimator": "ratio", "low": 0.4, "high": 2.5} for level in ("token", "sequence_max")),
    *(
        {"level": level, "estimator": estimator, "low": -0.5, "high": 0.8}
        for level in ("token", "sequence_sum", "sequence_mean", "sequence_max")
        for estimator in ("k1", "k2", "k3")
    ),
]


def random_algorithm(
    random: Random, estimator: str, loss: str, aggregation: str | None, sequences: list[dict[str, Any]]
) -> dict[str, Any]:
    advantage: dict[str, Any] = {"name": estimator}
    if estimator in ("gae", "reinforce_plus_plus"):
        advantage["gamma"] = random.choice([0.0, 0.9, 1.0])
    if estimator == "gae":
        advantage["lam"] = random.choice([0.0, 0.8, 1.0])
    if estimator == "gdpo":
        advantage |= {"reward_keys": ["x", "y"], "weights": random.choice([[], [2.0, -0.5]])}
    advantage["whiten"] = random.random() < 0.5 and estimator in ("gae", "reinforce_plus_plus", "gdpo")
    if estimator == "grpo":
        advantage["normalize_by_std"] = random.random() < 0.5
    policy_loss = {"name": loss, "aggregation": aggregation} | random.choice([{}, LOSS_KEYS.get(loss, {})])
    if loss == "clip_cov":
        policy_loss |= LOSS_KEYS[loss]
    if aggregation == "token_sum_constant":
        policy_loss["constant_length"] = 7.5
    algorithm: dict[str, Any] = {
        "advantage": advantage,
        "policy_loss": policy_loss,
        "value_loss": {"clip": random.choice([None, 0.3])},
        "entropy": {"coef": random.choice([0.0, 0.01, -0.1])},
        "kl": {"in_loss": {"estimator": random.choice(["abs", "k2", "k3", "k1+", "k3+"]), "coef": 0.3}},
        "mask_truncated": random.random() < 0.3,
    }
    # gdpo reads reward parts only, maxrl takes no negative scores: both refuse penalties.
    if estimator not in ("gdpo", "maxrl") and random.random() < 0.7:
        kl = random.choice(["k1", "abs", "k2", "k3", "k1+", "k3+"])
        algorithm["kl"]["in_reward"] = {"estimator": kl, "coef": 0.1}
        algorithm["overlong"] = random.choice([None, {"max_length": 6, "buffer": 4, "factor": 0.5}])
    level, mode = random.choice(["token", "sequence"]), random.choice(["truncate", "mask"])
    weight = {"level": level, "mode": mode, "low": 0.7, "high": 1.4}
    rejections = random.sample(REJECTIONS, random.randint(0, 2))
    if random.random() < 0.6:
        algorithm["correction"] = {"weight": random.choice([None, weight]), "reject": rejections}
    else:
        algorithm["old_log_probs"] = random.choice(["auto", "rollout"])
    return algorithm


def assert_close(found: Any, expected: Any, *, tolerance: float, what: str) -> None:
    flat_found, flat_expected = ([x for row in rows for x in row] for rows in (found, expected))
    assert flat_found == pytest.approx(flat_expected, rel=tolerance, abs=tolerance), what


@pytest.mark.parametrize(("loss", "aggregation"), pairs())
def test_inspect_equals_plain_python(loss: str, aggregation: str | None, tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    for number, estimator in enumerate(ESTIMATORS[len(loss + str(aggregation)) % 3 :: 3]):
        case = random_case(Random(f"{loss} {aggregation} {number}"), estimator, loss, aggregation)
        file.write_text(json.dumps(case))
        found, expected = run_case(read_case(file)), Plain(case)
        what = file.read_text()
        kept = [[float(k) for k in row] for row in expected.kept]
        # float64 on both sides: rounding only.
        for key, rows in (
            ("token_rewards", expected.rewards),
            ("advantages", expected.advantages),
            ("returns", expected.returns),
            ("mask", kept),
        ):
            assert_close(found[key], expected.whole(rows), tolerance=1e-9, what=f"{key} of {what}")
        assert found["loss"] == pytest.approx(expected.loss(expected.rows("log_probs")), rel=1e-9, abs=1e-9), what
        assert found["value_loss"] == pytest.approx(expected.value_loss(), rel=1e-9, abs=1e-12), what
        # Central differences of step 1e-6.
        gradient = expected.whole(expected.gradient())
        assert_close(found["gradient"], gradient, tolerance=1e-7, what=f"gradient of {what}")
