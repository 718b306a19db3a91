"""What follows a turn is what the chat template has there, and what was sampled is left alone."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megappo.data.tokenizer import character_tokenizer, encode_all
from megappo.errors import DataError
from megappo.rollout.agents.observations import Observations, require_shown
from megappo.rollout.agents.tools import ToolAnswer
from tests.rollout.agents.templates import AS_JSON, CHATML, FORGETS, SILENT, SPECIAL, STRICT, merging_tokenizer

TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {
    "chatml": merging_tokenizer(CHATML),
    "json": merging_tokenizer(AS_JSON),
    "characters": character_tokenizer("0123456789+-* calc()[]\"'."),
}
OBSERVATIONS = {name: Observations(tokenizer, max_tokens=32) for name, tokenizer in TOKENIZERS.items()}
IM_END = SPECIAL.index("<|im_end|>")


def answers_of(*texts: str) -> list[ToolAnswer]:
    return [ToolAnswer(name="tool", text=text) for text in texts]


def text_of(name: str, turn: list[int], *texts: str) -> str:
    found: Any = TOKENIZERS[name].decode(OBSERVATIONS[name].tokens(turn, answers_of(*texts)))
    return found


def test_a_turn_is_followed_by_what_the_template_writes_there() -> None:
    two = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\nno\n</tool_response><|im_end|>\n"
    assert text_of("chatml", [9, IM_END], "42", "no") == two + "<|im_start|>assistant\n"
    assert text_of("json", [9, IM_END], 'a "b"') == '<|turn|>tool\n\n"a \\"b\\""<|im_end|><|turn|>assistant\n\n'
    assert text_of("characters", [9, 1], "42") == "42>"


def test_a_turn_that_a_stop_string_has_ended_is_closed_by_the_template() -> None:
    assert text_of("chatml", [IM_END, 9], "42").startswith("<|im_end|>\n<|im_start|>user\n")
    assert text_of("characters", [9], "42") == "<eos>42>"
    assert text_of("characters", [], "42") == "<eos>42>"


@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    turn=st.text("12+ac", min_size=1, max_size=8),
    texts=st.lists(st.text("42 .\nan\"'x<>/|\u00e4", max_size=12), min_size=1, max_size=3),
)
def test_prompt_turn_and_observation_are_the_tokens_of_the_whole_conversation(
    name: str, turn: str, texts: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    asked = [{"role": "user", "content": "12+34"}]
    said = [{"role": "assistant", "content": turn}]
    told = [{"role": "tool", "name": "tool", "content": text} for text in texts]
    whole: Any = tokenizer.apply_chat_template([*asked, *said, *told], tokenize=False, add_generation_prompt=True)
    prompt: Any = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    before, after, sampled = encode_all(tokenizer, [prompt, whole, turn])
    end: Any = tokenizer.eos_token_id
    sampled.append(end)
    assert before + sampled + OBSERVATIONS[name].tokens(sampled, answers_of(*texts)) == after


@given(texts=st.lists(st.lists(st.sampled_from([*SPECIAL, "4", "<|im_", "|>", "\n"]), max_size=6), min_size=1))
def test_the_text_of_a_tool_never_becomes_a_special_token(texts: list[list[str]]) -> None:
    answers = answers_of(*("".join(parts) for parts in texts))
    found = Observations(TOKENIZERS["chatml"], max_tokens=1000).tokens([IM_END], answers)
    plain = Observations(TOKENIZERS["chatml"], max_tokens=1000).tokens([IM_END], answers_of(*("4" for _ in texts)))
    special = set(range(len(SPECIAL)))
    assert [token for token in found if token in special] == [token for token in plain if token in special]
    assert text_of("characters", [1], "4<eos>2").count("<eos>") == 0
    decoded: Any = TOKENIZERS["chatml"].decode(found)
    assert all(answer.text in decoded for answer in answers)


@given(text=st.text(max_size=60), limit=st.integers(1, 10))
def test_an_answer_is_cut_to_its_first_tokens(text: str, limit: int) -> None:
    tokenizer = TOKENIZERS["chatml"]
    observations = Observations(tokenizer, max_tokens=limit)
    around = len(observations.tokens([IM_END], answers_of("")))
    length = len(observations.tokens([IM_END], answers_of(text)))
    # Without a token inside, those of both sides may be one.
    assert length <= around + limit + 1
    if len(encode_all(tokenizer, [text])[0]) <= limit:
        assert observations.tokens([IM_END], answers_of(text)) == OBSERVATIONS["chatml"].tokens(
            [IM_END], answers_of(text)
        )


def test_what_is_cut_is_the_end_and_a_long_answer_takes_no_time() -> None:
    observations = Observations(TOKENIZERS["characters"], max_tokens=3)
    assert TOKENIZERS["characters"].decode(observations.tokens([1], answers_of("12345" * 10**6))) == "123>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has none"),
        (FORGETS, "it shows a turn in another way once a tool has answered"),
        (SILENT, "it does not show the text of a tool's answer"),
        (STRICT, "it says: no tools here"),
    ],
)
def test_a_template_without_a_place_for_answers_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=f"needs a chat template that shows the answers of tools: {message}"):
        Observations(merging_tokenizer(template), max_tokens=8)


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    require_shown(TOKENIZERS["chatml"], [schema])
    for tokenizer in (TOKENIZERS["json"], TOKENIZERS["characters"], merging_tokenizer(None)):
        with pytest.raises(DataError, match=r"cannot be shown to the model.*rollout\.tool_loop\.show_tools=false"):
            require_shown(tokenizer, [schema])


def test_answers_of_one_turn_stay_in_their_order() -> None:
    text = text_of("chatml", [IM_END], "one", "two", "three")
    places = [text.index(word) for word in ("one", "two", "three")]
    assert all(first < second for first, second in pairwise(places))
