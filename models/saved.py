"""Folders of saved models: whether one is complete and supported, reading it in silence, and the cache for them.

A GGUF file becomes such a folder: converted once, kept in the user's cache. Codes of Q8_0 and Q4_0 stay as they are,
all else becomes bfloat16.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, OutputError, SwiftoptError, UnsupportedModel
from .families import FAMILIES, family_of
from .schemes import Scheme, scheme_in

OnStep = Callable[[str], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
STALE_S = 24 * 3600  # age from which what a process left unfinished in the cache is removed
PART = ".part"  # of a file's name, while it is being written
TOLD_S = 1.0  # between two reports of how much of the weights is read
CONVERSION = "2"  # part of every converted folder's name; raise it when the conversion changes
N_SAMPLES = 9  # places of a GGUF file that its key covers
SAMPLE_BYTES = 1 << 20  # at each of them
_LOUD = ("transformers", "huggingface_hub", "accelerate")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of the libraries that load models, and restore them."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging
    bars.get_verbosity()  # sets its logger up, which later would undo our level
    levels = {name: logging.getLogger(name).level for name in _LOUD}
    had_bars, had_hub_bars = bars.is_progress_bar_enabled(), not are_progress_bars_disabled()
    reader: Any = modeling_gguf_pytorch_utils  # its bar has no switch of its own
    bar = reader.tqdm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bars.disable_progress_bar()
            reader.tqdm = partial(bar, disable=True)
            for name in _LOUD:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            reader.tqdm = bar
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            if had_bars:
                bars.enable_progress_bar()
            if had_hub_bars:
                enable_progress_bars()


@contextmanager
def telling(step: OnStep, doing: str) -> Iterator[None]:
    """Tell `step` "`doing`, 40 % of the weights" about every second while transformers loads a model."""
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]  # untyped
        monitor_interval = 0  # no thread that redraws a bar which stands still

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Tell the share instead of drawing it; tqdm clears a bar with an empty `msg`."""
            if self.total and msg is None:
                step(f"{doing}, {100 * self.n // self.total} % of the weights")

    def bar(_factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ours = {"disable": False, "leave": False, "file": io.StringIO(), "miniters": 1, "mininterval": TOLD_S}
        return Bar(*args, **options | ours | {"delay": TOLD_S})

    before = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def cache_root() -> Path:
    """Return SWIFTOPT_CACHE_DIR, or the user's cache folder of this system."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("SWIFTOPT_CACHE_DIR") or user_cache_dir("swiftopt", appauthor=False)).expanduser()


def remove_stale(leftovers: Iterable[Path]) -> None:
    """Remove those files and folders that processes left long ago when they died while writing to the cache."""
    for left in leftovers:
        with suppress(OSError):  # another process has just finished, or removed, it
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield the path of a new file beside `path`, which takes its name once the block has ended without an error.

    What processes left beside it when they died while writing is removed. `mode`: another user may share the cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent.glob(f"*{PART}"))
    handle, name = tempfile.mkstemp(suffix=PART, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_complete(folder: Path) -> bool:
    """Tell whether config and all weights are there."""
    if not (folder / "config.json").is_file():
        return False
    files = weight_files(folder)
    return bool(files) and all(path.is_file() for path in files)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a saved model's weights, in the order of preference of transformers; empty if there are none.

    Files that an index names are listed whether they exist or not.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            try:
                shards: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ModelNotFound(f"{index} is no index of weights: copy the model's folder again") from error
            return [folder / name for name in sorted(set(shards.values()))]
    return []


class StoredTensors:
    """The tensors of a folder's safetensors files, read one at a time; to be used as a context manager.

    Raises: ModelNotFound: on entering, where the folder holds no such files, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> StoredTensors:
        from safetensors import SafetensorError, safe_open

        paths = weight_files(self._folder)
        if not paths or any(path.suffix != ".safetensors" for path in paths):
            raise ModelNotFound(f"{self._folder} holds no safetensors files: save the model again with transformers")
        try:
            for path in paths:
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            self._open.close()
            raise ModelNotFound(f"{self._folder} cannot be read ({first_line(error)}): copy it again") from error
        return self

    def __exit__(self, *failure: object) -> None:
        self._open.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, in the files' order."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str) -> Any:
        """Return one tensor as it is stored, on the CPU."""
        return self._files[name].get_tensor(name)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether some tokenizer was saved with the model."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def supported_type(folder: Path) -> tuple[str, Scheme | None]:
    """Read model type and quantisation, None where there is none, from the folder's config, without transformers.

    Raises: ModelNotFound: it cannot be read. UnsupportedModel: swiftopt cannot skip in that architecture, or cannot
        read weights that are quantised in that way.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is no model's config ({first_line(error)}): copy the folder again") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{path} is no model's config (it holds no JSON object): copy the folder again")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{path} has the model type {model_type!r}, which is not supported: use {', '.join(sorted(FAMILIES))}"
        )
    return str(model_type), scheme_in(config, path)


def supported_config(folder: Path) -> Any:
    """Read the folder's config.

    Raises: as `supported_type`.
    """
    from transformers import AutoConfig

    supported_type(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # config classes check their values, each with errors of its own
        path = folder / "config.json"
        raise ModelNotFound(f"{path} is no model's config ({first_line(error)}): copy the folder again") from error
    family_of(config)
    return config


def refuse_missing(missing: Any, where: Path) -> None:
    """Raises: ModelNotFound: weights are missing; transformers would fill them with random numbers."""
    if missing:
        first = sorted(missing)[0]
        raise ModelNotFound(f"{where} lacks {len(missing)} weights, such as {first}: download or copy it again")


def first_line(error: BaseException) -> str:
    """Return what an error of another library says, cut to fit into a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without its number and its paths
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".:")[:160]


