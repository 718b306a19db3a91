"""Random states of this rank: torch's, the device's and Megatron's named streams."""

from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_state() -> dict[str, Any]:  # Any: tensors and dicts of them
    """Return all random states of this rank."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "streams": dict(_streams().get_states())}


def restore_random_state(state: dict[str, Any]) -> None:  # Any: as in random_state
    """Go on as the rank did that returned `state`."""
    torch.set_rng_state(state["torch"])
    for cuda in state["cuda"]:
        torch.cuda.set_rng_state(cuda)
    _streams().set_states(state["streams"])


def _streams() -> Any:  # Any: Megatron types it as possibly absent
    """Return Megatron's named random streams (on CPU too, whatever the name of the function)."""
    return get_cuda_rng_tracker()
