"""TensorBoard: what its own reader finds in the event files."""

import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.config.record import TrackingConfig
from megappo.observability.run_directory import RunDirectory
from megappo.observability.run_files import RunFiles
from megappo.observability.tensorboard_tracker import TensorBoardTracker
from megappo.observability.tracker import WALL_TIME, JsonlTracker, keep_lines
from megappo.observability.tracker_spec import TrackerSpec


def open_tracker(directory: RunDirectory) -> TensorBoardTracker:
    return TensorBoardTracker(TrackerSpec(config=TrackingConfig(), run_name="mine", directory=directory))


def text_of(read: EventAccumulator, tag: str) -> dict[int, str]:
    name = f"{tag}/text_summary" if f"{tag}/text_summary" in read.Tags()["tensors"] else tag
    return {event.step: event.tensor_proto.string_val[0].decode() for event in read.Tensors(name)}


def test_scalars_have_their_step_and_time_and_tables_are_text(directory: RunDirectory) -> None:
    tracker = open_tracker(directory)
    tracker.catch_up(RunFiles(directory))
    tracker.log(7, {"reward/mean": 0.5, "timing/step_s": 2.0, WALL_TIME: 1234567890.5})
    tracker.table("generations/step_000007", [{"response": "a|b\n\\c", "score": None}, {"response": "", "score": 0.5}])
    # Before the end: what a killed run has logged is on disk.
    read = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    tracker.close("finished")
    assert sorted(read.Tags()["scalars"]) == ["reward/mean", "timing/step_s"]
    (point,) = read.Scalars("reward/mean")
    assert (point.step, point.value, point.wall_time) == (7, 0.5, 1234567890.5)
    table = "| response | score |\n|---|---|\n| a\\|b \\\\c |  |\n|  | 0.5 |"
    assert text_of(read, "generations") == {7: table}
    assert "| model.path | a model |" in text_of(read, "config")[0]


def test_steps_after_the_checkpoint_are_purged_as_tensorboard_does_it(directory: RunDirectory) -> None:
    lines, files = JsonlTracker(directory.metrics), RunFiles(directory)
    for step in (1, 2, 3):
        lines.log(step, {"timing/step_s": float(step), "only/once": 1.0})
    tracker = open_tracker(directory)
    tracker.catch_up(files)
    tracker.close("interrupted")
    keep_lines(directory.metrics, last_step=1)
    tracker = open_tracker(directory)
    tracker.catch_up(files)
    tracker.log(2, {"timing/step_s": 20.0})
    tracker.close("finished")
    read = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("timing/step_s")] == [(1, 1.0), (2, 20.0)]
    assert [point.step for point in read.Scalars("only/once")] == [1]
    assert list(text_of(read, "config")) == [0], "it stays, and is not there twice"


def test_a_file_that_a_kill_cut_off_is_read_up_to_there(directory: RunDirectory) -> None:
    for step in (1, 2):
        JsonlTracker(directory.metrics).log(step, {"a": float(step)})
    tracker = open_tracker(directory)
    tracker.catch_up(RunFiles(directory))
    tracker.close("failed")
    (path,) = (directory.path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])  # within the event of step 2
    tracker = open_tracker(directory)
    assert tracker.catch_up(RunFiles(directory)) == 2
    tracker.close("finished")
    read = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    assert [point.step for point in read.Scalars("a")] == [1, 2]


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from megappo.observability import tensorboard_tracker;"
        "from tensorboard.plugins.text.summary_v2 import text_pb;"
        "from tensorboard.summary.writer.record_writer import RecordWriter;"
        "print([name for name in ('torch', 'tensorflow', 'mlflow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
