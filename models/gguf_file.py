"""A GGUF file as a saved folder in bfloat16: converted once, kept in the user's cache."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, OutputError, UnsupportedModel
from .families import FAMILIES, family_of
from .saved import OnStep, cache_root, first_line, is_complete, refuse_missing, remove_stale

CONVERSION = "1"  # part of every cached folder's name; raise it when the conversion changes
N_SAMPLES = 9  # places of a file that its key covers
SAMPLE_BYTES = 1 << 20  # at each of them


def converted(gguf: Path, on_step: OnStep) -> Path:
    """Return the folder of the file's weights and tokenizer, converting them where that was not yet done.

    It appears under its name only when it is complete, so that processes may convert at the same time.

    Raises: ModelNotFound: no readable GGUF file. UnsupportedModel: its architecture, or rotary scaling that would be
        lost. OutputError: the cache cannot be written.
    """
    folder = cache_root() / "gguf" / _key(gguf)
    if is_complete(folder):
        return folder
    on_step(f"converting {gguf.name} to bfloat16, only once")
    unfinished = _unfinished_folder(folder)
    try:
        with _parsed_once():
            _check(gguf)
            model, tokenizer = _read(gguf)
        on_step("writing the converted model to the cache")
        try:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            _publish(unfinished, folder)
        except Exception as error:  # safetensors wraps a full disk in an error of its own
            raise OutputError(_cache_sentence(folder.parent, error)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _key(gguf: Path) -> str:
    """Name a conversion by the file's name, its size and samples over its whole length."""
    try:
        size = gguf.stat().st_size
        digest = hashlib.sha256(f"{CONVERSION} {gguf.name} {size}".encode())
        with gguf.open("rb") as file:
            for i in range(N_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (N_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelNotFound(f"{gguf} cannot be read ({error.strerror}): check its permissions") from error
    return f"{re.sub(r'[^a-z0-9.]+', '-', gguf.stem.lower())[:60]}-{digest.hexdigest()[:16]}"


def _check(gguf: Path) -> None:
    """Refuse files that transformers would fail on with a traceback, or read wrongly in silence."""
    import gguf as gguf_library

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFound(f"{gguf} is no GGUF file: give a file that llama.cpp reads, or a model's folder")
    try:
        reader = gguf_library.GGUFReader(str(gguf))
        scaling = [field.contents() for key, field in reader.fields.items() if key.endswith(".rope.scaling.type")]
        factors = [tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    except Exception as error:  # the reader has no error of its own: a damaged file can raise almost anything
        raise ModelNotFound(f"{gguf} is damaged or cut short ({first_line(error)}): download it again") from error
    if any(kind not in ("none", "") for kind in scaling) or any(bool((values != 1).any()) for values in factors):
        raise UnsupportedModel(
            f"{gguf} scales its rotary positions, which transformers drops when it reads GGUF: use the model's hub id"
        )


def _read(gguf: Path) -> tuple[Any, Any]:
    """Read the model, in bfloat16, and its tokenizer; tied weights stay tied."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**where)
        family_of(config)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model, found = auto.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
    except UnsupportedModel:
        raise
    except Exception as error:  # as in _check
        if "is not supported" in str(error):
            known = ", ".join(sorted(FAMILIES))
            raise UnsupportedModel(f"{gguf} is of an architecture that is not supported: use one of {known}") from error
        raise ModelNotFound(f"{gguf} cannot be converted ({first_line(error)}): download it again") from error
    refuse_missing(found["missing_keys"], gguf)
    return _plain(model.to(torch.bfloat16)), tokenizer


def _plain(model: Any) -> Any:
    """Return the same weights in a model without GGUF settings: transformers refuses to save the one it read."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = auto.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers, which parses the file anew for config, tokenizer and weights, get one reader for all."""
    import gguf as gguf_library

    library: Any = gguf_library
    reader = library.GGUFReader
    try:
        library.GGUFReader = functools.cache(reader)
        yield
    finally:
        library.GGUFReader = reader


def _unfinished_folder(folder: Path) -> Path:
    """Make a new folder beside the final one."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent.glob(".*"))
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise OutputError(_cache_sentence(folder.parent, error)) from error


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        os.replace(unfinished, folder)
    except OSError:
        if is_complete(folder):  # another process was faster, with the same result
            return
        shutil.rmtree(folder, ignore_errors=True)  # remains that somebody has tampered with
        os.replace(unfinished, folder)


def _cache_sentence(folder: Path, error: Exception) -> str:
    return f"the cache {folder} cannot be written ({first_line(error)}): make room there or set SWIFTOPT_CACHE_DIR"
