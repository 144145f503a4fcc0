"""Tokenizers with chat templates as families have them, trained on two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

QWEN = """{%- for m in messages %}
{%- if m.role in ['system', 'user'] or (m.role == 'assistant' and not m.tool_calls) %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in m.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}{{- note or '' }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}
{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
WORDS = (
    "Say what the weather is in Paris today, and say it in the words of a child. 15 degrees, rain\n\nin the evening."
)


def trained(model: BPE, alphabet: Sequence[str], special: Sequence[str], words: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of bytes, or, without an alphabet, of sentencepiece's kind; `words` are added and not special."""
    tokenizer = Tokenizer(model)
    if alphabet:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    letters = alphabet or sorted({*WORDS.replace(" ", "▁")})
    byte_tokens = [] if alphabet else [f"<0x{i:02X}>" for i in range(256)]
    tokenizer.train_from_iterator(
        [WORDS], BpeTrainer(vocab_size=420, initial_alphabet=letters, special_tokens=byte_tokens, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


@cache
def qwen() -> PreTrainedTokenizerFast:
    """Bytes, tokens of turns, and tokens of calls and thoughts that are not special ones."""
    words = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<h1>"]
    backend = trained(
        BPE(), pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], words
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=QWEN)


@cache
def gemma() -> PreTrainedTokenizerFast:
    """Pieces as sentencepiece's, with added tokens of line breaks."""
    backend = Tokenizer.from_str(trained(BPE(byte_fallback=True, unk_token=None), [], []).to_str())
    backend.add_special_tokens(["<bos>", "<start_of_turn>", "<end_of_turn>"])
    backend.add_tokens(["\n\n", "\n\n\n"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", chat_template=GEMMA)


@cache
def words() -> PreTrainedTokenizerFast:
    """A vocabulary of words, in which the token of a text's end is a word like others."""
    backend = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "say": 2, "<": 3, "eos>": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.content }} {{ eos_token }} {% endfor %}",
    )  # fmt: skip


def call(arguments: Any, name: str = "weather", number: str = "call_1") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(*contents: str) -> list[dict[str, Any]]:
    """What the user and the assistant say by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def templated(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=qwen().backend_tokenizer, chat_template=template)
