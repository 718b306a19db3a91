"""A checkpoint of any layout loads under any other.

A chain of trainers of different layouts pass one checkpoint on: each loads what the one before has saved, saves it
again, and takes an update. Every update agrees with that of the trainer that never stopped, and the last checkpoint
holds bitwise what the first one held.
"""

from pathlib import Path

import pytest
import torch

from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.batches import VOCAB
from tests.train.checkpoint_jobs import Updated, differing, pass_on, start_chain
from tests.train.conftest import save_policy

ONE = ParallelismConfig()
PLAIN = OptimConfig(lr=1e-2, weight_decay=0.1)
DISTRIBUTED = OptimConfig(lr=1e-2, weight_decay=0.1, distributed=True)
# Layout, number of processes, optimizer.
CHAINS = {
    "actor": [
        (ParallelismConfig(tensor=2, pipeline=2), 4, PLAIN),
        (ONE, 1, PLAIN),
        (ONE, 2, DISTRIBUTED),
        (ParallelismConfig(tensor=2, sequence=True), 2, PLAIN),
        (ParallelismConfig(pipeline=2, virtual_pipeline=2), 2, PLAIN),
        (ParallelismConfig(pipeline=2, first_stage_layers=3), 2, PLAIN),
        (ParallelismConfig(context=2), 2, DISTRIBUTED),
        (ONE, 2, PLAIN),
    ],
    "tied": [
        (ParallelismConfig(pipeline=2), 2, PLAIN),
        (ParallelismConfig(tensor=2), 4, DISTRIBUTED),
        (ParallelismConfig(tensor=2, pipeline=2, virtual_pipeline=2), 4, PLAIN),
        (ONE, 1, PLAIN),
    ],
    "critic": [
        (ParallelismConfig(tensor=2, pipeline=2), 4, PLAIN),
        (ONE, 2, DISTRIBUTED),
        (ParallelismConfig(pipeline=2, virtual_pipeline=2), 2, PLAIN),
    ],
    "experts": [
        (ParallelismConfig(expert=2), 2, PLAIN),
        (ONE, 1, PLAIN),
        (ParallelismConfig(tensor=2, sequence=True, expert_tensor=2), 4, DISTRIBUTED),
        (ParallelismConfig(expert=2, pipeline=2), 4, DISTRIBUTED),
    ],
}
TOLERANCE = 1e-5
"""Of fp32 sums in another order; without the moments of Adam an update would be off by more than 1e-2."""


@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_goes_from_layout_to_layout(
    world: DistWorld, request: pytest.FixtureRequest, tmp_path: Path, chain: str
) -> None:
    if chain in ("critic", "experts"):
        folder = request.getfixturevalue({"critic": "critic_folder", "experts": "expert_policy_folder"}[chain])
    else:
        # Padded to another size by two tensor-parallel ranks than by one.
        folder = save_policy(tmp_path / "policy", tied=chain == "tied", vocab=VOCAB + 1)
    role = "critic" if chain == "critic" else "actor"
    (layout, size, optim), *others = CHAINS[chain]
    first = _merged(
        world.run(
            start_chain,
            world_size=size,
            parallelism=layout,
            layout=layout,
            optim=optim,
            checkpoint=str(tmp_path / "0"),
            role=role,
            folder=str(folder),
        )
    )
    for number, (layout, size, optim) in enumerate(others):
        update = _merged(
            world.run(
                pass_on,
                world_size=size,
                parallelism=layout,
                layout=layout,
                optim=optim,
                checkpoint=str(tmp_path / str(number)),
                copy=str(tmp_path / str(number + 1)),
                role=role,
                folder=str(folder),
            )
        )
        assert update.steps == first.steps == 3
        assert update.metrics[f"{role}/grad_norm"] == pytest.approx(
            first.metrics[f"{role}/grad_norm"], rel=TOLERANCE
        ), layout
        assert update.weights.keys() == first.weights.keys()
        for name, weight in first.weights.items():
            error = torch.linalg.vector_norm(update.weights[name] - weight) / torch.linalg.vector_norm(weight)
            assert error <= TOLERANCE, (layout, name)
    last = str(tmp_path / str(len(others)))
    (changed,) = world.run(differing, parallelism=ONE, one=str(tmp_path / "0"), other=last)
    assert changed == []


def _merged(ranks: list[Updated]) -> Updated:
    """What the ranks have together; each of an output rank's metrics counts whole."""
    weights = {name: weight for rank in ranks for name, weight in rank.weights.items()}
    metrics = next(rank.metrics for rank in ranks if rank.metrics)
    return Updated(metrics=metrics, weights=weights, steps=ranks[0].steps)
