"""A second implementation of everything that `megappo inspect algorithm` prints, for the tests: plain Python lists,
written from the formulas, sequence by sequence and token by token. It shares nothing with the product but the keys.

A case is what the JSON file holds, with the `algorithm` object complete (`complete`). Lists per sequence run over
response tokens.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.algo.plain_losses import PlainTokens, token_loss

Case = dict[str, Any]
Rows = list[list[float]]

DEFAULTS: Case = {
    "advantage": {
        "name": "gae",
        "gamma": 1.0,
        "lam": 1.0,
        "whiten": True,
        "normalize_by_std": True,
        "alpha": None,
        "reward_keys": [],
        "weights": [],
    },
    "policy_loss": {
        "name": "ppo_clip",
        "clip": {"low": 0.2, "high": 0.2, "dual": None},
        "aggregation": None,
        "constant_length": None,
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "divergence": "total_variation",
        "delta": None,
        "selected_fraction": 0.0002,
        "covariance_low": 1.0,
        "covariance_high": 5.0,
        "selected_kl_coef": 1.0,
    },
    "value_loss": {"clip": 0.5},
    "entropy": {"coef": 0.0},
    "kl": {
        "in_reward": {"estimator": "k1", "coef": 0.0, "controller": "fixed", "target": 0.1, "horizon": 10000},
        "in_loss": {"estimator": "k3", "coef": 0.0},
    },
    "correction": {"weight": None, "reject": []},
    "overlong": None,
    "mask_truncated": False,
    "old_log_probs": "auto",
    "seed": 0,
}
_OWN_MEAN = ("gspo", "sapo", "gmpo")


def complete(given: Case, defaults: Case = DEFAULTS) -> Case:
    """Return the algorithm with every key that is left out."""
    whole = copy.deepcopy(defaults)
    for key, value in given.items():
        whole[key] = complete(value, whole[key]) if isinstance(whole.get(key), dict) else value
    return whole


def mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def exp(x: float) -> float:
    return math.exp(min(20.0, max(-20.0, x)))


def whiten(numbers: list[float]) -> list[float]:
    if len(numbers) < 2:
        return numbers
    center = mean(numbers)
    variance = math.fsum((x - center) ** 2 for x in numbers) / (len(numbers) - 1)
    return [(x - center) / math.sqrt(variance + 1e-8) for x in numbers]


def spread(numbers: Sequence[float]) -> float:
    """Unbiased standard deviation; 0 for one number, and where it is rounding error."""
    if len(numbers) < 2:
        return 0.0
    center = mean(numbers)
    deviation = math.sqrt(math.fsum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))
    return 0.0 if deviation <= 1e-6 * max(map(abs, numbers)) else deviation


def kl_value(d: float, estimator: str) -> float:
    base = estimator.rstrip("+")
    if base == "k3":
        clamped = min(20.0, max(-20.0, d))
        return min(10.0, math.exp(-clamped) - 1 + clamped)
    return {"k1": d, "abs": abs(d), "k2": d * d / 2}[base]


def kl_slope(d: float, estimator: str) -> float:
    """Derivative of a KL estimate by d."""
    if estimator in ("k2", "k1+", "k3+"):
        return d
    if estimator == "abs":
        return math.copysign(1.0, d)
    return 0.0 if kl_value(d, "k3") >= 10 else 1 - math.exp(-d)


class Plain:
    """One case, computed step by step in the order of its methods."""

    def __init__(self, case: Case) -> None:
        self.sequences: list[Case] = case["sequences"]
        self.algorithm = complete(case["algorithm"])
        self.at = [[t for t, m in enumerate(sequence["mask"]) if m] for sequence in self.sequences]
        self.live = [i for i, at in enumerate(self.at) if at]
        source = "rollout_log_probs" if self.algorithm["old_log_probs"] == "rollout" else "old_log_probs"
        given = all(source in self.sequences[i] for i in self.live)
        self.old = self.rows(source if given else "log_probs")
        self.groups: dict[object, list[int]] = {}
        for i in self.live:
            group = self.sequences[i]["group"]
            self.groups.setdefault((type(group), group), []).append(i)
        self.rewards = self.token_rewards()
        self.scores = [math.fsum(row) for row in self.rewards]
        self.advantages, self.returns = self.estimate()
        self.kept, self.weights = self.correct()

    def rows(self, field: str) -> Rows:
        return [[self.sequences[i][field][t] for t in at] if at else [] for i, at in enumerate(self.at)]

    def whole(self, rows: Rows) -> Rows:
        """Rows over response tokens -> rows over all tokens, 0 off the mask."""
        found = [[0.0] * len(sequence["mask"]) for sequence in self.sequences]
        for out, at, row in zip(found, self.at, rows):
            for t, value in zip(at, row):
                out[t] = value
        return found

    def token_rewards(self) -> Rows:
        rewards: Rows = [[0.0] * len(at) for at in self.at]
        in_reward, overlong = self.algorithm["kl"]["in_reward"], self.algorithm["overlong"]
        for i in self.live:
            row = rewards[i]
            for t, reward in enumerate(self.sequences[i].get("rewards", [])):
                row[max(0, sum(at <= t for at in self.at[i]) - 1)] += reward
            row[-1] += self.total_score(i)
            if overlong is not None:
                excess = len(row) - (overlong["max_length"] - overlong["buffer"])
                penalty = -excess / overlong["buffer"] * overlong["factor"]
                row[-1] += min(0.0, max(-overlong["factor"], penalty))
        if in_reward["coef"] > 0:
            for i, old, ref in zip(range(len(self.at)), self.old, self.rows("ref_log_probs")):
                kl = [kl_value(a - b, in_reward["estimator"]) for a, b in zip(old, ref)]
                rewards[i] = [r - in_reward["coef"] * k for r, k in zip(rewards[i], kl)]
        return rewards

    def total_score(self, i: int) -> float:
        score = self.sequences[i].get("score", 0.0)
        if not isinstance(score, dict):
            return score
        advantage = self.algorithm["advantage"]
        weights = advantage["weights"] or [1.0] * len(advantage["reward_keys"])
        weighted = sum(w * score[key] for key, w in zip(advantage["reward_keys"], weights) if key in score)
        return score.get("score", weighted)

    def to_go(self, i: int, gamma: float) -> list[float]:
        found: list[float] = []
        for reward in reversed(self.rewards[i]):
            found.insert(0, reward + gamma * (found[0] if found else 0.0))
        return found

    def estimate(self) -> tuple[Rows, Rows]:
        config = self.algorithm["advantage"]
        name, gamma = config["name"], config["gamma"]
        advantages: Rows = [[] for _ in self.at]
        returns = [self.to_go(i, gamma) for i in range(len(self.at))]
        if name == "gae":
            for i, values in enumerate(self.rows("values")):
                following = 0.0
                for t in reversed(range(len(values))):
                    after = values[t + 1] if t + 1 < len(values) else 0.0
                    following = self.rewards[i][t] + gamma * after - values[t] + gamma * config["lam"] * following
                    advantages[i].insert(0, following)
                returns[i] = [a + v for a, v in zip(advantages[i], values)]
        elif name == "reinforce_plus_plus":
            advantages = [self.to_go(i, gamma) for i in range(len(self.at))]
        elif name == "remax":
            advantages = [
                [g - sequence["greedy_score"] for g in self.to_go(i, 1.0)] for i, sequence in enumerate(self.sequences)
            ]
        elif name == "optimal_token_baseline":
            advantages = self.optimal_token_baseline()
        else:
            per_sequence = self.gdpo() if name == "gdpo" else self.within_groups(name)
            advantages = [[per_sequence.get(i, 0.0)] * len(at) for i, at in enumerate(self.at)]
        if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline") and config["whiten"]:
            white = iter(whiten([a for row in advantages for a in row]))
            advantages = [[next(white) for _ in row] for row in advantages]
        return advantages, returns

    def optimal_token_baseline(self) -> Rows:
        advantages: Rows = [[0.0] * len(at) for at in self.at]
        squares = self.rows("sum_pi_squared")
        gathered: Rows = []
        for old, square in zip(self.old, squares):
            energy = [1 - 2 * math.exp(lp) + s for lp, s in zip(old, square)]
            gathered.append([math.fsum(energy[: t + 1]) for t in range(len(energy))])
        for members in self.groups.values():
            for i in members if len(members) > 1 else []:
                for t, g in enumerate(self.to_go(i, 1.0)):
                    here = [j for j in members if len(self.at[j]) > t]
                    weight = sum(gathered[j][t] for j in here)
                    baseline = sum(self.to_go(j, 1.0)[t] * gathered[j][t] for j in here) / weight
                    advantages[i][t] = g - (baseline if len(here) > 1 else 0.0)
        return advantages

    def gdpo(self) -> dict[int, float]:
        config = self.algorithm["advantage"]
        total = dict.fromkeys(self.live, 0.0)
        for key, weight in zip(config["reward_keys"], config["weights"] or [1.0] * len(config["reward_keys"])):
            for members in self.groups.values():
                values = {i: self.sequences[i]["score"][key] for i in members if key in self.sequences[i]["score"]}
                deviation = spread(list(values.values()))
                for i, value in values.items() if deviation > 0 else []:
                    total[i] += weight * (value - mean(list(values.values()))) / (deviation + 1e-6)
        return dict(zip(total, whiten(list(total.values())))) if config["whiten"] else total

    def within_groups(self, name: str) -> dict[int, float]:
        config, found = self.algorithm["advantage"], dict.fromkeys(self.live, 0.0)
        signal = [i for members in self.groups.values() if len({self.scores[i] for i in members}) > 1 for i in members]
        alpha = config["alpha"] or len(self.live) / max(1, len(signal))
        for members in self.groups.values():
            scores, lengths = [self.scores[i] for i in members], [len(self.at[i]) for i in members]
            center, deviation, ranked = mean(scores), spread(scores), sorted(scores, reverse=True)
            if len(set(scores)) == 1:
                continue
            lead = (ranked[0] - ranked[1]) / (deviation + 1e-6)
            weighted = sum(n * s for n, s in zip(lengths, scores)) / sum(lengths)
            for i, s in zip(members, scores):
                others = (math.fsum(scores) - s) / (len(scores) - 1)
                found[i] = {
                    "grpo": (s - center) / (deviation + 1e-6 if config["normalize_by_std"] else 1.0),
                    "rloo": s - others,
                    "reinforce_plus_plus_baseline": s - center,
                    "opo": s - weighted,
                    "gpg": alpha * (s - center),
                    "grpo_passk": lead if s == ranked[0] else 0.0,
                    "maxrl": (s - center) / (center + 1e-6),
                }[name]
        return found

    def correct(self) -> tuple[list[list[bool]], Rows]:
        config = self.algorithm["correction"]
        kept = [[True] * len(at) for at in self.at]
        weights = [[1.0] * len(at) for at in self.at]
        for i in self.live if config["weight"] or config["reject"] else []:
            d = [self.sequences[i]["rollout_log_probs"][t] - old for t, old in zip(self.at[i], self.old[i])]
            for rejection in config["reject"]:
                measure: Callable[[float], float] = {
                    "ratio": lambda x: exp(-x),
                    "k1": lambda x: x,
                    "k2": lambda x: x * x / 2,
                    "k3": lambda x: exp(-x) - 1 + x,
                }[rejection["estimator"]]
                numbers = [measure(x) for x in d]
                over = {"sequence_sum": sum, "sequence_mean": mean, "sequence_max": max}.get(rejection["level"])
                numbers = [over(numbers)] * len(d) if over else numbers
                kept[i] = [k and rejection["low"] <= x <= rejection["high"] for k, x in zip(kept[i], numbers)]
            if config["weight"]:
                low, high = config["weight"]["low"], config["weight"]["high"]
                raw = [exp(-(sum(d) if config["weight"]["level"] == "sequence" else x)) for x in d]
                truncate = config["weight"]["mode"] == "truncate"
                weights[i] = [min(w, high) if truncate else (w if low <= w <= high else 0.0) for w in raw]
        for i, sequence in enumerate(self.sequences):
            if self.algorithm["mask_truncated"] and sequence["finish_reason"] == "length":
                kept[i] = [False] * len(kept[i])
        return kept, weights

    def loss_weight(self, i: int) -> float:
        """Weight of each loss token of a sequence."""
        config, counts = self.algorithm["policy_loss"], [sum(row) for row in self.kept]
        own = "sequence_mean_token_mean" if config["name"] in _OWN_MEAN else "token_mean"
        mode, sequences = config["aggregation"] or own, sum(count > 0 for count in counts)
        if mode == "token_mean":
            return 1 / sum(counts)
        if mode == "prompt_mean":
            per_prompt = [sum(counts[j] for j in members) for members in self.groups.values()]
            mine = next(sum(counts[j] for j in members) for members in self.groups.values() if i in members)
            return 1 / mine / sum(count > 0 for count in per_prompt)
        constant: float = config["constant_length"] or math.nan
        per = {"sequence_mean_token_mean": counts[i], "sequence_mean_token_sum": 1, "token_sum_constant": constant}
        return 1 / sequences / per[mode]

    def loss(self, log_probs: Rows) -> float:
        """Loss at other log-probs; all that is detached in the product stays at the given ones."""
        given, total = self.rows("log_probs"), 0.0
        entropy, ref = self.rows("entropy"), self.rows("ref_log_probs")
        in_loss = self.algorithm["kl"]["in_loss"]
        selected = self.selected()
        for i in self.live:
            steps = [t for t, k in enumerate(self.kept[i]) if k]
            if not steps:
                continue
            tokens = PlainTokens(
                current=[log_probs[i][t] for t in steps],
                detached=[given[i][t] for t in steps],
                old=[self.old[i][t] for t in steps],
                advantages=[self.advantages[i][t] for t in steps],
                selected=[selected[i][t] for t in steps],
            )
            for t, policy in zip(steps, token_loss(tokens, self.algorithm["policy_loss"])):
                d = given[i][t] - ref[i][t]
                kl = kl_value(d, in_loss["estimator"])
                kl += kl_slope(d, in_loss["estimator"]) * (log_probs[i][t] - given[i][t])
                term = self.weights[i][t] * policy - self.algorithm["entropy"]["coef"] * entropy[i][t]
                total += self.loss_weight(i) * (term + in_loss["coef"] * kl)
        return total

    def selected(self) -> list[list[bool]]:
        """kl_cov: the highest covariances; clip_cov: those in bounds (the cases select all of them)."""
        config, found = self.algorithm["policy_loss"], [[False] * len(at) for at in self.at]
        places = [(i, t) for i in self.live for t, k in enumerate(self.kept[i]) if k]
        if config["name"] not in ("clip_cov", "kl_cov") or not places:
            return found
        old, advantage = mean([self.old[i][t] for i, t in places]), mean([self.advantages[i][t] for i, t in places])
        covariance = {(i, t): (self.old[i][t] - old) * (self.advantages[i][t] - advantage) for i, t in places}
        count = max(1, int(config["selected_fraction"] * len(places)))
        threshold = sorted(covariance.values(), reverse=True)[count - 1]
        for (i, t), c in covariance.items():
            in_bounds = config["covariance_low"] <= c <= config["covariance_high"]
            found[i][t] = c >= threshold if config["name"] == "kl_cov" else in_bounds
        return found

    def gradient(self) -> Rows:
        """Central differences."""
        given, step = self.rows("log_probs"), 1e-6
        found: Rows = [[0.0] * len(at) for at in self.at]
        for i, row in enumerate(given):
            for t, value in enumerate(row):
                ends: list[float] = []
                for moved in (value + step, value - step):
                    row[t] = moved
                    ends.append(self.loss(given))
                row[t] = value
                found[i][t] = (ends[0] - ends[1]) / (2 * step)
        return found

    def value_loss(self) -> float:
        clip, total = self.algorithm["value_loss"]["clip"], 0.0
        count = sum(map(sum, self.kept))
        for kept, new, old, target in zip(self.kept, self.rows("new_values"), self.rows("values"), self.returns):
            for k, v, o, r in zip(kept, new, old, target):
                error = (v - r) ** 2
                if clip is not None:
                    error = max(error, (min(o + clip, max(o - clip, v)) - r) ** 2)
                total += 0.5 * error / count if k else 0.0
        return total
