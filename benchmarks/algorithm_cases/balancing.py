"""Balancing and micro-batch plans (`megappo.balance`) against verl's.

Costs are those that the peer works with, 24,576 t + t^2 for t tokens, so both sides balance the same numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)

from benchmarks.algorithm_cases.workloads import draw_lengths, draw_prompt_lengths, draw_responses
from benchmarks.harness import Case, Contender, Goal, Ratio
from megappo.balance.micro_batches import micro_batch_bound, plan_micro_batches
from megappo.balance.partition import imbalance, partition
from megappo.balance.workload import Workload

PROMPT_TOKENS = 512
"""Added to every response length."""
COST = Workload(pair=2 / 24576)
"""The peer's cost up to a factor (and up to the linear term of t (t + 1))."""


def make_balance(quick: bool) -> Case:
    """Equal counts, 256 sequences per rank."""
    count, ranks = (2048, 8) if quick else (32768, 128)
    lengths = draw_lengths(count) + PROMPT_TOKENS
    as_tensor = calculate_workload(torch.from_numpy(lengths))
    costs, as_list = as_tensor.numpy(), as_tensor.tolist()
    return Case(
        key="balance",
        question=f"balance {count:,} lognormal lengths over {ranks} ranks, equal counts",
        sizes={"sequences": count, "ranks": ranks, "seed": 0},
        contenders=[
            # Its trainer hands over the tensor that calculate_workload returns.
            Contender(name="verl as called", run=lambda: get_seqlen_balanced_partitions(as_tensor, ranks, True)),
            Contender(name="verl, list", run=lambda: get_seqlen_balanced_partitions(as_list, ranks, True)),
            Contender(name="megappo", run=lambda: partition(costs, ranks, equal_counts=True)),
            Contender(name="argsort", run=lambda: np.argsort(costs), repeats=5),
        ],
        ratios=[
            Ratio(name="speedup as called", numerator="verl as called", denominator="megappo"),
            Ratio(name="speedup over list", numerator="verl, list", denominator="megappo"),
            Ratio(name="times one argsort", numerator="megappo", denominator="argsort"),
        ],
        goals=[
            Goal(figure="speedup as called", at_least=200),
            Goal(figure="speedup over list", at_least=10),
            Goal(figure="imbalance", at_most=1e-4),
        ],
        quantities=lambda results: {
            "imbalance": _imbalance(costs, results["megappo"]),
            "imbalance of verl": _imbalance(costs, results["verl, list"]),
        },
    )


def make_imbalance(quick: bool) -> Case:
    """Few sequences per rank, where the shapes of the sequences limit what can be had."""
    count, ranks = (512, 64) if quick else (8192, 1024)
    costs = calculate_workload(torch.from_numpy(draw_lengths(count) + PROMPT_TOKENS)).numpy()
    as_list = costs.tolist()
    return Case(
        key="imbalance",
        question=f"imbalance with {count // ranks} sequences per rank",
        sizes={"sequences": count, "ranks": ranks, "seed": 0},
        contenders=[
            Contender(name="verl, list", run=lambda: get_seqlen_balanced_partitions(as_list, ranks, True)),
            Contender(name="equal counts", run=lambda: partition(costs, ranks, equal_counts=True)),
            Contender(name="free counts", run=lambda: partition(costs, ranks, equal_counts=False)),
        ],
        ratios=[Ratio(name="speedup", numerator="verl, list", denominator="equal counts")],
        goals=[
            Goal(figure="imbalance, equal counts", at_most=0.06),
            Goal(figure="imbalance, free counts", at_most=0.01),
        ],
        quantities=lambda results: {
            "imbalance, equal counts": _imbalance(costs, results["equal counts"]),
            "imbalance, free counts": _imbalance(costs, results["free counts"]),
            "imbalance of verl": _imbalance(costs, results["verl, list"]),
        },
    )


def make_micro_batches(quick: bool) -> Case:
    """Micro-batches of one rank under a hard cap of tokens."""
    count, padded_to, longest_prompt, cap = (128, 1024, 128, 2048) if quick else (1024, 8192, 1024, 16384)
    responses, prompts = draw_responses(count, padded_to), draw_prompt_lengths(count, longest_prompt)
    lengths = prompts + responses.lengths
    prompt_mask = torch.arange(longest_prompt)[None] >= longest_prompt - torch.from_numpy(prompts)[:, None]
    attention_mask = torch.cat([prompt_mask, responses.mask], dim=1).long()
    padded = TensorDict(
        {"input_ids": torch.zeros_like(attention_mask), "attention_mask": attention_mask}, batch_size=count
    )
    costs, ranks = COST.costs(lengths), [range(count)]
    bound = micro_batch_bound(lengths, cap)

    def quantities(results: Mapping[str, object]) -> dict[str, float]:
        ours = cast("list[list[list[int]]]", results["megappo"])[0]
        theirs = cast("tuple[Any, list[list[int]]]", results["verl"])[1]
        return {
            "micro-batches / bound": len(ours) / bound,
            "micro-batches of verl / bound": len(theirs) / bound,
            "largest / cap": max(int(lengths[part].sum()) for part in ours) / cap,
            "cost imbalance": _imbalance(costs, ours),
            "cost imbalance of verl": _imbalance(costs, theirs),
            "cost imbalance, ours less verl's": _imbalance(costs, ours) - _imbalance(costs, theirs),
        }

    return Case(
        key="micro_batches",
        question=f"micro-batches of {count:,} sequences under {cap:,} tokens each",
        sizes={"sequences": count, "tokens": int(lengths.sum()), "cap": cap, "bound": bound, "seed": 0},
        contenders=[
            # It cuts the batch, too, whose one large field here is the mask that it needs.
            Contender(name="verl", run=lambda: rearrange_micro_batches(padded, cap)),
            Contender(name="megappo", run=lambda: plan_micro_batches(ranks, lengths, max_tokens=cap, cost=COST)),
        ],
        ratios=[Ratio(name="speedup", numerator="verl", denominator="megappo")],
        goals=[
            Goal(figure="speedup", at_least=50),
            Goal(figure="micro-batches / bound", at_most=1.01),
            Goal(figure="largest / cap", at_most=1),
            Goal(figure="cost imbalance, ours less verl's", at_most=0),
        ],
        quantities=quantities,
    )


def _imbalance(costs: np.ndarray, parts: object) -> float:
    """max / mean - 1 of the parts' costs."""
    return imbalance([float(costs[part].sum()) for part in cast("Sequence[list[int]]", parts)])
