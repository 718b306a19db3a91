"""Collectives leave a trace that outlives a hang: on this process's board, and in NCCL's own flight recorder.

When one rank does not enter a collective, all others wait in it and none can say for whom. So the functions of
torch.distributed that Megatron and this project call are wrapped, and each call is counted by its group before it goes
on (about 2 microseconds). Who has counted less than its peers is the one they wait for
(`megappo.observability.behind`).
"""

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megappo.device.process_group import is_named
from megappo.observability.board import Board

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
_MESSAGES = {"send": "to", "isend": "to", "recv": "from", "irecv": "from"}
"""Point to point: to or from one rank. A batch of them calls these one by one."""
_RECORDED = 2000
"""Collectives that NCCL's flight recorder keeps: two steps of a model of many layers, and a few hundred kilobytes."""

# Any: arguments and results are those of the wrapped functions.
Function = Callable[..., Any]


def count_collectives(board: Board) -> None:
    """Have every collective of this process counted on its board. Before Megatron is imported, which keeps some of the
    functions in names of its own."""
    counter = _Counter(board)
    for name in _COLLECTIVES:
        _replace(name, counter.of_collective)
    for name in _MESSAGES:
        _replace(name, counter.of_message)


def _replace(name: str, wrap: Callable[[Function], Function]) -> None:
    original = getattr(distributed_c10d, name)
    counted = wrap(original)
    # In both modules: P2POp refuses an isend that is not the one it knows (distributed_c10d.py, _check_op).
    setattr(distributed_c10d, name, counted)
    setattr(dist, name, counted)


class _Counter:
    """Wraps functions of torch.distributed."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: dict[Any, tuple[str, tuple[int, ...]]] = {}  # Any: a process group, or None for the default one

    def of_collective(self, function: Function) -> Function:
        """Count calls by their group."""
        position, operation, board = _position(function, "group"), function.__name__, self._board

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs["group"] if "group" in kwargs else args[position] if len(args) > position else None
            name, ranks = self._known.get(group) or self._look_up(group)
            place = board.enter(name, operation, ranks)
            try:
                return function(*args, **kwargs)
            finally:
                board.leave(place)

        return call

    def of_message(self, function: Function) -> Function:
        """Count calls by their group, direction and peer."""
        direction, board = _MESSAGES[function.__name__], self._board
        signature = inspect.signature(function)
        peer_name = "dst" if direction == "to" else "src"

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            group, peer = bound.get("group"), bound.get(peer_name)
            name, ranks = self._known.get(group) or self._look_up(group)
            if peer is None and (peer := bound.get(f"group_{peer_name}")) is not None and ranks:
                peer = ranks[peer]
            place = board.enter(f"{name} {direction} {peer}", function.__name__, () if peer is None else (peer,))
            try:
                return function(*args, **kwargs)
            finally:
                board.leave(place)

        return call

    def _look_up(self, group: Any) -> tuple[str, tuple[int, ...]]:
        """Return the name of a group and its global ranks; none for a group with processes of another world."""
        found = dist.group.WORLD if group is None else group
        if found is None or not isinstance(found, dist.ProcessGroup):
            return "none", ()  # a rank outside of the group; the call returns at once
        name = f"{found.group_desc or 'group'} {found.group_name}"
        known = name, () if is_named(found) else tuple(dist.get_process_group_ranks(found))
        if group is not None:  # the default group may be another one later
            self._known[group] = known
        return known


def _position(function: Function, parameter: str) -> int:
    return list(inspect.signature(function).parameters).index(parameter)


def record_nccl(log_path: Path) -> None:
    """Have NCCL write, beside a log, what its collectives did when one of them exceeds its time. Before the first group
    is made; what the environment says already stays.

    Dumps are read with `torchfrtrace` (torch.distributed.flight_recorder).
    """
    settings = {
        # Collectives kept with their stacks; 0, torch's default in older releases, keeps none. Both names: torch 2.9
        # and older know the second one only.
        "TORCH_FR_BUFFER_SIZE": str(_RECORDED),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_RECORDED),
        # Write them when a collective exceeds its time; the process ends afterwards.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # To this name with the rank behind it.
        "TORCH_FR_DUMP_TEMP_FILE": f"{log_path.with_suffix('')}.nccl-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{log_path.with_suffix('')}.nccl-",
        # End the process when a collective fails or exceeds its time (3: without cleaning up, which may hang, too).
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
