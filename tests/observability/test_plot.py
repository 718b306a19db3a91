"""The reward curve."""

from pathlib import Path

import pytest

from megappo.observability.plot import Curve, plot_reward_curve, running_mean


def test_the_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("steps", [1, 30])
def test_a_png_is_written_for_any_length(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "reward_curve.png"
    training = Curve(steps=list(range(1, steps + 1)), values=[0.5] * steps)
    plot_reward_curve(path, title="run", training=training, validation={"validation": Curve(steps=[], values=[])})
    sets = {name: Curve(steps=[0, steps], values=[0.1, 0.9]) for name in ("easy", "hard")}
    plot_reward_curve(path, title="run", training=training, validation=sets)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [left.name for left in tmp_path.iterdir()] == ["reward_curve.png"]
