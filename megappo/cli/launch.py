"""Options of `megappo launch`; what it does is in `megappo.launch`, which takes seconds to import."""

import argparse
import sys
from pathlib import Path
from typing import Any

from megappo.errors import MegappoError

_EPILOG = (
    "Started once on every node, by torchrun (--nproc-per-node 1), by srun (--ntasks-per-node=1), or by hand with the "
    "first four options. docs/launch.md tells more; scripts are in launch/."
)


# Any: argparse has no public type for what add_subparsers returns.
def add_launch(commands: Any) -> None:
    """Add the command `launch`."""
    text = "run a training command on several nodes: check that they agree, start Ray, end together"
    parser = commands.add_parser("launch", help=text, description=f"{text}.", epilog=_EPILOG)
    parser.add_argument("--nodes", type=int, metavar="N", help="how many (default: what torchrun or Slurm says)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--head-address", metavar="HOST", help="node 0, by name or address")
    parser.add_argument("--port", type=int, metavar="P", help="where node 0 listens for the others")
    cpus = "CPUs of this node that Ray may hand out (default: those that this process may use)"
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help=cpus)
    parser.add_argument("--join-s", type=float, default=300.0, help="longest wait for all nodes (default: 300)")
    parser.add_argument("--ray-s", type=float, default=180.0, help="longest wait for Ray on all nodes (default: 180)")
    code = "write the exit code there and exit with 0: torchrun makes 1 of every other one"
    parser.add_argument("--exit-code-file", type=Path, metavar="FILE", help=code)
    parser.add_argument("--dry-run", action="store_true", help="print what would be done on this node")
    parser.add_argument("words", nargs="*", metavar="-- train experiment=...", help="the command and its overrides")
    parser.set_defaults(command=_launch)


def _launch(parsed: argparse.Namespace) -> int:
    try:
        code = _run(parsed)
    except MegappoError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    if parsed.exit_code_file is None:
        return code
    parsed.exit_code_file.write_text(f"{code}\n")
    return 0


def _run(parsed: argparse.Namespace) -> int:
    from megappo.launch.launcher import describe_launch, launch
    from megappo.launch.order import LaunchOrder, Limits
    from megappo.launch.place import PlaceOptions, find_place

    limits = Limits(join_s=parsed.join_s, ray_s=parsed.ray_s)
    order = LaunchOrder.of(parsed.words, limits=limits, cpus_per_node=parsed.cpus_per_node)
    place = find_place(
        PlaceOptions(nodes=parsed.nodes, node_rank=parsed.node_rank, head_address=parsed.head_address, port=parsed.port)
    )
    if not parsed.dry_run:
        return launch(order, place)
    print("\n".join(describe_launch(order, place)))
    return 0
