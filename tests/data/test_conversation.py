"""Masks of conversations, against hand-marked texts; templates whose mask would not be exact are refused."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megappo.config.supervised import TrainOn
from megappo.data.conversation import encode_conversations
from megappo.data.types import Message, Row
from megappo.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<im>' + m['role'][0] + '\n' + m['content'] + '</im>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>a\n' }}{% endif %}"
)
MARKS = (
    "{% for m in messages %}{{ '<im>' + m['role'][0] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</im>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '</im>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<im>a\n' }}{% endif %}"
)
MARKS_CONTENT_ONLY = MARKS.replace(
    "{{ m['content'] + '</im>' }}{% endgeneration %}{{ '\n' }}", "{{ m['content'] }}{% endgeneration %}{{ '</im>\n' }}"
)
# As Qwen3's: what the assistant thought is shown in its last message only.
FORGETS = (
    "{% for m in messages %}{{ '<im>' + m['role'][0] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}{{ '!' }}"
    "{% endif %}{{ m['content'] + '</im>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<im>a\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ '<im>' + m['role'][0] + ' ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>a ' }}{% endif %}"
)
TALK: list[Message] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba", "train": True},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "aab"},
]


def special_tokenizer(template: str | None, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token per character but for the merges; <im> and </im> are special, </im> ends."""
    characters = [*"abcsu!:\n "]
    vocabulary = {token: index for index, token in enumerate([*characters, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(models.BPE(vocabulary, list(merges)))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]*"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</im>", additional_special_tokens=["<im>"], chat_template=template
    )


def row(messages: list[Message], **keys: Any) -> Row:
    return Row(row=7, question=messages, answer=None, source="chat", **keys)


def shown(tokenizer: PreTrainedTokenizerFast, messages: list[Message], train_on: TrainOn) -> str:
    """The text with brackets around what is trained on."""
    (one,) = encode_conversations([row(messages)], tokenizer, train_on=train_on)
    text, inside = "", False
    for token, trained in zip(one.tokens.tolist(), one.mask.tolist()):
        text += "" if trained == inside else "[" if trained else "]"
        text += str(tokenizer.convert_ids_to_tokens(token))
        inside = trained
    return text + ("]" if inside else "")


START = "<im>s\ns</im>\n<im>u\nab</im>\n<im>a\n"
MASKS = {
    TrainOn.assistant: START + "[ba</im>]\n<im>u\nb</im>\n<im>a\n[aab</im>]\n",
    TrainOn.last_assistant: START + "ba</im>\n<im>u\nb</im>\n<im>a\n[aab</im>]\n",
    TrainOn.marked: START + "[ba</im>]\n<im>u\nb</im>\n<im>a\naab</im>\n",
}


@pytest.mark.parametrize("train_on", TrainOn)
@pytest.mark.parametrize("template", [CHATML, MARKS], ids=["differences", "marks"])
def test_the_mask_is_on_the_chosen_answers_and_their_end_tokens(template: str, train_on: TrainOn) -> None:
    assert shown(special_tokenizer(template), TALK, train_on) == MASKS[train_on]


def test_the_tokens_before_an_answer_are_those_of_its_prompt() -> None:
    tokenizer = special_tokenizer(CHATML)
    (one,) = encode_conversations([row(TALK)], tokenizer, train_on=TrainOn.last_assistant)
    prompt: Any = tokenizer.apply_chat_template(TALK[:4], add_generation_prompt=True, tokenize=True, return_dict=True)
    start = one.mask.tolist().index(True)
    assert one.tokens.tolist()[:start] == prompt["input_ids"]


def test_marks_are_taken_as_they_are_and_a_missing_end_token_is_told() -> None:
    tokenizer = special_tokenizer(MARKS_CONTENT_ONLY)
    assert shown(tokenizer, TALK[:3], TrainOn.assistant) == START + "[ba]</im>\n"
    for template, has_end in ((MARKS_CONTENT_ONLY, False), (NO_END, False), (MARKS, True), (CHATML, True)):
        (one,) = encode_conversations([row(TALK)], special_tokenizer(template), train_on=TrainOn.assistant)
        assert one.has_end is has_end


def test_a_template_that_shows_earlier_answers_otherwise_is_refused_but_for_the_last_answer() -> None:
    tokenizer = special_tokenizer(FORGETS)
    with pytest.raises(DataError, match=r"chat row 7: .* shows message 2 in another way .*train_on=last_assistant"):
        shown(tokenizer, TALK, TrainOn.assistant)
    assert shown(tokenizer, TALK, TrainOn.last_assistant).endswith("<im>a\n[!aab</im>]\n")


def test_a_tokenizer_that_joins_text_across_the_edge_is_refused() -> None:
    joining = special_tokenizer(NO_END, merges=((" ", "b"),))
    with pytest.raises(DataError, match=r"chat row 7: the tokenizer joins text of both sides"):
        shown(joining, TALK, TrainOn.assistant)
    assert shown(special_tokenizer(NO_END), TALK[1:3], TrainOn.assistant) == "<im>u ab<im>a [ba]"


USER: Message = {"role": "user", "content": "a"}
BAD: list[tuple[list[Message], TrainOn, str]] = [
    ([USER], TrainOn.assistant, "no message to train on with train_on=assistant"),
    ([USER, {"role": "assistant", "content": "b"}], TrainOn.marked, "those that have train=true"),
    ([USER | {"train": True}], TrainOn.marked, "message 0 has train=true and is the user's"),
    ([USER, {"role": "assistant", "content": " \n"}], TrainOn.assistant, "message 1, an answer to train on, is empty"),
    ([USER, {"role": "assistant"}], TrainOn.assistant, "message 1, an answer to train on, is empty"),
]


@pytest.mark.parametrize(("messages", "train_on", "message"), BAD)
def test_conversations_without_something_to_train_on_are_refused(
    messages: list[Message], train_on: TrainOn, message: str
) -> None:
    with pytest.raises(DataError, match=f"chat row 7: .*{message}"):
        shown(special_tokenizer(CHATML), messages, train_on)


def test_an_empty_answer_that_is_not_trained_on_stays() -> None:
    talk = [USER, {"role": "assistant", "content": ""}, USER, {"role": "assistant", "content": "b"}]
    text = shown(special_tokenizer(CHATML), talk, TrainOn.last_assistant)
    assert text == "<im>u\na</im>\n<im>a\n</im>\n<im>u\na</im>\n<im>a\n[b</im>]\n"


def test_templates_that_cannot_be_used_are_named() -> None:
    with pytest.raises(DataError, match="needs a chat template"):
        shown(special_tokenizer(None), TALK, TrainOn.assistant)
    with pytest.raises(DataError, match="chat row 7: the chat template refuses the messages: odd"):
        shown(special_tokenizer("{{ raise_exception('odd') }}"), TALK, TrainOn.assistant)
    once = "{% generation %}{{ messages | length }}{% endgeneration %}"
    with pytest.raises(DataError, match="marks 1 pieces of text for 2 answers"):
        shown(special_tokenizer(once), TALK, TrainOn.assistant)
