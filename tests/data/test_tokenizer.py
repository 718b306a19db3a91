import json

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


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_a_tokenizer_beside_any_model_loads_as_it_was(model_type, tmp_path):
    saved = character_tokenizer("ab\u00e9\U0001f600")
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    texts = ["ba\u00e9\U0001f600", "a\u6f22z", "\u00e9"]
    assert encode_all(load_tokenizer(str(tmp_path)), texts) == encode_all(saved, texts)
    assert [len(tokens) for tokens in encode_all(saved, texts)] == [len(text) for text in texts]


def test_more_than_one_character_is_refused():
    with pytest.raises(DataError, match="'ab' is not one character"):
        character_tokenizer(["ab"])


def test_a_missing_folder_and_an_empty_one_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.*is not a folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    # transformers makes a tokenizer out of a model's type alone.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(DataError, match=r"holds no tokenizer: none of merges\.txt, .*tokenizer\.json"):
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
