"""Layouts of models with four experts, each with the number of processes that it is tried on."""

import pytest

from megappo.config.parallelism import ParallelismConfig

# More processes than a copy of the model needs: the others are replicas, over which experts may be spread.
EXPERT_LAYOUTS = {
    "expert": (ParallelismConfig(expert=2), 2),
    "expert, with replicas": (ParallelismConfig(expert=2), 4),
    "whole experts on tensor ranks": (ParallelismConfig(tensor=2, sequence=True), 2),
    "tensor and expert": (ParallelismConfig(tensor=2, sequence=True, expert=2), 2),
    "tensor, and expert over replicas": (ParallelismConfig(tensor=2, sequence=True, expert=4), 4),
    "expert tensor over replicas": (ParallelismConfig(expert_tensor=2), 2),
    "tensor and expert tensor": (ParallelismConfig(tensor=2, sequence=True, expert_tensor=2), 2),
    "expert and pipeline": (ParallelismConfig(pipeline=2, expert=2), 4),
    "expert and virtual pipeline": (ParallelismConfig(pipeline=2, virtual_pipeline=2, expert=2), 4),
    "all axes": (ParallelismConfig(tensor=2, sequence=True, expert=2, expert_tensor=2), 4),
}

IN_ANOTHER = ("expert", "whole experts on tensor ranks", "tensor and expert tensor", "expert and pipeline")
"""Whose axes another one has, too, all of them."""
EXPERT_CASES = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in IN_ANOTHER else [])
    for name, case in EXPERT_LAYOUTS.items()
]
