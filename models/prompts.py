"""Checks prompts against a saved model's files, without torch.

A loaded model checks every prompt again, because files may leave values to transformers' defaults, and a chat template
may add tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..core.errors import ContextOverflow, InvalidInput, SettingsError
from ..core.types import Prompt
from .config_layout import context_limit
from .saved import model_values

MAX_COUNTED_BYTES = 4 << 20  # Limit on the bytes that are tokenised to count tokens, which takes about 1 s per MB.


def refuse_overflow(n_prompt: int, max_new_tokens: int, limit: int, whose: str = "") -> None:
    """Raises: ContextOverflow: prompt and completion together need more positions than the model has."""
    if n_prompt + max_new_tokens > limit:
        raise ContextOverflow(
            f"{whose}this model's maximum context length is {limit} tokens, but the prompt has {n_prompt} and"
            f" {max_new_tokens} new tokens are requested: shorten the prompt or ask for fewer new tokens"
        )


def refuse_tokens(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises: SettingsError: a token is not in the model's vocabulary; `what` is the field that names it."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            problem = f"{what} names token {token_id}, but this model has tokens 0 to {vocab_size - 1}"
            raise SettingsError(f"{problem}: use ids of this model's tokenizer", what)


def no_template(whose: str) -> InvalidInput:
    """Return the error for a chat without a template. Args: whose: words for the chat."""
    return InvalidInput(
        f"{whose} is a chat, but this model's tokenizer has no chat template: give plain text, or use an instruct model"
    )


def check_prompts(
    folder: Path, tokenizer: Path, prompts: Sequence[Prompt], max_new_tokens: int, biased: Iterable[int] = ()
) -> None:
    """Check from a saved model's files whether it can decode prompts.

    Tokens that a template or the tokenizer adds are not counted, so no prompt that fits is refused.

    Args:   tokenizer: the folder with the model's tokenizer. max_new_tokens: for prompts without their own limit.
            biased: the token ids of a `logit_bias`.
    Raises: InvalidInput: there is no chat template for a chat. SettingsError: the model has no such token.
        ContextOverflow: a prompt does not fit the context. ModelNotFound: the config cannot be read.
    """
    config = model_values(folder)[1]
    if isinstance(vocab_size := config.get("vocab_size"), int):
        refuse_tokens("logit_bias", biased, vocab_size)
    chat = next((prompt for prompt in prompts if prompt.messages or prompt.turns), None)
    if chat is not None and not _has_template(tokenizer):
        raise no_template(f"prompt {chat.id!r}")
    limit = _stated_context(config)
    if limit is not None:
        _check_lengths(tokenizer / "tokenizer.json", prompts, max_new_tokens, limit)


def _check_lengths(path: Path, prompts: Sequence[Prompt], max_new_tokens: int, limit: int) -> None:
    """Raises: ContextOverflow: a prompt does not fit `limit` positions. Args: path: of a tokenizer.json."""
    tokenizer: Any = None
    n_bytes_counted = 0
    for prompt in prompts:
        n_new, texts = prompt.max_new_tokens or max_new_tokens, _first_texts(prompt)
        n_bytes = sum(len(text.encode()) for text in texts)
        n_tokens = 1
        # A token has at least one byte, so prompts with fewer bytes than the limit need no count.
        if n_bytes + n_new > limit and n_bytes_counted + n_bytes <= MAX_COUNTED_BYTES and path.is_file():
            n_bytes_counted += n_bytes
            tokenizer = tokenizer or _tokenizer(path)
            n_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
        refuse_overflow(n_tokens, n_new, limit, f"prompt {prompt.id!r}: ")


def _first_texts(prompt: Prompt) -> list[str]:
    """Return the texts of a prompt up to its first turn."""
    if prompt.messages:
        return [str(message.get("content", "")) for message in prompt.messages]
    return [prompt.turns[0] if prompt.turns else prompt.text or ""]


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _has_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _stated_context(config: Mapping[str, Any]) -> int | None:
    """Return the context length that a config states; None: it leaves that to transformers' defaults."""
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if type(limit) is not int or not isinstance(rope, Mapping):
        return None
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    defaults = {"original_max_position_embeddings": config.get("original_max_position_embeddings") or limit}
    rope_parameters = {i: {"rope_type": part.get("type"), **defaults, **part} for i, part in enumerate(parts)}
    try:
        return context_limit(SimpleNamespace(max_position_embeddings=limit, rope_parameters=rope_parameters))
    except (TypeError, ValueError):
        return None
