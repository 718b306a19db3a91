import json
from pathlib import Path

import pytest

from megappo.cli.inspect_schedule import inspect_schedule
from megappo.errors import ConfigError, DataError


def run(capsys: pytest.CaptureFixture[str], path: Path, lengths: object, **arguments) -> dict:
    file = path / "lengths.json"
    file.write_text(json.dumps(lengths))
    assert inspect_schedule(str(file), **arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_prints_every_index_once_with_tokens_and_cost(capsys, tmp_path):
    lengths = [30, 12, 7, 7, 1, 19, 4]
    printed = run(capsys, tmp_path, lengths, dp=4, max_tokens=32, equal_counts=True)
    ranks = printed["ranks"]
    batches = [batch for rank in ranks for batch in rank["micro_batches"]]
    assert sorted(index for batch in batches for index in batch["indices"]) == list(range(7))
    assert all(batch["tokens"] == sum(lengths[index] for index in batch["indices"]) <= 32 for batch in batches)
    assert all(batch["cost"] == batch["tokens"] for batch in batches)
    costs = [sum(batch["cost"] for batch in rank["micro_batches"]) for rank in ranks]
    assert printed["imbalance"] == pytest.approx(max(costs) / (80 / 4) - 1)
    sizes = [sum(len(batch["indices"]) for batch in rank["micro_batches"]) for rank in ranks]
    assert sorted(sizes) == [1, 2, 2, 2]


def test_five_sequences_of_five_under_a_cap_of_eight(capsys, tmp_path):
    printed = run(capsys, tmp_path, [5] * 5, dp=1, max_tokens=8)
    assert [batch["tokens"] for batch in printed["ranks"][0]["micro_batches"]] == [5] * 5
    assert printed["micro_batches_bound"] == 4


def test_interleaved_groups_pad_with_empty_micro_batches(capsys, tmp_path):
    printed = run(capsys, tmp_path, [5] * 5, dp=1, max_tokens=8, vpp_group=4)
    assert sorted(batch["tokens"] for batch in printed["ranks"][0]["micro_batches"]) == [0, 0, 0, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("lengths", [[], [3], [0, 0, 0], [5000, 1, 1]])
def test_no_length_is_refused(capsys, tmp_path, lengths):
    printed = run(capsys, tmp_path, lengths, dp=4, max_tokens=8)
    counts = {len(rank["micro_batches"]) for rank in printed["ranks"]}
    assert len(printed["ranks"]) == 4
    assert len(counts) == 1


def test_a_model_config_adds_the_cost_of_attention(capsys, tmp_path):
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "intermediate_size": 4,
        "vocab_size": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    printed = run(capsys, tmp_path, [3], dp=1, max_tokens=8, model=str(tmp_path))
    # Per token 4 * 16 + 3 * 16 + 16 = 128; per pair 8; six pairs.
    assert printed["ranks"][0]["micro_batches"][0]["cost"] == pytest.approx(3 + 6 * 8 / 128)


@pytest.mark.parametrize("lengths", [None, {"a": 1}, [1, -2], [1, 2.5], [True], ["3"], [10**21, 2], [2**53, 1]])
def test_what_is_no_length_is_refused(tmp_path, lengths):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(lengths))
    with pytest.raises(DataError, match=r"lengths\.json"):
        inspect_schedule(str(file), dp=1, max_tokens=8)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(DataError, match="absent"):
        inspect_schedule(str(tmp_path / "absent.json"), dp=1, max_tokens=8)
    (tmp_path / "broken.json").write_text("[1,")
    with pytest.raises(DataError, match="not JSON"):
        inspect_schedule(str(tmp_path / "broken.json"), dp=1, max_tokens=8)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="not JSON"):
        inspect_schedule(str(tmp_path / "deep.json"), dp=1, max_tokens=8)


def test_all_numbers_out_of_range_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)--dp=0.*--max-tokens=-1"):
        inspect_schedule("unread.json", dp=0, max_tokens=-1)
