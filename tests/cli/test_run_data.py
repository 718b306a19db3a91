"""The prompts of a run: which sampler, which sets, and what a person is told at start-up."""

import io
import json
from pathlib import Path

import pytest

from megappo.cli.run_data import make_data, make_validation, settle_data
from megappo.config.data import DataConfig, SharedPrompt, SourceConfig
from megappo.config.model import ModelConfig
from megappo.config.reward import RewardTerms
from megappo.config.run import RunConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import DataError
from megappo.observability.console import RunConsole


def write(path: Path, prompts: list[str]) -> SourceConfig:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return SourceConfig(path=str(path))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    character_tokenizer("abcd").save_pretrained(tmp_path / "model")
    config = RunConfig(model=ModelConfig(path=str(tmp_path / "model")), data=DataConfig(max_prompt_tokens=4))
    config.data.train = write(tmp_path / "train.jsonl", ["a", "b", "b", "abcd", "c"])
    config.batching.prompts_per_step = 2
    return config


def told(config: RunConfig) -> list[str]:
    """Return what is printed while the prompts are read, without the times."""
    file = io.StringIO()
    make_data(config, RunConsole(file=file, terminal=False))
    return [line.partition("] ")[2] for line in file.getvalue().splitlines()]


def test_the_start_tells_of_the_first_prompt_and_of_what_is_left_out(config: RunConfig, tmp_path: Path) -> None:
    config.data.validation = write(tmp_path / "validation.jsonl", ["b", "d"])
    assert told(config) == [
        "data.train: 1 of 5 rows left out: too_long",
        "data.train: 1 prompts are those of earlier rows, too (on_duplicate=filter leaves them out)",
        "first prompt of data.train (row 0, 2 tokens): 'a>' = [4, 3]",
        "data.validation: 1 of 2 prompts are training prompts, too: data.on_shared=filter leaves them out",
    ]


def test_prompts_of_the_training_are_left_out_of_validation_where_that_is_asked_for(
    config: RunConfig, tmp_path: Path
) -> None:
    config.data.validation_sets = {
        "both": write(tmp_path / "both.jsonl", ["b", "d", "b", "ad"]),
        "new": write(tmp_path / "new.jsonl", ["dd"]),
    }
    config.data.on_shared = SharedPrompt.filter
    file = io.StringIO()
    data = make_data(config, RunConsole(file=file, terminal=False))
    texts = {name: [prompt.text for prompt in prompts] for name, prompts in data.validation.items()}
    assert texts == {"both": ["d>", "ad>"], "new": ["dd>"]}
    assert "data.validation_sets.both: 2 of 4 prompts are training prompts, too: left out" in file.getvalue()
    alone = make_validation(config, RunConsole(file=io.StringIO(), terminal=False))
    assert alone == data.validation, "an evaluation without training judges the same prompts"


@pytest.mark.parametrize(("what", "rows"), [(SharedPrompt.refuse, ["b", "d"]), (SharedPrompt.filter, ["b", "a"])])
def test_shared_prompts_are_refused_where_that_is_asked_for_or_nothing_stays(
    what: SharedPrompt, rows: list[str], config: RunConfig, tmp_path: Path
) -> None:
    config.data.validation, config.data.on_shared = write(tmp_path / "validation.jsonl", rows), what
    with pytest.raises(
        DataError, match=rf"data.validation: \d of 2 prompts.*data.on_shared={what.value}.*on_shared=keep"
    ):
        told(config)


def test_several_sources_are_mixed_and_several_sets_are_kept_apart(config: RunConfig, tmp_path: Path) -> None:
    own = RewardTerms(name="math_verify")
    config.data.train_sources = {
        "one": SourceConfig(path=config.data.train.path),
        "two": SourceConfig(path=write(tmp_path / "two.jsonl", ["cd"]).path, reward=own),
    }
    config.data.validation_sets = {"easy": write(tmp_path / "easy.jsonl", ["d"])}
    data = make_data(config, RunConsole(file=io.StringIO(), terminal=False))
    batch = sorted((prompt.origin, prompt.source, prompt.reward) for prompt in data.sampler.next())
    assert batch == [("one", "one", ""), ("two", "two", "data.train_sources.two")]
    assert {name: [prompt.source for prompt in prompts] for name, prompts in data.validation.items()} == {
        "easy": ["easy"]
    }


def test_an_evaluation_reads_no_training_prompts(config: RunConfig, tmp_path: Path) -> None:
    config.data.train.path = str(tmp_path / "lost.jsonl")
    config.data.validation = write(tmp_path / "validation.jsonl", ["b", "d"])
    sets = make_validation(config, RunConsole(file=io.StringIO(), terminal=False))
    assert [prompt.text for prompt in sets[""]] == ["b>", "d>"]


def test_a_chat_template_is_read_once_since_workers_have_another_folder(config: RunConfig, tmp_path: Path) -> None:
    config.data.chat_template = str(tmp_path / "own.jinja")
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}d")
    settled = settle_data(config)
    assert settled.data.chat_template == "{{ messages[0]['content'] }}d"
    assert "first prompt of data.train (row 0, 2 tokens): 'ad' = [4, 7]" in told(settled)
    config.data.chat_template = str(tmp_path / "lost.jinja")
    with pytest.raises(DataError, match=r"chat_template=.*lost\.jinja cannot be read"):
        settle_data(config)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{% for", "is no template, line 1"), ("chatml", "writes no message")],
)
def test_what_is_no_chat_template_is_named(config: RunConfig, template: str, message: str) -> None:
    config.data.chat_template = template
    with pytest.raises(DataError, match=message):
        told(config)


def test_an_empty_chat_template_is_none(config: RunConfig) -> None:
    config.data.chat_template = ""
    assert "first prompt of data.train (row 0, 1 tokens): 'a' = [4]" in told(config)
