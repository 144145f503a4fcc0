"""Tiny models as files: folders as transformers saves them, GGUF as llama.cpp files it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from families import tiny_model
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast

# w94, w95 and w96 stand before what the system, the user and the assistant say.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w94', 'user': 'w95', 'assistant': 'w96'}[m['role']] }}"
    " {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w96{% endif %}"
)
BYTES_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def save(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, chat_template: str | None = None
) -> Path:
    """A tiny model with a word-level tokenizer, as a folder."""
    tiny_model(family, dtype).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def save_bytes(folder: Path) -> Path:
    """A tiny model of single bytes, as a folder; every byte is as likely as another."""
    special = ["<|end|>", "<|start|>"]
    letters = sorted(ByteLevel.alphabet())
    model = tiny_model("llama", torch.float32, scale=0.0, vocab_size=len(letters) + 2, max_position_embeddings=8192)
    model.save_pretrained(folder)
    backend = Tokenizer(BPE({word: i for i, word in enumerate([*special, *letters])}, []))
    backend.add_special_tokens(special)
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = BYTES_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def _rows_as_llama_cpp(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Its order of the rows of query and key: rotary pairs side by side, not half a head apart."""
    return weight.reshape(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path, model: Any, kind: str = "F32", more: Callable[[gguf.GGUFWriter], object] = lambda writer: None
) -> Path:
    """A llama model as llama.cpp would file it, matrices as `kind`, with a tokenizer of single letters.

    Args: more: adds settings and tensors.
    """
    config: LlamaConfig = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(33, 127)), "ab", "cd", "ef"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b", "c d", "e f"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, values: Any) -> None:
        own = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)

    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    for name, tensor in model.state_dict().items():
        if name in top:
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                add(f"{top[name]}.weight", tensor.numpy())
            continue
        _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        filed = _rows_as_llama_cpp(tensor, heads[inner]) if inner in heads else tensor
        add(f"blk.{layer}.{GGUF_NAMES[inner]}.weight", np.ascontiguousarray(filed.numpy()))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
