"""Which node a process is: what options, torchrun and Slurm say, and what is refused."""

import socket

import pytest

from megappo.launch.errors import LaunchError
from megappo.launch.hosts import check_port, expand_hosts, interface_of, own_address
from megappo.launch.place import PlaceOptions, find_place

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_NODELIST": "gpu[07-08],x1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "2",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3],m", ["n08", "n09", "n10", "n3", "m"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a[1-2]-ib.cluster", ["a1-ib.cluster", "a2-ib.cluster"]),
    ],
)
def test_lists_of_hosts_are_expanded_as_slurm_means_them(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_a_list_of_hosts_that_is_none_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"\[1-x\]"):
        expand_hosts("n[1-x]")


def test_torchrun_says_the_place_and_keeps_the_store() -> None:
    place = find_place(PlaceOptions(), TORCHRUN | SLURM)
    assert (place.rank, place.num_nodes, place.head, place.port) == (1, 4, "a", 29500)
    assert place.store_is_kept and place.source == "torchrun"


def test_slurm_says_the_place_and_the_names_of_all_nodes() -> None:
    place = find_place(PlaceOptions(), SLURM)
    assert (place.rank, place.num_nodes, place.head, place.port) == (2, 3, "gpu07", 20000 + 12345 % 10000)
    assert not place.store_is_kept and place.name_of(2) == "node 2 (x1)"


def test_another_meeting_place_than_the_launchers_is_opened_by_node_0() -> None:
    place = find_place(PlaceOptions(head_address="ib-a", port=4000), TORCHRUN)
    assert (place.head, place.port, place.store_is_kept) == ("ib-a", 4000, False)


def test_options_alone_say_the_place() -> None:
    place = find_place(PlaceOptions(nodes=2, node_rank=1, head_address="a", port=29500), {})
    assert (place.rank, place.num_nodes, place.head, place.port) == (1, 2, "a", 29500)


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (PlaceOptions(), {}, "no nodes given.*--nodes is missing"),
        (PlaceOptions(nodes=2, node_rank=0), {}, "--nodes 2 needs --head-address, --port, too"),
        (PlaceOptions(nodes=2, node_rank=2, head_address="a", port=1), {}, "node 2 of 2 nodes, as --nodes says"),
        (PlaceOptions(nodes=2, node_rank=1, head_address="a", port=70000), {}, "port 70000"),
        (PlaceOptions(), TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "torchrun started 8 processes.*--nproc-per-node 1"),
        (PlaceOptions(nodes=3), TORCHRUN, "disagree with torchrun, which says node 1 of 4"),
        (PlaceOptions(), {"SLURM_JOB_ID": "1"}, "inside a Slurm job, but not started by srun"),
        (PlaceOptions(), SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, "6 tasks on 3 nodes: use --ntasks-per-node=1"),
        (PlaceOptions(), SLURM | {"SLURM_PROCID": ""}, "SLURM_PROCID= of the environment is no number"),
    ],
)
def test_what_cannot_be_is_refused_with_its_remedy(
    options: PlaceOptions, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        find_place(options, environment)


def test_a_taken_port_is_told_of_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} .* is taken: process \d+ of .* has it: .*python"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_head_address_of_another_machine_is_refused_on_node_0() -> None:
    with pytest.raises(LaunchError, match=r"192\.0\.2\.250 is none of"):
        check_port("192.0.2.250", 29500)


def test_the_way_to_the_head_gives_address_and_interface() -> None:
    assert own_address("127.0.0.1", is_head=False) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.250") is None
