"""metrics.jsonl, which is complete whatever happens to the run."""

import json
from pathlib import Path

import pytest

from megappo.errors import MegappoError
from megappo.observability.tracker import JsonlTracker, keep_lines, last_line


def test_jsonl_has_one_line_a_step_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"reward/mean": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5}
    tracker.log(2, {"reward/mean": 0.75})
    tracker.close("finished")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_jsonl_names_numbers_that_json_has_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"a": float("nan"), "b": float("-inf")})
    tracker.close("failed")
    assert json.loads(path.read_text()) == {"step": 1, "a": "nan", "b": "-inf"}


def test_jsonl_of_a_resumed_run_is_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(tmp_path / "metrics.jsonl")
        tracker.log(step, {})
        tracker.close("finished")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_resumes_keeps_the_lines_up_to_its_checkpoint_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keep_lines(path, last_step=2) == [] and last_line(path) == -1
    tracker = JsonlTracker(path)
    tracker.log(0, {"val/reward/mean": 0.1})
    tracker.log(1, {"a": 0.1 + 0.2, "b": float("-inf")})
    tracker.log(2, {"a": 1e-300})
    before = path.read_bytes()
    tracker.log(3, {"a": 3.0})
    with path.open("a") as file:
        file.write('{"step": 4, "a": 4.')  # the process was killed
    assert last_line(path) == 3
    assert keep_lines(path, last_step=2) == [
        (0, {"val/reward/mean": 0.1}),
        (1, {"a": 0.1 + 0.2, "b": float("-inf")}),
        (2, {"a": 1e-300}),
    ]
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [b'{"step": 1', b"null", b"[1]", b'{"loss": 1}', b'{"step": 1, "a": {}}', b"\x00\xff"])
def test_a_damaged_line_in_the_middle_is_not_silently_dropped(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"step": 2}\n')
    with pytest.raises(MegappoError, match=r"metrics.jsonl line 1 holds no metrics: .* \(remove it, or the file"):
        keep_lines(path, last_step=2)


def test_a_disk_that_takes_no_metrics_is_a_clear_error(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(MegappoError, match=r"gone/metrics.jsonl cannot be written: No such file .*resume=auto goes on"):
        tracker.log(1, {"a": 1.0})
