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
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

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
    return save_words(folder, chat_template)


def save_words(folder: Path, chat_template: str | None = None) -> Path:
    """The word-level tokenizer of a folder."""
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


ARCHITECTURES = {"gemma3_text": "gemma3"}  # llama.cpp's names of model types, where they are others


def _settings(config: Any) -> dict[str, int | float]:
    """What llama.cpp's converter writes of a config, but for rotary scaling."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": n_inner,
        "attention.head_count": config.num_attention_heads,
    }
    if config.model_type == "gpt2":
        return {**settings, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return {
        **settings,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
        **({"attention.sliding_window": config.sliding_window} if getattr(config, "sliding_window", None) else {}),
    }


def write_gguf(
    path: Path, model: Any, kind: str = "F32", more: Callable[[gguf.GGUFWriter], object] = lambda writer: None
) -> Path:
    """A model as llama.cpp would file it, matrices as `kind`, with a tokenizer of single letters.

    Args: more: adds settings and tensors.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    for name, value in _settings(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(33, 127)), "ab", "cd", "ef"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b", "c d", "e f"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    places = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
        n_heads = heads.get(name.split(".")[-2])
        filed = tensor
        if architecture == "llama" and n_heads is not None:
            filed = _rows_as_llama_cpp(tensor, n_heads)
        elif architecture == "gpt2" and name.rpartition(".c_")[1] and name.endswith(".weight"):
            filed = tensor.T
        elif architecture == "gemma3" and "norm" in name:
            filed = tensor + 1
        values = np.ascontiguousarray(filed.numpy())
        own = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        place = places.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        writer.add_tensor(place, gguf.quants.quantize(values, own), raw_dtype=own)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_adapter(folder: Path, base: Path | str, model: Any, *ends: str, seed: int = 0, **config: Any) -> Path:
    """A random LoRA adapter, as peft saves it, for the modules of `model` whose names end so.

    Args: base: as its config names it. config: fields of peft's that are not as written here; r may be by module in
          `rank_pattern`, whose keys are such ends.
    """
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": list(ends),
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "loftq_config": {},
        "megatron_core": "megatron.core",
        **config,
    }
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not name.endswith(ends):
            continue
        shape = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.T.shape
        rank = next((r for end, r in values["rank_pattern"].items() if name.endswith(end)), values["r"])
        form = "lora_embedding_{}" if isinstance(module, torch.nn.Embedding) else "lora_{}.weight"
        for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            tensors[f"base_model.model.{name}.{form.format(part)}"] = torch.randn(size, generator=drawn) / 2
        if values.get("use_dora"):
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = torch.rand(shape[0], generator=drawn) + 0.5
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
