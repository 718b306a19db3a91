import json
from typing import Any

from megappo.config.data import SourceConfig
from megappo.data.prompts import PromptOptions, PromptSet, load_prompts
from megappo.data.types import Prompt


def source(tmp_path, prompts: list[str]) -> SourceConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": text[::-1]}) + "\n" for text in prompts))
    return SourceConfig(path=str(file))


def load(config: SourceConfig, tokenizer: Any, most: int, **options: Any) -> PromptSet:
    return load_prompts(config, tokenizer, PromptOptions(max_prompt_tokens=most, **options))


def test_prompts_are_rendered_and_tokenised_once(letters, tmp_path):
    loaded = load(source(tmp_path, ["ab", "c"]), letters, 8)
    assert (loaded.rows, loaded.filtered) == (2, {})
    assert loaded.prompts == [
        Prompt(row=0, text="ab>", tokens=[4, 5, 3], answer="ba", source="jsonl"),
        Prompt(row=1, text="c>", tokens=[6, 3], answer="c", source="jsonl"),
    ]


def test_longer_prompts_are_left_out_and_counted(letters, tmp_path):
    # The generation prompt counts: "abc>" has 4 tokens.
    loaded = load(source(tmp_path, ["ab", "abc", "abcd", "d"]), letters, 3)
    assert [prompt.row for prompt in loaded.prompts] == [0, 3]
    assert loaded.filtered == {"too_long": 2}


def test_prompts_know_their_source_and_whose_reward_scores_them(letters, tmp_path):
    options = {"name": "spelling", "origin": "spelling", "reward": "data.train_sources.spelling"}
    (prompt,) = load(source(tmp_path, ["ab"]), letters, 8, **options).prompts
    assert (prompt.source, prompt.origin, prompt.reward) == ("spelling", "spelling", "data.train_sources.spelling")


def test_rows_without_tools_show_those_of_the_run(bos_tokenizer, tmp_path):
    tokenizer = bos_tokenizer("{% for t in tools %}{{ t['name'] }}{% endfor %}|{{ messages[0]['content'] }}")
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "1", "tools": [{"name": "own"}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = [{"name": "run"}]
    prompts = load(SourceConfig(path=str(file)), tokenizer, 20, tools=tools).prompts
    assert [prompt.text for prompt in prompts] == ["run|q", "own|q"]
    assert [prompt.tools for prompt in prompts] == [tools, [{"name": "own"}]]


def test_the_size_of_a_piece_changes_nothing(letters, tmp_path, monkeypatch):
    config = source(tmp_path, [word * repeats for word in "abcd" for repeats in range(1, 6)])
    whole = load(config, letters, 4)
    monkeypatch.setattr("megappo.data.prompts._PIECE", 3)
    assert load(config, letters, 4) == whole
