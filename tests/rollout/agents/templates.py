"""A tokenizer that merges characters, and chat templates of the usual kinds, written for these tests."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|end|>", "<|turn|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
CORPUS = [
    "<tool_response>\nthe answer is 42.\n</tool_response>\nuser assistant tool error: no answer within 10 s\n",
    'what is 12 + 34? {"name": "add", "arguments": {"x": 12, "y": 34}} [add(x=1, y=2)]\n\n.\n"\\"',
] * 20

CHATML = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>{{ "\\n" }}
{%- endif %}{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}{{ "\\n" }}
{#- #}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>{{ "\\n" }}{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{{ "\\n" }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ "\\n" }}{% endif %}"""
"""As Qwen's: answers of one turn are one message of the user."""

AS_JSON = """{%- for message in messages %}<|turn|>{{ message.role }}

{% if message.role == "tool" %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|turn|>assistant

{% endif %}"""
"""As Llama's: answers are JSON."""

FORGETS = """{%- for message in messages %}
{%- if message.role != "assistant" or loop.last %}<|turn|>{{ message.content }}<|im_end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"""
"""Shows only the last turn of the assistant."""

SILENT = """{%- for message in messages %}
{%- if message.role != "tool" %}<|turn|>{{ message.content }}<|im_end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"""
"""Does not show what tools answer."""

STRICT = """{%- for message in messages %}
{%- if message.role == "tool" %}{{ raise_exception("no tools here") }}{% endif %}<|turn|>{{ message.content }}<|im_end|>
{%- endfor %}"""
"""Refuses tools."""


def merging_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with some merges."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|end|>", chat_template=template
    )