def no_step(words: str) -> None:
    """Report a step to nobody."""


def converted(gguf: Path, on_step: OnStep) -> Path:
    """Return the folder of the file's weights and tokenizer, converting them where that was not yet done.

    It appears under its name only when it is complete, so that processes may convert at the same time.

    Raises: ModelNotFound: no readable GGUF file. UnsupportedModel: its architecture, or rotary scaling that would be
        lost. OutputError: the cache cannot be written.
    """
    folder = cache_root() / "gguf" / _key(gguf)
    if is_complete(folder):
        return folder
    on_step(f"converting {gguf.name}, only once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent.glob(".*"))
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
        ) as unfinished:
            with _parsed_once():
                _check(gguf)
                model, tokenizer, coded = _read(gguf)
            on_step("writing the converted model to the cache")
            model.save_pretrained(unfinished, state_dict=None if coded is None else coded[0])
            if coded is not None:
                path = Path(unfinished) / "config.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), **coded[1]}, indent=2) + "\n")
            tokenizer.save_pretrained(unfinished)
            _publish(unfinished, folder)
    except SwiftoptError:
        raise
    except Exception as error:  # safetensors wraps a full disk in an error of its own
        raise OutputError(
            f"the cache {folder.parent} cannot be written ({first_line(error)}): make room there or set"
            " SWIFTOPT_CACHE_DIR"
        ) from error
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


def _read(gguf: Path) -> tuple[Any, Any, tuple[dict[str, Any], dict[str, Any]] | None]:
    """Read the model, in bfloat16, its tokenizer, and `coded_checkpoint`'s part; tied weights stay tied."""
    import gguf as gguf_library
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .gguf_codes import coded_checkpoint

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
    coded = coded_checkpoint(gguf_library.GGUFReader(str(gguf)), model)
    if coded is not None:
        state = {name: v.to(torch.bfloat16) if v.dtype == torch.float32 else v for name, v in coded[0].items()}
        coded = state, coded[1]
    return _plain(model.to(torch.bfloat16)), tokenizer, coded


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
        library.GGUFReader = cache(reader)
        yield
    finally:
        library.GGUFReader = reader


def _publish(unfinished: str, folder: Path) -> None:
    try:
        os.replace(unfinished, folder)
    except OSError:
        if is_complete(folder):  # another process was faster, with the same result
            return
        shutil.rmtree(folder, ignore_errors=True)  # remains that somebody has tampered with
        os.replace(unfinished, folder)
