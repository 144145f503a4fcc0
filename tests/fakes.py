"""Small stand-ins for what a test does not want to load: a tokenizer of 97 words and a flat cost profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from families import VOCAB, tiny_runtime
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from swiftopt.core.costs import CostProfile, FormatCosts
from swiftopt.core.messages import Ready
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.work import Work
from swiftopt.models.runtime import Runtime

N_LAYERS = 4
R = TypeVar("R")


def made_up_gpus(monkeypatch: pytest.MonkeyPatch, *free: float) -> None:
    """Let torch tell of GPUs with so many bytes free; nothing can be computed on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free[torch.device(device).index]), 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {torch.device(device).index}")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


class WordTokenizer:
    """One token per word: word "w17" is token 17, any other word hashes to one; token 1 ends a text.

    With a template, whatever that is, the messages of a chat are written one behind the other.
    """

    chat_template: str | None = None
    eos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self._id(word) for word in text.split()]}

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> str:
        return " ".join(message["content"] for message in messages)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{i}" for i in token_ids if not (skip_special_tokens and i == self.eos_token_id))

    @staticmethod
    def _id(word: str) -> int:
        if word.startswith("w") and word[1:].isdigit():
            return int(word[1:])
        return 2 + sum(map(ord, word)) % (VOCAB - 2)


def worded_runtime(family: str = "llama", dtype: torch.dtype = torch.float64) -> Runtime:
    """A tiny runtime that reads and writes words and never stops by itself."""
    runtime = tiny_runtime(family, dtype)
    tokenizer: Any = WordTokenizer()
    tokenizer.eos_token_id = None
    runtime.tokenizer = tokenizer
    return runtime


READY = Ready(64, "v1:0", exact=True, device="cpu", dtype="float32", template=None)  # of a model that is loaded


@cache
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with 97 tokens: letters, digits, signs, and some merged; token 1 ends a text."""
    letters = [chr(code) for code in range(33, 127) if chr(code) not in "~^`@$|;"]
    pairs = ['{"', '":', '",', '"}', "tr", "ue"]
    tokens = ["<pad>", "<eos>", *letters, "Ġ", *pairs, "true"]
    assert len(tokens) == VOCAB
    merges = [*((pair[0], pair[1]) for pair in pairs), ("tr", "ue")]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def results_of(works: Iterable[Work[R]], at_once: int) -> list[R]:
    """What works return that run side by side, in their order."""
    done: dict[int, R] = {}

    def noting(number: int, work: Work[R]) -> Work[None]:
        done[number] = yield from work

    list(side_by_side((noting(i, work) for i, work in enumerate(works)), at_once))
    return [done[number] for number in sorted(done)]


def flat_costs(attn_s: float = 1.0, mlp_s: float = 1.0, n_layers: int = N_LAYERS) -> CostProfile:
    """A profile in which a pass is its sub-layers and rows are free."""
    whole = n_layers * (attn_s + mlp_s)
    return CostProfile(
        "tiny", "test", "float64", 256, n_layers, attn_s, mlp_s, 0.0, 0.0, {n: whole for n in (1, 2, 4, 8, 16, 32, 64)}
    )


def cheap_draft_costs(share: float = 0.25, n_layers: int = N_LAYERS) -> CostProfile:
    """As `flat_costs` with a few percent per row, and an int4 draft that costs `share` of a pass, and more per row."""
    costs = FormatCosts(share, share, 0.0, 0.0, {1: 1.0, 2: 1.1, 4: 1.5, 8: 3.0})
    flat = flat_costs(n_layers=n_layers)
    passes = {n: seconds * (1 + 0.03 * (n - 1)) for n, seconds in flat.pass_s.items()}
    return replace(flat, pass_s=passes, formats={"int4": costs})
