"""`python -m tests.end_to_end.killed MOMENT CALL ARGUMENT...`: the megappo command, one of whose processes is killed.

The function of that moment is wrapped before the command runs; in its CALL-th call (from 1) SIGKILL meets the driver,
a rank of the actor or the host of an engine. To add a moment: a line in `MOMENTS`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class Moment(NamedTuple):
    """When to kill whom."""

    function: str
    """module:Class.method or module:function."""
    when: str
    """before, after, during (a moment after it began) or `in_generator`: at its first item."""
    victim: str = "driver"


_GENERATE = "megappo.cluster.rollout_pool:RolloutPool.generate"
_LOG_PROBS = "megappo.cluster.groups:ActorGroup.compute_log_probs"
_UPDATE = "megappo.cluster.groups:ActorGroup.update"
_SAVE = "megappo.cluster.groups:TrainingGroup.save"
_PUSH = "megappo.cluster.weight_sync:RayWeightSync.push"
_STORE = "megappo.checkpoint.store:CheckpointStore"

MOMENTS = {
    "generation": Moment(_GENERATE, "in_generator"),
    "generation, engine": Moment(_GENERATE, "during", "ray::RolloutHost"),
    "log-probs": Moment(_LOG_PROBS, "during"),
    "update": Moment(_UPDATE, "during"),
    "update, rank": Moment(_UPDATE, "during", "ray::ActorWorker"),
    "hand-over": Moment(_PUSH, "during"),
    "save: empty folder": Moment(f"{_STORE}.begin", "after"),
    "save: files of the loop": Moment("megappo.controller.checkpoints:write_rollouts", "after"),
    "save: files of the ranks": Moment(_SAVE, "on_file"),
    "save: files of the ranks, rank": Moment(_SAVE, "on_file", "ray::ActorWorker"),
    "save: before the manifest": Moment("megappo.checkpoint.store:_record", "after"),
    "save: before the rename": Moment(f"{_STORE}._move_into_place", "before"),
    "save: before the pointer moves": Moment("megappo.checkpoint.store:replace_file", "before"),
    "save: after the pointer moved": Moment(f"{_STORE}.commit", "after"),
    "save: deletion of old ones": Moment("megappo.checkpoint.store:remove", "before"),
    "save: asynchronous": Moment(_SAVE, "after"),
    "before the line of the step": Moment("megappo.cli.run_observer:RunObserver._log", "before"),
    "after the line of the step": Moment("megappo.cli.run_observer:RunObserver._log", "after"),
}


def kill(victim: str) -> None:
    """Kill this process, or the first of its children with such a name."""
    if victim == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    children = psutil.Process().children(recursive=True)
    named = [child for child in children if victim in " ".join(child.cmdline())]
    named[0].kill()


def kill_when_written(folder: str, victim: str) -> None:
    """Kill as soon as a rank has begun a file."""
    while not any(path.is_file() for path in Path(folder).rglob("*")):
        time.sleep(0.0005)
    kill(victim)


def wrap(original: Callable[..., Any], moment: Moment, call: int) -> Callable[..., Any]:
    """Return the function with its fatal call."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return original(*args, **kwargs)
        if moment.when == "before":
            kill(moment.victim)
        if moment.when == "during":
            threading.Timer(0.05, kill, [moment.victim]).start()
        if moment.when == "on_file":
            threading.Thread(target=partial(kill_when_written, args[1], moment.victim), daemon=True).start()
        result = original(*args, **kwargs)
        if moment.when == "after":
            kill(moment.victim)
        return first_item_kills(result, moment.victim) if moment.when == "in_generator" else result

    return wrapped


def first_item_kills(items: Any, victim: str) -> Any:
    for item in items:
        kill(victim)
        yield item


def main() -> int:
    """Wrap the function of the moment, then be the command."""
    name, call, *arguments = sys.argv[1:]
    moment = MOMENTS[name]
    module, path = moment.function.split(":")
    __import__(module)
    *outer, last = path.split(".")
    owner = sys.modules[module]
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, last, wrap(getattr(owner, last), moment, int(call)))
    from megappo.cli.main import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
