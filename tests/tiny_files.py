"""Tiny models as folders that transformers saves; `converted` writes them as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
