"""The files of the workload: a model folder with random weights and a tokenizer of words, and prompts."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.contenders.workload import END, MODEL, PAD, SEED, UNKNOWN, Workload, write_prompts


def write_workload(workload: Workload, folder: Path) -> Path:
    """Write everything into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=workload.vocabulary,
        bos_token_id=None,
        # A model without an end token is what gives responses of a fixed length.
        eos_token_id=None if workload.fixed_length else workload.end_token,
        pad_token_id=None,
        **MODEL,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    make_tokenizer(workload).save_pretrained(folder)
    write_prompts(workload, folder / "prompts.jsonl")
    return folder


def make_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i is the word wi; the last three are special."""
    words = [*(f"w{index}" for index in range(workload.words)), PAD, END, UNKNOWN]
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
