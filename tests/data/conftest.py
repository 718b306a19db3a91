"""Tokenizers small enough to compute by hand."""

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megappo.data.tokenizer import character_tokenizer


@pytest.fixture
def letters() -> PreTrainedTokenizerFast:
    """Ids: <pad> 0, <eos> 1, <unk> 2, '>' 3, a 4, b 5, c 6, d 7."""
    return character_tokenizer("abcd")


@pytest.fixture
def bos_tokenizer() -> Callable[[str | None], PreTrainedTokenizerFast]:
    """Makes a tokenizer with the given chat template that adds begin and end tokens by default."""
    return _make_bos_tokenizer


def _make_bos_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A character tokenizer that puts <s> (1) in front and </s> (2) behind unless told otherwise."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *"abusq:|\n "])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
