"""Which transport of weights suits which devices, and what an engine can do meanwhile."""

import pytest

from megappo.config.store import load_run_config
from megappo.errors import ConfigError

CUDA = "cluster.device=cuda"


def broken(*overrides: str) -> dict[str, str]:
    """Return the remedies of the broken rules, by key."""
    try:
        load_run_config(["experiment=quickstart", *overrides])
    except ConfigError as error:
        return {found.key: found.remedy for found in error.violations}
    return {}


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        ([CUDA], "cluster.rollout", "use weight_sync.transport=ipc, or placement=split"),
        ([CUDA, "placement=split", "weight_sync.transport=ipc"], "cluster.rollout", "use placement=colocated"),
        ([CUDA, "weight_sync.transport=ipc"], "rollout.num_engines", "use rollout.num_engines=2, or"),
        (["cluster.address=10.0.0.1:6379", "weight_sync.transport=disk"], "weight_sync.folder", "a shared file system"),
        (["weight_sync.pause=retract"], "weight_sync.pause", "use wait"),
        (
            ["controller=one_step_off", "rollout=hf", "weight_sync.pause=in_place"],
            "weight_sync.pause",
            "use wait or abort",
        ),
        (["weight_sync.retries=-1"], "weight_sync.retries", "use 0 or more"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(overrides: list[str], key: str, remedy: str) -> None:
    found = broken(*overrides)
    assert list(found) == [key]
    assert remedy in found[key]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["weight_sync.transport=ipc"],
        ["weight_sync.transport=ipc", "placement=split"],
        ["weight_sync.transport=disk"],
        [CUDA, "placement=split"],
        [CUDA, "weight_sync.transport=ipc", "rollout.num_engines=2"],
        [CUDA, "weight_sync.transport=ipc", "rollout.tensor=2"],
        [CUDA, "weight_sync.transport=disk"],
        ["cluster.address=10.0.0.1:6379", "weight_sync.transport=disk", "weight_sync.folder=/shared/weights"],
        ["weight_sync.pause=wait"],
        ["controller=one_step_off", "weight_sync.pause=in_place"],
        ["controller=one_step_off", "weight_sync.pause=retract"],
        ["controller=one_step_off", "rollout=hf", "weight_sync.pause=abort"],
    ],
)
def test_what_works_is_taken(overrides: list[str]) -> None:
    assert broken(*overrides) == {}
