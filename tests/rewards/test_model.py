import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megappo.data.tokenizer import character_tokenizer, encode_all
from megappo.errors import DataError
from megappo.rewards import Sample
from megappo.rewards.model import ModelReward
from tests.rewards.tiny_reward_model import make_last_character_model, make_random_reward_model

TOKENIZER = character_tokenizer("abc")


def samples(*texts: str) -> list[Sample]:
    return [Sample(prompt="a>", response=text, answer=None) for text in texts]


def test_the_score_is_read_at_the_last_token_of_the_response(tmp_path):
    model = make_last_character_model(tmp_path / "model", TOKENIZER, {"b": 2.0, ">": -1.0})
    rewards = ModelReward(path=str(model), end_token=False).score(samples("ab", "b", "ba", "", "aaaab"))
    # The empty response is read at the prompt's '>'.
    # The norm's epsilon (1e-6 beside a mean square of 1 / 64) takes 3e-5 of the score.
    assert [reward.score for reward in rewards] == pytest.approx([2.0, 2.0, 0.0, -1.0, 2.0], abs=1e-4)


def test_padding_and_batch_size_do_not_change_scores(tmp_path):
    model = make_random_reward_model(tmp_path / "model", TOKENIZER)
    texts = ["abcabc", "", "a", "cccccccccc", "ab"]
    alone = AutoModelForSequenceClassification.from_pretrained(model)
    expected = []
    for tokens in encode_all(TOKENIZER, ["a>" + text + "<eos>" for text in texts]):
        with torch.inference_mode():
            expected.append(alone(input_ids=torch.tensor([tokens])).logits[0, 0].item())
    assert len(set(expected)) == 5
    for batch_size in (1, 2, 16):
        rewards = ModelReward(path=str(model), batch_size=batch_size).score(samples(*texts))
        assert [reward.score for reward in rewards] == pytest.approx(expected, abs=1e-4)


def test_only_an_answer_that_ended_gets_an_end_token(tmp_path):
    model = make_last_character_model(tmp_path / "model", TOKENIZER, {"b": 2.0, "<eos>": -1.0})
    ended, cut = (
        Sample(prompt="a>", response="ab", answer=None, finish_reason=reason) for reason in ("stop", "length")
    )
    rewards = ModelReward(path=str(model)).score([ended, cut])
    assert [reward.score for reward in rewards] == pytest.approx([-1.0, 2.0], abs=1e-4)


def test_a_text_beyond_the_models_positions_is_an_error(tmp_path):
    model = make_random_reward_model(tmp_path / "model", TOKENIZER)
    with pytest.raises(DataError, match=r"67 tokens cannot be scored, .* takes 1 to 64"):
        ModelReward(path=str(model)).score(samples("a" * 64))


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(DataError, match="model_path=None"):
        ModelReward(path=None)
    with pytest.raises(DataError, match="cannot be loaded"):
        ModelReward(path=str(tmp_path))


def test_a_model_without_pad_token_is_refused(tmp_path):
    tokenizer = character_tokenizer("abc")
    tokenizer.pad_token = None
    model = make_random_reward_model(tmp_path / "model", tokenizer)
    with pytest.raises(DataError, match="has no pad token"):
        ModelReward(path=str(model))
