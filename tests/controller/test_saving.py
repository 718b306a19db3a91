"""Saves beside training, saves that fail, the best checkpoint, exports."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.checkpoint import BestMode
from megappo.config.run import RunConfig
from megappo.controller.ports import PendingSave
from megappo.errors import CheckpointError, WorkerError
from megappo.observability.metrics import mean
from tests.controller.resumed_runs import Started, assert_same, config_of, die, kill_at, one_step_off, resuming, start


def asynchronous(config: RunConfig) -> RunConfig:
    config.checkpoint.asynchronous = True
    return config


def steps_in(run: Started) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))


def pointer_of(run: Started) -> str | None:
    path = run.folder / "checkpoints" / "latest"
    return path.read_text() if path.exists() else None


def actor_of(run: Started) -> Any:
    return run.controller.parts.actor


def after_update(run: Started, number: int, action: Any) -> None:
    """Do something when the actor has made its `number`-th update."""
    actor = actor_of(run)
    update = actor.update

    def updating(*args: Any) -> Any:
        metrics = update(*args)
        if actor.updates == number:
            action()
        return metrics

    actor.update = updating


def test_an_asynchronous_save_holds_the_state_of_its_step_and_is_pointed_to_when_it_is_whole(tmp_path: Path) -> None:
    config = asynchronous(config_of())
    run = start(config, tmp_path / "run")
    seen: list[tuple[str | None, list[str]]] = []

    def look() -> None:
        seen.append((pointer_of(run), steps_in(run)))

    after_update(run, 3, lambda: (look(), actor_of(run).gate.set()))  # training has moved on by a step
    after_update(run, 4, look)
    assert run.finish()
    assert seen == [(None, ["step_000002.writing"]), ("step_000002", ["step_000002"])]
    assert pointer_of(run) == "step_000006"
    plain = start(config_of(), tmp_path / "plain")
    assert plain.finish()
    assert_same(run, plain)
    for step in steps_in(plain):
        table = f"checkpoints/{step}/actor/table.distcp"
        assert torch.equal(torch.load(run.folder / table), torch.load(plain.folder / table)), step


def test_a_run_that_is_killed_beside_its_save_goes_on_from_the_one_before(tmp_path: Path) -> None:
    config = asynchronous(one_step_off(config_of()))
    run = start(config, tmp_path / "run")
    actor_of(run).gate.set()
    after_update(run, 4, actor_of(run).gate.clear)  # the save of step 4 never ends
    die(run, lambda run: kill_at(actor_of(run), "update", 5))
    assert pointer_of(run) == "step_000002"
    resumed = start(resuming(config), tmp_path / "run")
    actor_of(resumed).gate.set()
    assert resumed.finish()
    plain = start(one_step_off(config_of()), tmp_path / "plain")
    assert plain.finish()
    assert_same(resumed, plain)


def test_at_most_one_save_is_under_way(tmp_path: Path) -> None:
    config = asynchronous(config_of())
    config.trainer.save_freq = 1
    run = start(config, tmp_path / "run")
    waiting: list[int] = []

    class Slow:
        """Not done before somebody waits."""

        def __init__(self, save: PendingSave) -> None:
            self._save = save
            waiting.append(1)
            assert sum(waiting) == 1, "a save begins while another one is under way"

        def done(self) -> bool:
            return False

        def wait(self) -> Any:
            waiting.append(-1)
            return self._save.wait()

    actor = actor_of(run)
    save = actor.save
    actor.save = lambda folder, asynchronous: Slow(save(folder))
    assert run.finish()
    assert sum(waiting) == 0 and pointer_of(run) == "step_000006", "the end waits for the last one"


class NoSpace:
    """A save whose disk is full."""

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        raise CheckpointError("actor rank 3: No space left on device")


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_save_that_fails_is_told_of_and_costs_nothing_else(is_asynchronous: bool, last: bool, tmp_path: Path) -> None:
    config = config_of()
    config.checkpoint.asynchronous = is_asynchronous
    run = start(config, tmp_path / "run")
    actor = actor_of(run)
    actor.gate.set()
    save = actor.save
    actor.save = lambda folder, asynchronous: NoSpace() if folder.endswith(failing) else save(folder)
    failing = f"step_00000{6 if last else 4}.writing/actor"
    if last:
        with pytest.raises(CheckpointError, match="rank 3: No space left"):
            run.finish()
    else:
        assert run.finish()
    told = "step 6 was not saved" if last else "step 4 was not saved"
    assert told in run.output.getvalue() and "the run goes on, the newest checkpoint is" in run.output.getvalue()
    assert [line["step"] for line in run.lines()] == list(range(7)), "no step is lost"
    assert steps_in(run) == (["step_000002", "step_000004"] if last else ["step_000002", "step_000006"])


def test_a_disk_that_refuses_the_files_of_the_loop_is_told_of_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megappo.controller import checkpoints

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = start(config_of(), tmp_path / "run")
    monkeypatch.setattr(checkpoints, "write_rollouts", full)
    with pytest.raises(CheckpointError, match="free some space"):
        run.finish()
    assert steps_in(run) == [] and run.output.getvalue().count("there is no checkpoint") == 3
    assert run.controller.step == 6, "the run went on"


def test_a_worker_that_dies_while_it_saves_ends_the_run(tmp_path: Path) -> None:
    run = start(config_of(), tmp_path / "run")

    def die_(*_: Any, **__: Any) -> Any:
        raise WorkerError("actor rank 0 failed: its process died")

    after_update(run, 3, lambda: setattr(actor_of(run), "save", die_))
    with pytest.raises(WorkerError):
        run.finish()
    assert steps_in(run) == ["step_000002"] and pointer_of(run) == "step_000002"


def test_the_engines_failure_does_not_cost_the_save_under_way(tmp_path: Path) -> None:
    run = start(asynchronous(config_of()), tmp_path / "run")
    gate = actor_of(run).gate

    def fail(*_: Any, **__: Any) -> Any:
        gate.set()
        raise WorkerError("hand-over failed")

    after_update(run, 2, lambda: setattr(run.controller.parts.weight_sync, "push", fail))
    with pytest.raises(WorkerError, match="hand-over"):
        run.finish()
    assert pointer_of(run) == "step_000002"


@pytest.mark.parametrize(("mode", "best"), [(BestMode.max, "max"), (BestMode.min, "min")])
def test_the_best_checkpoint_stays_although_its_metric_is_known_later(
    mode: BestMode, best: str, tmp_path: Path
) -> None:
    config = config_of()
    config.trainer.save_freq = config.trainer.test_freq = 1
    config.checkpoint.keep_last, config.checkpoint.keep_best, config.checkpoint.best_mode = 1, "val/reward/mean", mode
    run = start(config, tmp_path / "run")
    numbers = iter([0.5, 0.9, 0.1, 0.9, 0.4, 0.5, 0.5])
    validate = run.controller.validate
    run.controller.validate = lambda: validate() | {"val/reward/mean": mean(next(numbers), 1)}  # type: ignore[method-assign]
    assert run.finish()
    # Of steps 1 to 6: 0.9, 0.1, 0.9, 0.4, 0.5, 0.5; the newer one of equals.
    assert steps_in(run) == [{"max": "step_000003", "min": "step_000002"}[best], "step_000006"]


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_does_not_lose_what_the_best_checkpoint_is(after: bool, tmp_path: Path) -> None:
    config = config_of()
    config.trainer.save_freq = config.trainer.test_freq = 1
    config.checkpoint.keep_last, config.checkpoint.keep_best = 1, "val/reward/mean"

    def begin(config: RunConfig) -> Started:
        run = start(config, tmp_path / "run")
        validate, controller = run.controller.validate, run.controller
        controller.validate = lambda: (  # type: ignore[method-assign]
            validate() | {"val/reward/mean": mean([0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.5][controller.step], 1)}
        )
        return run

    die(begin(config), lambda run: kill_at(run.observer, "on_step", 2, after=after))
    resumed = begin(resuming(config))
    assert resumed.finish()
    assert steps_in(resumed) == ["step_000002", "step_000006"]


def test_exports_are_written_when_due_and_before_the_checkpoint_of_their_step(tmp_path: Path) -> None:
    config = config_of()
    config.trainer.export_hf_freq = 4
    run = start(config, tmp_path / "run")
    die(run, lambda run: kill_at(actor_of(run), "save", 2))
    folder = tmp_path / "run" / "hf"
    assert [path.name for path in folder.iterdir()] == ["step_000004"], "there when step 4 is saved"
    resumed = start(resuming(config), tmp_path / "run")
    assert resumed.finish()
    assert sorted(path.name for path in folder.iterdir()) == ["step_000004", "step_000006"]
    assert torch.equal(torch.load(folder / "step_000006" / "model.pt"), resumed.tables()[0])
    timed = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert ["timing/export_hf_s" in line for line in timed] == [False] * 4 + [True, False, True]


def test_an_export_that_fails_is_told_of_and_decides_the_exit_only_when_it_is_the_last(tmp_path: Path) -> None:
    config = config_of()
    config.trainer.export_hf_freq = 2

    def fail(folder: str) -> None:
        raise CheckpointError("No space left on device")

    for number in (2, 5):
        run = start(config, tmp_path / f"run{number}")
        actor = actor_of(run)
        save_hf = actor.save_hf
        after_update(run, number, lambda actor=actor: setattr(actor, "save_hf", fail))
        if number == 2:
            after_update(run, 3, lambda actor=actor, save_hf=save_hf: setattr(actor, "save_hf", save_hf))
            assert run.finish()
        else:
            with pytest.raises(CheckpointError, match="No space"):
                run.finish()
        assert "was not written: No space left on device; the run goes on" in run.output.getvalue()
        assert run.controller.step == 6
