"""Writes the tokenizer in a GGUF file's settings as files that transformers and the `tokenizers` library read.

Texts become tokens as in llama.cpp. For byte-level BPE ("gpt2"), the file has merges, and the name of a way to split
texts into words. For SentencePiece ("llama"), it has scores: two neighbours are merged if their joined text is a token,
the best score first. Gemma 4 ("gemma4") has pieces like SentencePiece's, and merges like BPE's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..core.errors import ModelNotFound, UnsupportedModel
from .gguf_reader import GgufFile, Texts
from .gguf_settings import token_ids

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # Token type numbers of the GGUF format.
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # Types of tokens that are matched in a text before it is split.
# Phi-3's control tokens that do not swallow the spaces after them.
KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
SPACE = "▁"  # SentencePiece's character for a space.
MERGED_PIECES = "gemma4"  # In llama.cpp's files a kind of tokenizer, and in Ollama's a way to split texts into words.
LINES = r"[^\n]+|\n+"  # Its words, within which tokens are merged: a line, or several line ends.
# How the models' own tokenizers split texts into words: regular expressions, each applied to the pieces that the one
# before leaves. GPT-2's expression is built into `tokenizers`, and then comes last.
GPT2 = "built in"
DIGIT, DIGITS = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in ("*+", "+*")]
LLAMA3 = (rf"{_WORD}|{DIGITS}|{_REST}",)
QWEN2 = (rf"{_WORD}|{DIGIT}|{_REST}",)
QWEN35 = (QWEN2[0].replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),)
TEKKEN = ("|".join([*_CASED, DIGIT, _REST_WITH_SLASH]),)
GPT4O = ("|".join([*(f"{form}{_ENDINGS}?" for form in _CASED), DIGITS, _REST_WITH_SLASH]),)
JAIS2 = (
    LLAMA3[0].replace(
        r"\s+(?!\S)|\s+", "".join(rf"\s{{{1 << n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"
    ),
)
SEED_CODER = (QWEN2[0].replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)
THREES = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O[0])
FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
UNNAMED = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
VIKING = (r" ?[^(\s|.,!?…。，、।۔،)]+", DIGIT)
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
DEEPSEEK3 = (DIGITS, "[一-龥぀-ゟ゠-ヿ]+", rf"{_MARKS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT)


@dataclass(frozen=True, slots=True)
class Split:
    """A way to split texts into words by regular expressions.

    `whole`: a word that is a token becomes that token without merges. `bos`: prompts begin with the token for that.
    """

    expressions: tuple[str, ...]
    whole: bool = False
    bos: bool = False


SPLITS: dict[str, Split] = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "gigachat", "a.x-4.0"),
            *("exaone4", "granite-docling"),
        ),
        Split((GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Split((DIGIT, GPT2)),
    ),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
            "jina-v5-nano",
        ),
        Split(LLAMA3, whole=True, bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Split(LLAMA3)),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "grok-2"),
            "solar-open",
        ),
        Split(QWEN2),
    ),
    "qwen35": Split(QWEN35),
    "tekken": Split(TEKKEN, whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Split(GPT4O)),
    "default": Split(UNNAMED),
    "falcon": Split(FALCON),
    "jais-2": Split(JAIS2),
    "seed-coder": Split(SEED_CODER),
    "tiny_aya": Split(THREES),
    "viking": Split(VIKING),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3", "joyai-llm"), Split(DEEPSEEK3)),
    "deepseek-coder": Split(DEEPSEEK_CODER),
}


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if the file has one, the chat template.

    Raises: UnsupportedModel: the kind of tokenizer, or its way to split texts, is not supported. ModelNotFound: the
            tokenizer's settings are damaged.
    """
    settings = {key.removeprefix(PREFIX): value for key, value in file.settings.items() if key.startswith(PREFIX)}
    texts, types = _texts(file, settings, "tokens"), settings.get("token_type")
    types = types if isinstance(types, list) else [NORMAL] * len(texts)
    if len(types) != len(texts):
        raise _damaged(file, f"{len(types)} types of {len(texts)} tokens")
    texts = [text or f"[EMPTY_{number}]" for number, text in enumerate(texts)]
    ids = {text: number for number, text in enumerate(texts)}
    if len(ids) != len(texts):
        raise _damaged(file, "the same token twice")
    kind = settings.get("model")
    if kind == "gpt2":
        written, begins = _byte_level(file, settings, ids)
    elif kind == MERGED_PIECES or (kind == "llama" and settings.get("pre") == MERGED_PIECES):
        written, begins = _pieces(settings, ids, _texts(file, settings, "merges"), False), True
        lines = {"type": "Split", "pattern": {"Regex": LINES}, "behavior": "Isolated", "invert": False}
        written["pre_tokenizer"] = lines
    elif kind == "llama":
        written, begins = _sentencepiece(file, settings, ids, types), True
    else:
        raise UnsupportedModel(
            f"{file.path} has a tokenizer of the kind {str(kind)[:40]!r}, which is not read: use a file of the kind"
            f" gpt2, llama or {MERGED_PIECES}"
        )
    special = token_ids(file) | {"unk_token_id": settings.get("unknown_token_id")}
    names = {name.removesuffix("_id"): texts[number] for name, number in special.items() if _is_id(number, texts)}
    begins, ends = bool(settings.get("add_bos_token", begins)), bool(settings.get("add_eos_token", False))
    added = [names.get("bos_token") if begins else None, names.get("eos_token") if ends else None]
    tokens = _added(file, texts, types, names)
    written |= {"added_tokens": tokens, "post_processor": _frame(ids, *added)}
    written |= {"version": "1.0", "truncation": None, "padding": None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: names.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        # Without these entries, transformers reads all of tokenizer.json once more.
        "added_tokens_decoder": {
            str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in tokens
        },
    }
    _write(file, folder / "tokenizer.json", json.dumps(written, ensure_ascii=False))
    _write(file, folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2))
    template = file.settings.get("tokenizer.chat_template")
    if isinstance(template, str):
        _write(file, folder / "chat_template.jinja", template)


