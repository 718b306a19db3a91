"""The data and reward of the quickstart, as configs/ ships them."""

from dataclasses import replace

import pytest

from megappo.config.store import load_run_config
from megappo.data.prompts import PromptOptions, load_prompts
from megappo.data.sources import read_rows
from megappo.data.tokenizer import character_tokenizer
from megappo.rewards import Sample, make_reward


@pytest.fixture(scope="module")
def config():
    return load_run_config(["data=spell_backward", "reward=spell_backward"], rules=())


def test_prompts_are_bare_words_and_no_row_is_in_both_sets(config):
    rows = {name: read_rows(getattr(config.data, name)) for name in ("train", "validation")}
    assert (len(rows["train"]), len(rows["validation"])) == (5500, 256)
    assert not {row.row for row in rows["train"]} & {row.row for row in rows["validation"]}
    for row in rows["train"][:50] + rows["validation"][:50]:
        assert row.answer == row.text[::-1]
    tokenizer = character_tokenizer({character for part in rows.values() for row in part for character in row.text})
    # Three special tokens, '>' and 52 letters: 64 after padding.
    assert len(tokenizer) == 56
    loaded = load_prompts(
        replace(config.data.validation, size=5510),
        tokenizer,
        PromptOptions(max_prompt_tokens=config.data.max_prompt_tokens),
    )
    assert loaded.filtered == {}
    assert all(prompt.text.endswith(">") and len(prompt.tokens) <= 6 for prompt in loaded.prompts)


def test_only_the_ended_reversed_word_scores(config):
    row = read_rows(replace(config.data.train, size=1))[0]
    assert row.answer is not None
    cases = [
        (row.answer, "stop"),
        (row.answer, "length"),
        (row.answer[:-1], "stop"),
        (row.answer + "a", "stop"),
        ("", "stop"),
    ]
    samples = [
        Sample(prompt=row.text, response=text, answer=row.answer, finish_reason=reason, extra=row.extra)
        for text, reason in cases
    ]
    assert [reward.score for reward in make_reward(config.reward).score(samples)] == [1.0, 0.0, 0.0, 0.0, 0.0]
