"""Reads folders of saved models, and checks that they are complete and supported.

Nothing here needs torch before tensors are read.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput, ModelNotFound, SwiftoptError, UnsupportedModel, first_line
from .config_bounds import check_together, check_values
from .families import FAMILIES, family_of
from .mtp_names import Mtp
from .schemes import Scheme, scheme_in
from .text_parts import HEAD, MULTIMODAL, text_config, text_name, text_values

OnStep = Callable[[str], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
# Name endings of stored tensors that may be ignored: attention masks and rotary tables written by older versions of
# transformers, and scales of an 8-bit KV cache (swiftopt keeps keys and values in the model's dtype).
LEFTOVERS = (
    *("attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias"),
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *("._extra_state", ".k_scale", ".v_scale", ".kv_scale"),
)
ADAPTER = "adapter_config.json"
# Files that change what a model computes and that swiftopt cannot load: a folder with one of them is refused.
UNREAD_FILES = {
    "value_head.safetensors": ("the head of a reward model", "use a model that writes text"),
    "value_head.bin": ("the head of a reward model", "use a model that writes text"),
    "modules.json": ("the layers of an embedding model", "use a model that writes text"),
}
CAUSAL_KINDS = ("forcausallm", "lmheadmodel", "model", "textmodel")  # Endings of class names, in lower case.
# Files that may describe the quantisation when config.json does not.
QUANTISED_BY = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
MAGIC = b"GGUF"  # The first bytes of a GGUF file.
GGUF_WEIGHTS = "model.gguf"  # Name of the link to the GGUF file in the folder of its extracted settings.
REPORT_S = 1.0  # Shortest time between two progress reports while weights are read.
_LOUD = ("transformers", "huggingface_hub", "accelerate")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of the libraries that load models, and restore them."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    bars: Any = transformers_logging
    # Make transformers set up its logger now: done later, this would reset the level set here.
    bars.get_verbosity()
    levels = {name: logging.getLogger(name).level for name in _LOUD}
    had_bars, had_hub_bars = bars.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bars.disable_progress_bar()
            for name in _LOUD:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            if had_bars:
                bars.enable_progress_bar()
            if had_hub_bars:
                enable_progress_bars()


@contextmanager
def reporting_progress(step: OnStep, doing: str) -> Iterator[None]:
    """Call `step` with "`doing`, 40 % of the weights" about every second while transformers loads a model."""
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]  # tqdm has no type hints.
        monitor_interval = 0  # Start no monitor thread, which would redraw stalled bars.

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Report the share instead of drawing it; tqdm clears a bar with an empty `msg`."""
            if self.total and msg is None:
                step(f"{doing}, {100 * self.n // self.total} % of the weights")

    def bar(_factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ours = {"disable": False, "leave": False, "file": io.StringIO(), "miniters": 1, "mininterval": REPORT_S}
        return Bar(*args, **options | ours | {"delay": REPORT_S})

    before = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


class ReadShare:
    """Calls `step` with "`doing`, 40 % of the weights" about every second; the share is that of bytes read."""

    def __init__(self, step: OnStep, doing: str) -> None:
        self._step, self._doing = step, doing
        self._n_all, self._n_read, self._reported = 1, 0, 0.0

    def begin(self, n_bytes: int) -> None:
        """Begin to read; `n_bytes` are all bytes to read."""
        self._n_all, self._reported = max(1, n_bytes), time.monotonic()

    def add(self, n_bytes: int) -> None:
        """Count bytes that were read."""
        self._n_read = min(self._n_all, self._n_read + n_bytes)
        if time.monotonic() - self._reported > REPORT_S:
            self._reported = time.monotonic()
            self._step(f"{self._doing}, {100 * self._n_read // self._n_all} % of the weights")


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """How a model's weights are held in memory.

    coded: weights that are stored as codes may stay codes for our kernels on a CPU. for_device: they may stay codes for
    our kernels on a CUDA device. maps_rows: an embedding by layer stays in its file (`mapped_rows`).
    """

    coded: bool = True
    for_device: bool = False
    maps_rows: bool = False


def linked_gguf(folder: Path) -> Path:
    """Return the GGUF file that a `gguf_settings_folder` links to, under the name by which it was opened.

    Only one link is followed: the file may itself be a link to a blob in another folder, without its other parts.
    """
    link = folder / GGUF_WEIGHTS
    return Path(os.readlink(link)) if link.is_symlink() else link


def refuse_other_file(gguf: Path) -> None:
    """Raises: ModelNotFound: the file does not begin as a GGUF file, or cannot be read."""
    try:
        with gguf.open("rb") as file:
            is_gguf = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelNotFound(f"{gguf} cannot be read ({error.strerror}): check its permissions") from error
    if not is_gguf:
        raise ModelNotFound(f"{gguf} is no GGUF file: give a file that llama.cpp reads, or a model's folder")


def refuse_existing(out: Path) -> None:
    """Raises: InvalidInput: something is where a folder is to be written."""
    if os.path.lexists(out):
        raise InvalidInput(f"{out} exists already: name a new folder with --out, or remove it first")


def is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    files = weight_files(folder)
    return bool(files) and all(path.is_file() for path in files)


def refuse_incomplete(folder: Path) -> None:
    """Raises: ModelNotFound: the folder lacks weights; an index that cannot be read counts as none."""
    files = weight_files(folder)
    if not files:
        raise ModelNotFound(f"{folder} holds no weights: copy or download its model.safetensors as well")
    missing = next((path.name for path in files if not path.is_file()), None)
    if missing is not None:
        raise ModelNotFound(f"{folder} lacks {missing}, which its index names: copy or download it as well")


def weight_files(folder: Path, of_mtp: bool = False) -> list[Path]:
    """Return the files of a saved model's weights, in transformers' order of preference; [] if there are none.

    Files that an index names are listed even if they do not exist. Files without tensors of the loaded part are left
    out.

    Args: of_mtp: as in `naming`.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            named = naming(folder, of_mtp)
            try:
                shards: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return [folder / file for file in sorted({file for name, file in shards.items() if named(name)})]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelNotFound(f"{index} is no index of weights: copy the model's folder again") from error
    return sorted(folder.glob("*.gguf"))


def is_multimodal(folder: Path) -> bool:
    """Tell whether a folder holds a multimodal checkpoint, of which the text part is loaded."""
    try:
        return config_values(folder).get("model_type") in MULTIMODAL
    except (ModelNotFound, TypeError):
        return False


def naming(folder: Path, of_mtp: bool = False) -> Callable[[str], str | None]:
    """Return the function from a stored tensor's name to its name in the loaded model; None: it is not loaded.

    Args: of_mtp: name the tensors of the multi-token-prediction layer, which is loaded as a separate model.
    """
    own_name = text_name if is_multimodal(folder) else str
    mtp, n_layers = _mtp_in(folder)

    def name(stored: str) -> str | None:
        part_name = own_name(stored)
        of_layer = None if mtp is None or part_name is None else mtp.name_of(part_name, n_layers)
        if of_mtp:
            return of_layer or None
        return part_name if of_layer is None else None

    return name


def _mtp_in(folder: Path) -> tuple[Mtp | None, int]:
    """Return how a multi-token-prediction layer of this type of model is stored, and the number of other layers."""
    try:
        outer, values = model_values(folder)
        family = MULTIMODAL[outer][values["model_type"]] if outer in MULTIMODAL else outer
        return FAMILIES[family].mtp, int(values["num_hidden_layers"])
    except (SwiftoptError, KeyError, TypeError, ValueError):  # Loading the model will report the error.
        return None, 0


def check_files(names: Collection[str], where: object) -> None:
    """Check the names of the files in a model's folder or repository, before any is read.

    Raises: UnsupportedModel: one of `UNREAD_FILES` is there. ModelNotFound: there is no tokenizer.
    """
    refuse_unread_files(names, where)
    if not any(name in names for name in TOKENIZER_FILES):
        raise ModelNotFound(
            f"{where} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): copy the tokenizer's files from the"
            " model that this one was made of"
        )


def check_listed(files: list[str], where: str) -> None:
    """Raises: ModelNotFound, UnsupportedModel: a repository holds no model, or more than one."""
    if ADAPTER in files:
        raise UnsupportedModel(
            f"{where} holds an adapter ({ADAPTER}): download it by `hf download` with --local-dir, and name that folder"
        )
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if "config.json" not in files and ggufs:
        raise ModelNotFound(f"{where} holds GGUF files: download one, such as {ggufs[0]}, and name that file")
    if "config.json" not in files:
        raise ModelNotFound(f"{where} holds no config.json: name the repository of a model")
    check_files(files, where)


def needed_files(files: list[str]) -> list[str]:
    """Return the files of a repository that transformers reads: settings, tokenizer and one form of the weights."""
    small = [name for name in files if "/" not in name and name.endswith((".json", ".jinja", ".txt", ".model"))]
    for single in ("model.safetensors", "pytorch_model.bin"):
        if single in files:
            return [*small, single]
        stem, suffix = single.split(".")
        shards = [name for name in files if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", name)]
        if shards:
            return [*small, *shards]
    return small


def refuse_unread_files(names: Collection[str], where: object) -> None:
    """Raises: UnsupportedModel: one of `UNREAD_FILES` is there."""
    for name, (what, advice) in UNREAD_FILES.items():
        if name in names:
            raise UnsupportedModel(f"{where} holds {what} ({name}), which would be left out: {advice}")


def files_of(folder: Path) -> frozenset[str]:
    return frozenset(os.listdir(folder))


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _no_config(path: Path, error: Exception) -> ModelNotFound:
    # transformers chains exceptions: the cause is the one that names the value.
    reason = first_line(error.__cause__ or error)
    return ModelNotFound(f"{path} is no model's config ({reason}): copy the folder again")


def config_values(folder: Path) -> dict[str, Any]:
    """Read the values in the folder's config.json, without transformers and its defaults.

    Raises: ModelNotFound: it cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise _no_config(path, error) from error
    return config


def model_values(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return a supported model's type, and the values of its config for the loaded part.

    The type is that of the whole model; `model_type` among the values is that of the loaded part.

    Raises: ModelNotFound: the config cannot be read, or has an invalid value. UnsupportedModel: the type is not
        supported.
    """
    return _part_values(config_values(folder), folder / "config.json")


def _part_values(values: dict[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Return `model_values` of a config's values. Args: path: the config's, for messages."""
    outer = values.get("model_type")
    if isinstance(outer, str) and outer in MULTIMODAL:
        values = text_values(values, path)
        family: Any = MULTIMODAL[outer][values["model_type"]]
    else:
        family = outer
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(
            f"{path} has the model type {family!r}, which is not supported: use one of those that `swiftopt models"
            " --types` lists"
        )
    check_values(values, path)
    return str(outer), values


def supported_type(folder: Path) -> tuple[str, Scheme | None]:
    """Return a model's family and quantisation (None: not quantised) from its config, without transformers.

    Raises: as `model_values`. UnsupportedModel: the quantisation is not supported, or the folder has more than a causal
        language model.
    """
    outer, values, scheme = _supported_values(folder)
    return MULTIMODAL[outer][values["model_type"]] if outer in MULTIMODAL else outer, scheme


def _supported_values(folder: Path) -> tuple[str, dict[str, Any], Scheme | None]:
    """Return `model_values` of a folder, and its quantisation. Raises: as `supported_type`."""
    path, whole = folder / "config.json", config_values(folder)
    outer, values = _part_values(whole, path)
    refuse_architectures(whole.get("architectures"), outer, path)
    refuse_unread_files(files_of(folder), folder)
    scheme = scheme_in(values, path)
    for name in QUANTISED_BY if scheme is None else ():
        if (folder / name).is_file():
            raise UnsupportedModel(
                f"{folder} says in {name} how its weights are quantised, and config.json does not: write that there as"
                " quantization_config, with its quant_method"
            )
    if scheme is not None and scheme.kind is not None and outer in MULTIMODAL:
        raise UnsupportedModel(
            f"{folder} is a multimodal checkpoint that is quantised ({scheme.words}), and its library reads no text"
            " part alone: use the model as it was before"
        )
    return outer, values, scheme


def refuse_architectures(named: Any, model_type: str, path: Path) -> None:
    """Raises: UnsupportedModel: a config names a class that is no language model of its type."""
    is_whole = model_type in MULTIMODAL
    stems = {model_type.removesuffix("_text").replace("_", ""), *(() if is_whole else FAMILIES[model_type].classes)}
    # Checkpoints with a tied LM head may name the base model's class (model, textmodel) instead of the causal LM's.
    kinds = ("forconditionalgeneration", "model") if is_whole else CAUSAL_KINDS
    known_names = {f"{stem}{kind}" for stem in stems for kind in kinds}
    for name in named if isinstance(named, list) else ():
        if str(name).replace("_", "").lower() not in known_names:
            raise UnsupportedModel(
                f"{path} names the architecture {name}, which is no causal language model of type {model_type}: use a"
                " model that writes text"
            )


def supported_config(folder: Path) -> Any:
    """Return transformers' config of the loaded part of a folder's model.

    Raises: as `supported_type`.
    """
    from .transformers_models import import_models, list_language_model

    import_models()
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    path, (outer, values, _) = folder / "config.json", _supported_values(folder)
    if outer not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{path} has the model type {outer!r}, which transformers {__version__} does not have: pip install"
            " --upgrade transformers"
        )
    try:
        if outer in MULTIMODAL:
            config = text_config(values, outer)
            config.tie_word_embeddings &= not _has_head(folder)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except SwiftoptError:
        raise
    except Exception as error:  # Config classes raise various exceptions for invalid values.
        raise _no_config(path, error) from error
    list_language_model(config.model_type)
    family_of(config)
    check_together(config, path)
    return config


def _has_head(folder: Path) -> bool:
    """Tell whether one of a folder's existing files has a head that is not tied to the embedding."""
    from safetensors import SafetensorError, safe_open

    named = naming(folder)
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors" and path.is_file()]
    try:
        headers: list[Any] = [safe_open(path, "np") for path in files]
        return any(named(stored) == HEAD for header in headers for stored in header.keys())  # noqa: SIM118
    except (OSError, SafetensorError):  # Reading the tensors will report the error.
        return False


def refuse_mismatched(mismatched: Iterable[tuple[str, Any, Any]], where: Path, source: str) -> None:
    """Raises: ModelNotFound: a weight (its name, stored shape and expected shape) is among `mismatched`."""
    for name, stored, expected in sorted(mismatched):
        raise ModelNotFound(
            f"{name} in {where} has the shape {list(stored)}, and a model of {source} has {list(expected)} there:"
            " copy or download it again"
        )


def refuse_missing(missing: Any, where: Path) -> None:
    """Raises: ModelNotFound: weights are missing; transformers would fill them with random numbers."""
    if missing:
        first = sorted(missing)[0]
        raise ModelNotFound(f"{where} lacks {len(missing)} weights, such as {first}: download or copy it again")


def refuse_unread(names: Iterable[str], where: Path) -> None:
    """Raises: ModelNotFound: a model of the config has no place for some of these weights.

    transformers would ignore such weights, and then compute something else.
    """
    unread = sorted(name for name in names if not name.endswith(LEFTOVERS))
    if unread:
        raise ModelNotFound(
            f"{where} has {len(unread)} weights for which a model of its config.json has no place, such as"
            f" {unread[0]}: copy or download the config again, or use a model without them"
        )


def no_step(words: str) -> None:
    """Ignore a step."""
