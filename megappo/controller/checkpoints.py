"""Checkpoints of the loop: written aside, renamed when whole, then pointed to; old ones go last.

`<run>/checkpoints/step_000050/` holds `loop.json`, `actor/` and, with a critic, `critic/`; `latest` names the newest.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from megappo.config.trainer import TrainerConfig
from megappo.controller.state import DrawPosition, LoopState, OpenDraw
from megappo.controller.step import Components
from megappo.errors import CheckpointError
from megappo.observability.run_directory import write_atomically

_LATEST = "latest"
_LOOP_FILE = "loop.json"


def save_checkpoint(parts: Components, state: LoopState, directory: Path, *, keep: int) -> Path:
    """Write the checkpoint of `state.step` and drop all but the newest `keep`.

    Raises:
        CheckpointError: the disk refuses; older checkpoints and the pointer are as they were.
    """
    final = directory / f"step_{state.step:06d}"
    aside = directory / f"{final.name}.writing"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "actor").mkdir(parents=True)
        parts.actor.save(str(aside / "actor"))
        if parts.critic is not None:
            (aside / "critic").mkdir()
            parts.critic.save(str(aside / "critic"))
        loop = {
            "step": state.step,
            "position": asdict(state.position),
            "kl_coefficient": parts.kl_coefficient.state_dict(),
        }
        write_atomically(aside / _LOOP_FILE, json.dumps(loop, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        write_atomically(directory / _LATEST, final.name)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final} was not written: {error} (older checkpoints are intact)") from error
    for old in saved_checkpoints(directory)[: -max(1, keep)]:
        shutil.rmtree(old)
    return final


def saved_checkpoints(directory: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    return sorted(path for path in directory.glob("step_*") if path.is_dir() and not path.name.endswith(".writing"))


def find_checkpoint(trainer: TrainerConfig, directory: Path) -> Path | None:
    """Return the checkpoint that `trainer.resume` asks for, or None to start anew.

    Raises:
        CheckpointError: a path was given that holds no whole checkpoint, or `auto` finds checkpoints but no pointer.
    """
    if trainer.resume == "never":
        return None
    if trainer.resume == "auto":
        pointer = directory / _LATEST
        if not pointer.exists():
            if saved_checkpoints(directory):
                raise CheckpointError(
                    f"{directory} holds checkpoints but no {_LATEST!r} file "
                    "(give the one to use as trainer.resume=PATH, or trainer.resume=never to start anew)"
                )
            return None
        found = directory / pointer.read_text().strip()
    else:
        found = Path(trainer.resume)
    if not (found / _LOOP_FILE).is_file():
        raise CheckpointError(f"trainer.resume={trainer.resume}: {found} is not a checkpoint (no {_LOOP_FILE} in it)")
    return found


def load_checkpoint(parts: Components, folder: Path) -> LoopState:
    """Restore models, optimizers, draws and KL controller; returns the loop's state."""
    loop = json.loads((folder / _LOOP_FILE).read_text())
    parts.actor.load(str(folder / "actor"))
    if parts.critic is not None:
        parts.critic.load(str(folder / "critic"))
    parts.kl_coefficient.load_state_dict(loop["kl_coefficient"])
    open_draws = [OpenDraw(**draw) for draw in loop["position"]["open_draws"]]
    position = DrawPosition(**(loop["position"] | {"open_draws": open_draws}))
    parts.step_sampler.restore(position)
    return LoopState(step=loop["step"], position=position)
