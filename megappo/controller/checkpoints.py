"""Checkpoints of the PPO loop: what it writes beside its models, and reads when it goes on.

`<run>/checkpoints/step_000050/` holds `loop.json`, `rollouts/` (`controller.rollout_files`), `actor/` and, with a
critic, `critic/`. How and when they are written is `controller.saving`'s.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megappo.checkpoint.reading import read_object, readable
from megappo.checkpoint.store import CheckpointStore
from megappo.controller.ports import ActorClient, CriticClient
from megappo.controller.rollout_files import (
    FinishedStep,
    WaitingRollouts,
    read_rollouts,
    read_step,
    write_rollouts,
)
from megappo.controller.sampling import SamplerState, StepRollouts
from megappo.controller.saving import CheckpointSaver
from megappo.controller.state import DrawPosition, OpenDraw
from megappo.controller.step import Components
from megappo.observability.run_directory import write_atomically

_LOOP_FILE = "loop.json"
_ROLLOUTS = "rollouts"


@dataclass(kw_only=True, slots=True, frozen=True)
class Restored:
    """What a run that is resumed goes on with, beside what its parts have loaded."""

    step: int
    next_step: StepRollouts | None
    """What the next step trains on, if it was sampled before the save."""
    finished: FinishedStep | None
    """The step of the checkpoint; None where it was told of before the save."""


class CheckpointWriter(CheckpointSaver):
    """Saves the state of a PPO run.

    Args:
        side_files, on_saved, on_problem: as of `CheckpointSaver`.
    """

    def __init__(
        self,
        parts: Components,
        store: CheckpointStore,
        *,
        side_files: Mapping[str, str],
        on_saved: Callable[[Path, float], None],
        on_problem: Callable[[str], None],
    ) -> None:
        super().__init__(
            _roles(parts),
            store,
            config=parts.config.checkpoint,
            side_files=side_files,
            on_saved=on_saved,
            on_problem=on_problem,
        )
        self._parts = parts

    def save(self, step: int, *, next_step: StepRollouts | None, finished: FinishedStep | None) -> None:
        """Save the state after `step` as `save_with`.

        Args:
            next_step: what the next step trains on, if it is sampled already.
            finished: what `step` leaves behind; None if the observer has been told of it.
        """
        self.save_with(step, lambda folder: self._write_loop(folder, step, next_step, finished))

    def _write_loop(
        self, folder: Path, step: int, next_step: StepRollouts | None, finished: FinishedStep | None
    ) -> None:
        sampler = self._parts.step_sampler
        state = sampler.state()
        loop = {
            "step": step,
            "weight_version": step,
            "position": asdict(state.position),
            "kl_coefficient": self._parts.kl_coefficient.state_dict(),
        }
        write_atomically(folder / _LOOP_FILE, json.dumps(loop, indent=1))
        waiting = WaitingRollouts(carried=state.carried, unfinished=sampler.unfinished_ids, next_step=next_step)
        write_rollouts(folder / _ROLLOUTS, waiting, finished, read=self._parts.rollout.read)


def load_checkpoint(parts: Components, folder: Path) -> Restored:
    """Restore models, optimizers, draws, KL controller and the tokens that the engines held.

    Raises:
        CheckpointError: a file is damaged, or does not fit the models.
        DataError: it was made with other prompts.
    """
    with readable(folder / _LOOP_FILE):
        loop = read_object(folder / _LOOP_FILE)
        open_draws = [OpenDraw(**draw) for draw in loop["position"]["open_draws"]]
        position = DrawPosition(**(loop["position"] | {"open_draws": open_draws}))
    carried, next_step, held = read_rollouts(folder / _ROLLOUTS)
    parts.step_sampler.restore(SamplerState(position=position, carried=carried))
    for role, client in _roles(parts).items():
        client.load(str(folder / role))
    parts.rollout.adopt(held)
    parts.kl_coefficient.load_state_dict(loop["kl_coefficient"])
    return Restored(step=loop["step"], next_step=next_step, finished=read_step(folder / _ROLLOUTS))


def _roles(parts: Components) -> dict[str, ActorClient | CriticClient]:
    """Return the models that a checkpoint holds, by the names of their folders."""
    roles: dict[str, ActorClient | CriticClient] = {"actor": parts.actor}
    if parts.critic is not None:
        roles["critic"] = parts.critic
    return roles
