"""Named groups beside the default world, and layouts that do not fit."""

import ast
import importlib.util
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megappo.config.parallelism import ParallelismConfig
from megappo.device import backend, process_group
from tests.dist_world import DistWorld, RankError, free_port


def sglang_init_group() -> Any:
    """SGLang's own function, taken out of its file: importing the module needs CUDA libraries."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    source = (Path(package.submodule_search_locations[0]) / "srt" / "utils" / "common.py").read_text()
    (function,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "init_custom_process_group"
    ]
    names: dict[str, Any] = {"torch_release": (2, 13)}
    exec(compile(ast.Module(body=[function], type_ignores=[]), "sglang", "exec"), names)
    return names["init_custom_process_group"]


def exchange(ports: list[int], world_port: int, engine: str) -> list[float]:
    """Processes 0 and 1 are trainers with a world of their own, process 2 is an engine outside of it; 0 sends."""
    rank = int(os.environ["RANK"])
    if rank < 2:
        process_group.init_distributed(
            rank=rank, world_size=2, address="127.0.0.1", port=world_port, backend=backend.CPU, timeout_s=60
        )
    received = []
    for round_number, port in enumerate(ports):  # a group can be left and another one joined
        name = f"weights-{round_number}"
        flat = torch.full((5,), 7.0 + round_number) if rank == 0 else torch.zeros(5)
        if rank == 0 or (rank == 2 and engine == "ours"):
            options = {"name": name, "world_size": 2, "rank": min(rank, 1), "backend": backend.CPU, "timeout_s": 60}
            group = process_group.init_named_group(address="127.0.0.1", port=port, **options)
            assert process_group.named_group(name) is group
            dist.broadcast(flat, src=0, group=group)
            process_group.destroy_named_group(name)
        elif rank == 2:
            group = sglang_init_group()(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=2,
                rank=1,
                group_name=name,
                timeout=timedelta(seconds=60),
            )
            dist.broadcast(flat, src=0, group=group)
            dist.destroy_process_group(group)
        if rank < 2:
            total = torch.tensor([1.0])
            dist.all_reduce(total)  # the default world still works
            assert float(total) == 2
        received.append(float(flat.sum()))
    process_group.destroy()
    return received


def too_late(port: int) -> str:
    try:
        process_group.init_named_group(
            name="alone", address="127.0.0.1", port=port, world_size=2, rank=0, backend=backend.CPU, timeout_s=1
        )
    except Exception as error:
        return type(error).__name__
    return "joined"


def join_twice(port: int) -> None:
    for _ in range(2):
        process_group.init_named_group(
            name="w", address="127.0.0.1", port=port, world_size=1, rank=0, backend=backend.CPU, timeout_s=10
        )


def nothing() -> None: ...


@pytest.mark.parametrize("engine", ["ours", "sglang"])
def test_a_named_group_reaches_an_engine_outside_the_trainers_world(world: DistWorld, engine: str) -> None:
    if engine == "sglang" and sglang_init_group() is None:
        pytest.skip("SGLang is not installed")
    ports = [free_port(), free_port()]
    results = world.run(exchange, world_size=3, ports=ports, world_port=free_port(), engine=engine)
    assert results == [[35, 40], [0, 0], [35, 40]]


def test_a_member_that_never_comes_ends_the_wait(world: DistWorld) -> None:
    assert world.run(too_late, port=free_port()) == ["DistStoreError"]


def test_a_name_is_taken_once(world: DistWorld) -> None:
    with pytest.raises(RankError, match="process group 'w' exists already"):
        world.run(join_twice, port=free_port())


def test_a_world_that_does_not_hold_whole_models_is_refused(world: DistWorld) -> None:
    with pytest.raises(RankError, match=r"3 processes cannot hold models of tensor 2 x pipeline 1 x context 1 = 2"):
        world.run(nothing, world_size=3, parallelism=ParallelismConfig(tensor=2))


def listening_addresses() -> list[str]:
    return [
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_a_world_listens_at_its_own_address_only(world: DistWorld) -> None:
    first, _ = world.run(listening_addresses, parallelism=ParallelismConfig(tensor=2))
    assert first and set(first) == {"127.0.0.1"}