def _write(file: GgufFile, path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8", newline="")
    except UnicodeEncodeError:
        raise _damaged(file, "texts that are no UTF-8") from None


def _damaged(file: GgufFile, words: str) -> ModelNotFound:
    return ModelNotFound(f"{file.path} has a damaged tokenizer ({words}): download it again")


def _is_id(number: Any, texts: Sequence[str]) -> TypeGuard[int]:
    return type(number) is int and 0 <= number < len(texts)


def _texts(file: GgufFile, settings: Mapping[str, Any], name: str) -> list[str]:
    values = settings.get(name)
    if not isinstance(values, Texts) or not values:
        raise _damaged(file, f"no {name}")
    return values.values


def _added(
    file: GgufFile, texts: Sequence[str], types: Sequence[int], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the added tokens as tokenizer.json lists them.

    Phi-3's control tokens swallow the spaces after them. As in llama.cpp, the model's name decides that.
    """
    model, special = str(file.settings.get("general.name", "")).lower(), {*names.values()}
    swallows = "phi-3" in model or "phi3" in model
    return [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": swallows and kind != USER_DEFINED and text not in KEEPS_SPACES,
            "normalized": False,
            "special": kind != USER_DEFINED or text in special,
        }
        for number, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in ADDED or text in special
    ]


def _frame(ids: Mapping[str, int], before: str | None, after: str | None) -> dict[str, Any]:
    """Return tokenizer.json's post-processor, which adds tokens before and after a text, or each of two texts."""

    def around(text: str, type_id: int) -> list[dict[str, Any]]:
        parts = [(before, "SpecialToken"), (text, "Sequence"), (after, "SpecialToken")]
        return [{kind: {"id": name, "type_id": type_id}} for name, kind in parts if name is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (before, after) if name is not None
        },
    }


def _bpe(ids: Mapping[str, int], merges: Sequence[Any], **values: Any) -> dict[str, Any]:
    """Return tokenizer.json's BPE model. Args: merges: texts "left right", or pairs."""
    usual: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    usual |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **usual, **values, "vocab": ids, "merges": merges}


def _byte_level(file: GgufFile, settings: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    """Return the parts of tokenizer.json, and whether texts begin with a token by default."""
    name = settings.get("pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{file.path} cuts texts into words by {str(name)[:40]!r}, which is not known here: use the model's hub id"
        )
    split = SPLITS[name]
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in split.expressions
        if expression != GPT2
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cuts.append({**to_bytes, "use_regex": split.expressions[-1] == GPT2})
    parts = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": {**to_bytes, "use_regex": True},
        "model": _bpe(ids, _texts(file, settings, "merges"), ignore_merges=split.whole),
    }
    return parts, split.bos


def _sentencepiece(
    file: GgufFile, settings: Mapping[str, Any], ids: Mapping[str, int], types: Sequence[int]
) -> dict[str, Any]:
    """Return the parts of tokenizer.json. Each text between two added tokens begins with a space by default."""
    scores = settings.get("scores")
    if not isinstance(scores, list) or len(scores) != len(ids):
        raise _damaged(file, "no score for each token")
    return _pieces(settings, ids, _merges(list(ids), types, scores), settings.get("add_space_prefix", True))


def _pieces(
    settings: Mapping[str, Any], ids: Mapping[str, int], merges: Sequence[Any], has_prefix: bool
) -> dict[str, Any]:
    """Return the parts of tokenizer.json for tokens that are pieces of text, with byte tokens for other text.

    Args: merges: as `_bpe`. has_prefix: texts begin with a space.
    """
    unknown, texts = settings.get("unknown_token_id"), list(ids)
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unk = texts[unknown] if _is_id(unknown, texts) else None
    model = _bpe(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    parts = {"normalizer": spaces, "pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": decoders}}
    return {**parts, "model": model}


def _merges(texts: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose joined text is a token, the best score first.

    Added tokens are left out, because they are matched before texts are merged.
    """
    merged = {text: -score for text, kind, score in zip(texts, types, scores, strict=True) if kind not in ADDED}
    return [
        (left, right)
        for text in sorted(merged, key=merged.__getitem__)
        for at in range(len(text) - 1, 0, -1)
        if (left := text[:at]) in merged and (right := text[at:]) in merged
    ]
