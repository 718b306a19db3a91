"""The rules listed in megappo/data/chat.py."""

from typing import Any

import pytest

from megappo.data.chat import encode, render
from megappo.data.types import Row
from megappo.errors import DataError

BOS, EOS = 1, 2
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def row_of(question: Any, **changes: Any) -> Row:
    return Row(**({"row": 7, "question": question, "answer": None, "source": "test"} | changes))


def test_a_question_is_one_user_message_with_the_generation_prompt(bos_tokenizer):
    assert render(row_of("ab"), bos_tokenizer(TEMPLATE)) == "u:ab|a:"


def test_messages_keep_their_roles(bos_tokenizer):
    messages = [{"role": "system", "content": "q"}, {"role": "user", "content": "a"}]
    assert render(row_of(messages), bos_tokenizer(TEMPLATE)) == "s:q|u:a|a:"


@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE, None])
def test_there_is_exactly_one_begin_token_and_no_end_token(bos_tokenizer, template):
    tokenizer = bos_tokenizer(template)
    (tokens,) = encode([render(row_of("ab"), tokenizer)], tokenizer)
    assert tokens[0] == BOS
    assert tokens.count(BOS) == 1
    assert EOS not in tokens


def test_no_begin_token_is_made_up(letters):
    assert encode([render(row_of("ab"), letters)], letters) == [[4, 5, 3]]


def test_a_base_tokenizer_takes_the_prompt_as_it_stands(bos_tokenizer):
    tokenizer = bos_tokenizer(None)
    assert render(row_of("ab"), tokenizer) == "ab"
    messages = [{"role": "system", "content": "q"}, {"role": "user", "content": "ab"}]
    assert render(row_of(messages), tokenizer) == "q\n\nab"


def test_tools_reach_the_template(bos_tokenizer):
    tokenizer = bos_tokenizer("{% for t in tools %}{{ t['name'] }}{% endfor %}" + TEMPLATE)
    assert render(row_of("b", tools=[{"name": "aa"}]), tokenizer) == "aau:b|a:"


@pytest.mark.parametrize(
    ("template", "question", "changes", "message"),
    [
        (TEMPLATE, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], {}, "end with an answer"),
        ("{{ raise_exception('no system role') }}", "ab", {}, "no system role"),
        ("{{ 1 / 0 }}", "ab", {}, "refuses the messages: division by zero"),
        (None, [{"role": "user", "content": None}], {}, "without text"),
        (None, "ab", {"tools": [{"name": "f"}]}, "has tools"),
    ],
)
def test_what_cannot_be_rendered_is_named_by_row(bos_tokenizer, template, question, changes, message):
    with pytest.raises(DataError, match=f"test row 7.*{message}"):
        render(row_of(question, **changes), bos_tokenizer(template))


def test_no_texts_have_no_tokens(letters):
    assert encode([], letters) == []
