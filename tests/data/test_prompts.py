import json

import pytest

from megappo.config.data import SourceConfig
from megappo.data.prompts import load_prompts
from megappo.data.types import Prompt
from megappo.errors import DataError


def source(tmp_path, prompts: list[str]) -> SourceConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": text[::-1]}) + "\n" for text in prompts))
    return SourceConfig(path=str(file))


def test_prompts_are_rendered_and_tokenised_once(letters, tmp_path):
    loaded = load_prompts(source(tmp_path, ["ab", "c"]), letters, 8)
    assert loaded.filtered == {}
    assert loaded.prompts == [
        Prompt(row=0, text="ab>", tokens=[4, 5, 3], answer="ba", source="jsonl"),
        Prompt(row=1, text="c>", tokens=[6, 3], answer="c", source="jsonl"),
    ]


def test_longer_prompts_are_left_out_and_counted(letters, tmp_path):
    # The generation prompt counts: "abc>" has 4 tokens.
    loaded = load_prompts(source(tmp_path, ["ab", "abc", "abcd", "d"]), letters, 3)
    assert [prompt.row for prompt in loaded.prompts] == [0, 3]
    assert loaded.filtered == {"too_long": 2}


def test_prompts_without_tokens_are_left_out_and_counted(letters, tmp_path):
    letters.chat_template = None
    loaded = load_prompts(source(tmp_path, ["ab", ""]), letters, 3)
    assert [prompt.row for prompt in loaded.prompts] == [0]
    assert loaded.filtered == {"empty": 1}


def test_nothing_left_names_rows_reasons_and_the_limit(letters, tmp_path):
    with pytest.raises(DataError, match=r"0 of 2 rows left \(2 too_long; max_prompt_tokens=1"):
        load_prompts(source(tmp_path, ["ab", "abc"]), letters, 1)
