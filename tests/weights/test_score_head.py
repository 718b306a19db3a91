"""What can be told of a score head without reading a tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megappo.errors import CheckpointError
from megappo.weights.score_head import check_score_head


@pytest.mark.parametrize(
    ("tensors", "needed", "message"),
    [
        ({"score.weight": torch.zeros(1, 4)}, True, None),
        ({"score.weight": torch.zeros(1, 4)}, False, None),
        ({"lm_head.weight": torch.zeros(3, 4)}, False, None),
        ({"lm_head.weight": torch.zeros(3, 4)}, True, "has no score.weight, the head that scores"),
        ({"score.weight": torch.zeros(2, 4)}, True, "has a head score.weight of 2 labels, and a reward model has one"),
        ({"score.weight": torch.zeros(2, 4)}, False, "has a head score.weight of 2 labels"),
        ({}, False, "holds neither model.safetensors nor"),
    ],
)
def test_a_head_has_one_label(
    tensors: dict[str, torch.Tensor], needed: bool, message: str | None, tmp_path: Path
) -> None:
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if message is None:
        check_score_head(tmp_path, needed=needed)
        return
    with pytest.raises(CheckpointError, match=message):
        check_score_head(tmp_path, needed=needed)
