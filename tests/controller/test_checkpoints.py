"""A run that is killed and resumed is bitwise the run that was not, wherever it is killed and whatever it samples."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megappo.checkpoint.health import whole_before
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig
from megappo.config.batching import BatchingConfig
from megappo.config.rollout import PartialConfig
from megappo.config.trainer import ControllerKind
from megappo.controller.rollout_files import read_rollouts, read_step
from megappo.data.sampler import PromptSampler
from megappo.data.types import Prompt
from megappo.errors import DamagedCheckpointError, DataError
from megappo.observability.metrics import values
from tests.controller.resumed_runs import (
    CONFIGS,
    STEPS,
    Started,
    Whole,
    assert_same,
    config_of,
    die,
    kill_at,
    resuming,
    start,
)
from tests.controller.test_loop import make_config


def rollout_of(run: Started) -> Any:
    return run.controller.parts.rollout


def actor_of(run: Started) -> Any:
    return run.controller.parts.actor


@pytest.mark.parametrize("name", CONFIGS)
def test_a_killed_run_goes_on_bitwise(name: str, whole: Whole, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    folder = tmp_path / "run"
    die(start(config, folder), lambda run: kill_at(actor_of(run), "update", 4))  # after the checkpoint of step 2
    second = start(resuming(config), folder)
    die(second, lambda run: kill_at(actor_of(run), "update", 3))  # of step 5, after the checkpoint of step 4
    third = start(resuming(config), folder)
    assert third.finish()
    assert third.controller._resume_from == folder / "checkpoints" / "step_000004"
    assert_same(third, whole(name))


@pytest.mark.parametrize("name", ["over-sampling", "partial", "one step off", "one step off, partial"])
def test_what_waits_is_in_the_checkpoint_with_its_tokens(name: str, whole: Whole) -> None:
    folder = whole(name).folder / "checkpoints" / "step_000004"
    carried, ahead, held = read_rollouts(folder / "rollouts")
    train = [] if ahead is None else [info.sequence_id for info in ahead.train.sequences]
    assert bool(train) == name.startswith("one step off")
    ids = [*(info.sequence_id for info in carried.sequences), *train]
    assert sorted(held.complete.sequence_ids.tolist()) == sorted(ids)
    assert (held.begun.num_sequences > 0) == name.endswith("partial")
    assert held.complete.num_tokens + held.begun.num_tokens > 0


KILLS: dict[str, Callable[[Started], None]] = {
    "while engines sample": lambda run: kill_at(rollout_of(run), "generate", 7),
    "before tokens are packed": lambda run: kill_at(rollout_of(run), "pack", 6),
    "in the pass before the update": lambda run: kill_at(actor_of(run), "compute_log_probs", 5),
    "before the actor's update": lambda run: kill_at(actor_of(run), "update", 4),
    "before the critic's update": lambda run: kill_at(run.controller.parts.critic, "update", 5),
    "before anything is written": lambda run: kill_at(run.controller._store, "begin", 2),
    "with an empty folder": lambda run: kill_at(run.controller._store, "begin", 2, after=True),
    "with the files of the loop": lambda run: kill_at(actor_of(run), "save", 2),
    "with the actor's files": lambda run: kill_at(run.controller.parts.critic, "save", 2),
    "before the manifest": lambda run: kill_at(run.controller._store, "commit", 2),
    "before the rename": lambda run: kill_at(run.controller._store, "_move_into_place", 2),
    "after the pointer moved": lambda run: kill_at(run.controller._store, "commit", 2, after=True),
    "before old ones are deleted": lambda run: kill_at(run.controller._store, "_delete", 1),
    "after old ones are deleted": lambda run: kill_at(run.controller._store, "prune", 3, after=True),
    "in the hand-over of a saved step": lambda run: kill_at(run.controller.parts.weight_sync, "push", 5),
    "in the validation of a saved step": lambda run: kill_at(run.observer, "on_validation", 3),
    "before the line of a saved step": lambda run: kill_at(run.observer, "on_step", 4),
    "in the line of a saved step": lambda run: kill_at(run.observer, "_log", 5),
    "after the line of a saved step": lambda run: kill_at(run.observer, "on_step", 4, after=True),
    "after the last step": lambda run: kill_at(run.observer, "on_step", 6, after=True),
}


@pytest.mark.parametrize("moment", KILLS)
def test_it_does_not_matter_when_a_run_is_killed(moment: str, whole: Whole, tmp_path: Path) -> None:
    config = CONFIGS["critic and adaptive KL"]()
    die(start(config, tmp_path / "run"), KILLS[moment])
    resumed = start(resuming(config), tmp_path / "run")
    assert resumed.finish()
    assert_same(resumed, whole("critic and adaptive KL"))
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"latest", "step_000004", "step_000006"}


def test_two_runs_of_one_configuration_have_the_same_numbers(whole: Whole, tmp_path: Path) -> None:
    for name in ("critic and adaptive KL", "one step off"):
        again = start(CONFIGS[name](), tmp_path / name)
        assert again.finish()
        assert_same(again, whole(name))


@pytest.mark.parametrize("saved", [3, 4, 5])
def test_epochs_go_on_where_they_were(saved: int, tmp_path: Path) -> None:
    prompts = [
        Prompt(row=row, text=str(row), tokens=[1 + row % 5, 1 + row % 3], answer=None, source="x") for row in range(32)
    ]
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="grpo")), steps=1)
    config.batching = BatchingConfig(prompts_per_step=8, samples_per_prompt=2)
    config.trainer.total_steps, config.trainer.total_epochs, config.trainer.save_freq = None, 2, saved
    first = start(config, tmp_path / "run", prompts=prompts)
    die(first, lambda run: kill_at(rollout_of(run), "generate", saved + 1))
    second = start(resuming(config), tmp_path / "run", prompts=prompts)
    rows: list[list[int]] = []
    sample = second.controller.parts.step_sampler.sample

    def noting(*args: Any) -> Any:
        sampled = sample(*args)
        rows.append(sorted({info.row for info in sampled.train.sequences}))
        return sampled

    second.controller.parts.step_sampler.sample = noting  # type: ignore[method-assign]
    assert second.finish()
    assert [line["step"] for line in second.lines()] == list(range(1, 9))
    drawn = PromptSampler(prompts, batch_size=8, seed=0, shuffle=True)
    expected = [sorted(prompt.row for prompt in drawn.next()) for _ in range(8)]
    assert rows == expected[saved:]
    assert sorted(row for batch in expected[:4] for row in batch) == list(range(32))


def test_a_finished_run_has_nothing_left_to_do_and_goes_on_when_there_is_more(whole: Whole, tmp_path: Path) -> None:
    done = whole("critic and adaptive KL")
    config = CONFIGS["critic and adaptive KL"]()
    shutil.copytree(done.folder, tmp_path / "run")
    again = start(resuming(config), tmp_path / "run")
    calls = len(rollout_of(again).calls)
    assert again.finish() and again.controller.step == STEPS
    assert rollout_of(again).calls[calls:] == ["push"] and again.lines() == done.lines()
    config.trainer.total_steps = STEPS + 2
    longer = start(resuming(config), tmp_path / "run")
    assert longer.finish()
    assert longer.lines()[: STEPS + 1] == done.lines()
    assert [line["step"] for line in longer.lines()] == list(range(STEPS + 3))


def test_the_checkpoint_of_another_run_begins_a_record_of_its_own(whole: Whole, tmp_path: Path) -> None:
    other = whole("dynamic sampling")
    before = (other.folder / "metrics.jsonl").read_bytes()
    config = CONFIGS["dynamic sampling"]()
    checkpoint = other.folder / "checkpoints" / "step_000004"
    run = start(resuming(config, str(checkpoint)), tmp_path / "mine")
    assert run.finish()
    assert run.lines() == other.lines()[5:], "steps 5 and 6 in a folder of its own"
    assert (other.folder / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in (other.folder / "checkpoints").iterdir()) == [
        "latest",
        "step_000004",
        "step_000006",
    ]


@pytest.mark.parametrize("name", ["one step off, over-sampling", "one step off, partial"])
def test_other_ranks_train_on_what_was_sampled_before_the_save(name: str, whole: Whole, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    die(start(config, tmp_path / "run"), KILLS["before the line of a saved step"])
    resumed = start(resuming(config), tmp_path / "run", data=2, critic_data=4)
    assert resumed.finish()
    for mine, theirs in zip(resumed.lines(), whole(name).lines(), strict=True):
        both = [{key: value for key, value in line.items() if key != "schedule/imbalance"} for line in (mine, theirs)]
        assert both[0] == pytest.approx(both[1], rel=1e-5, abs=1e-6), f"step {theirs['step']}"


def test_a_run_goes_on_in_another_order_with_steps_of_another_size(tmp_path: Path) -> None:
    config = CONFIGS["one step off, partial"]()
    die(start(config, tmp_path / "run"), KILLS["before the line of a saved step"])
    config = replace(resuming(config), controller=ControllerKind.synchronous)
    config.rollout.partial = PartialConfig()
    config.batching = BatchingConfig(prompts_per_step=2, samples_per_prompt=3, mini_batch_prompts=1)
    config.trainer.total_steps = 9
    resumed = start(config, tmp_path / "run")
    assert resumed.finish()
    # Step 5 was sampled before the save; the answers that had been begun are the first of the next steps, two a group.
    assert [line["rollout/sequences"] for line in resumed.lines()[5:]] == [8, 4, 4, 5, 6]


def test_checkpoints_may_be_moved_to_another_disk(whole: Whole, tmp_path: Path) -> None:
    done, config = whole("one step off"), CONFIGS["one step off"]()
    die(start(config, tmp_path / "run"), KILLS["before the line of a saved step"])
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "disk")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    run = start(resuming(config, str(tmp_path / "disk" / "step_000004")), tmp_path / "run")
    assert run.finish()
    assert_same(run, done)


def test_a_run_that_ends_before_its_first_step_is_summed_up_with_those_before(whole: Whole, tmp_path: Path) -> None:
    done = whole("critic and adaptive KL")
    shutil.copytree(done.folder, tmp_path / "run")
    expected = done.observer.finish("completed")
    run = start(resuming(CONFIGS["critic and adaptive KL"]()), tmp_path / "run")
    run.observer.expect(STEPS, tmp_path / "run" / "checkpoints" / "step_000006")
    summary = run.observer.finish("interrupted")
    assert summary == expected | {"wall_s": summary["wall_s"], "exit": "interrupted"}
    assert run.observer.saved.startswith(f"metrics of {STEPS} steps")


def test_going_on_from_an_older_checkpoint_replaces_what_came_after_it(whole: Whole, tmp_path: Path) -> None:
    done = whole("one step off")
    shutil.copytree(done.folder, tmp_path / "run")
    (tmp_path / "run" / "rollouts" / "step_000009.jsonl").write_text("of a step that is not made again\n")
    config = CONFIGS["one step off"]()
    older = tmp_path / "run" / "checkpoints" / "step_000004"
    run = start(resuming(config, str(older)), tmp_path / "run")
    assert run.finish()
    assert_same(run, done)
    assert (tmp_path / "run" / "checkpoints" / "step_000006.set_aside").is_dir()


def test_where_the_files_of_a_rank_have_changed_the_checkpoint_before_is_used(whole: Whole, tmp_path: Path) -> None:
    done = whole("critic and adaptive KL")
    shutil.copytree(done.folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_000006"
    table = newest / "critic" / "table.distcp"
    table.write_bytes(b"?" * table.stat().st_size)  # the size is right: only who loads it can tell
    config = resuming(CONFIGS["critic and adaptive KL"]())
    with pytest.raises(DamagedCheckpointError, match=r"table\.distcp"):
        start(config, tmp_path / "run").controller.prepare()
    asked: list[Path] = []

    def earlier(damaged: Path) -> Path | None:
        asked.append(damaged)
        found = whole_before(damaged)
        return None if found is None else found.folder

    run = start(config, tmp_path / "run")
    run.controller.prepare(earlier)
    assert asked == [newest] and run.controller.step == 4
    assert run.controller.fit()
    assert_same(run, done)


def test_other_prompts_are_refused(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole("dynamic sampling").folder, tmp_path / "run")
    prompts = [Prompt(row=row, text="other", tokens=[1], answer=None, source="x") for row in range(12)]
    run = start(resuming(CONFIGS["dynamic sampling"]()), tmp_path / "run", prompts=prompts)
    with pytest.raises(DataError, match="fingerprint"):
        run.controller.prepare()


def test_the_reference_policy_stays_the_original(tmp_path: Path) -> None:
    config = CONFIGS["critic and adaptive KL"]()
    config.trainer.total_steps = 2
    assert start(config, tmp_path / "run").finish()
    config.trainer.total_steps = 3
    resumed = start(resuming(config), tmp_path / "run")
    assert resumed.finish()
    assert resumed.lines()[-1]["kl/in_reward/mean"] > 1e-4


def test_the_engines_get_the_resumed_weights_under_their_version(tmp_path: Path) -> None:
    config = config_of()
    die(start(config, tmp_path / "run"), lambda run: kill_at(rollout_of(run), "generate", 7))
    resumed = start(resuming(config), tmp_path / "run")
    resumed.controller.prepare()
    rollout, actor = rollout_of(resumed), actor_of(resumed)
    assert rollout.version == resumed.controller.step > 0
    assert np.array_equal(rollout.table.numpy(), actor.table.detach().numpy())


def test_the_metrics_of_a_step_come_back_as_they_were(whole: Whole) -> None:
    run = whole("one step off")
    finished = read_step(run.folder / "checkpoints" / "step_000004" / "rollouts")
    assert finished is not None
    line = run.lines()[4]
    numbers = values(finished.metrics)
    shared = numbers.keys() & line.keys()
    assert {"reward/mean", "kl/in_reward/mean", "actor/policy_loss"} <= shared
    assert all(numbers[name] == line[name] for name in shared)
