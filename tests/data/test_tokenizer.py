import pytest

from megappo.data.tokenizer import character_tokenizer, decode_response, encode_all, load_tokenizer
from megappo.errors import DataError


def test_characters_have_ids_in_code_point_order_after_the_special_tokens(letters):
    assert encode_all(letters, ["ab>d"]) == [[4, 5, 3, 7]]
    assert (letters.pad_token_id, letters.eos_token_id, letters.unk_token_id) == (0, 1, 2)
    assert letters.bos_token_id is None


@pytest.mark.parametrize("text", ["a b\nc", "  ab", "\n", "été", "a\u3042b"])
def test_decoding_gives_back_every_character(text):
    tokenizer = character_tokenizer(text)
    assert tokenizer.decode(encode_all(tokenizer, [text])[0]) == text


def test_the_chat_template_writes_the_generation_prompt(letters):
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ba"},
        {"role": "user", "content": "c"},
    ]
    assert letters.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "ab>ba<eos>c>"


def test_a_saved_tokenizer_loads_as_it_was(letters, tmp_path):
    letters.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == letters.get_vocab()
    assert loaded.chat_template == letters.chat_template
    assert loaded.eos_token_id == 1


def test_more_than_one_character_is_refused():
    with pytest.raises(DataError, match="'ab' is not one character"):
        character_tokenizer(["ab"])


def test_a_missing_folder_and_an_empty_one_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.*is not a folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_the_end_token_is_left_out_of_the_response_text(letters):
    assert decode_response(letters, [4, 5, 1]) == "ab"
    assert decode_response(letters, [4, 5]) == "ab"
    assert decode_response(letters, [1]) == ""
    assert decode_response(letters, []) == ""


def test_special_tokens_inside_a_response_stay_visible(letters):
    # A reward must not take "a<unk>b" for "ab".
    assert decode_response(letters, [4, 2, 5, 1]) == "a<unk>b"
    assert decode_response(letters, [4, 1, 1]) == "a<eos>"


def test_ids_beyond_the_tokenizer_show_as_replacement_characters(letters):
    assert decode_response(letters, [4, 63, 5, 40, 1]) == "a\ufffdb\ufffd"
