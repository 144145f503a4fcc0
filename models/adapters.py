"""Reads and checks the configs of LoRA adapters (arXiv:2106.09685), as peft saves them; without torch.

An adapter is a folder with `adapter_config.json` and the adapter's tensors. It is loaded like a model:
`models/merging.py` adds it to the weights of its base. Adapters that cannot be merged exactly are refused here.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, SwiftoptError, UnsupportedModel, first_line
from .saved import ADAPTER, TOKENIZER_FILES, files_of, refuse_unread_files, supported_type

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # peft's order of preference.
BASE = "base_model_name_or_path"
# Fields of peft's LoraConfig that decide what is merged; `Adapter` has them.
_READ = frozenset(
    {
        *("peft_type", BASE, "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    }
)
# Fields that do not change the weights of a merged model: they concern training, or the libraries that train.
# `fan_in_fan_out` is ignored because the base tells whether weights are (inputs, outputs); peft corrects it, too.
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "inference_mode", "auto_mapping", "peft_version", "lora_dropout", "fan_in_fan_out"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
        *("runtime_config", "base_model_class", "parent_library"),
    }
)
# Initialisations that leave the base's weights unchanged. Others subtract the initial adapter from them.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Fields that cannot be merged: what the adapter does if they are set, as a part of the error message.
_REFUSED = {
    "layer_replication": "repeats layers of its base",
    "trainable_token_indices": "trains single tokens of the embedding",
    "target_parameters": "adapts parameters that are no linear map of their own",
    "lora_bias": "has biases within its maps",
    "alora_invocation_tokens": "is switched on by tokens of the prompt",
    "use_qalora": "is for quantised weights",
    "megatron_config": "is for Megatron's layers",
    "ensure_weight_tying": "ties the embedding to the head",
}
_HOW = "ask its author for a plain LoRA adapter, or merge it by peft's merge_and_unload and name the folder saved then"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its folder, its base, and the fields of `adapter_config.json` under peft's names.

    Names of modules are those in the causal-LM model. If `target_modules` is a string, it is "all-linear" or a regular
    expression.
    """

    folder: Path
    base: str
    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...]
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        return self.folder / ADAPTER

    @property
    def weights(self) -> Path:
        return next((path for name in WEIGHTS if (path := self.folder / name).is_file()), self.folder / WEIGHTS[0])

    def has_tokenizer(self) -> bool:
        """Whether the folder has its own tokenizer; a tokenizer_config.json alone does not count."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES if name != "tokenizer_config.json")

    def tokenizer_folder(self, base: Path) -> Path:
        return self.folder if self.has_tokenizer() else base

    def saves(self, module: str) -> bool:
        """Whether the adapter replaces the weights of a module, or of a module that contains it."""
        parts = module.split(".")
        around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        return any(name.endswith(self.modules_to_save) for name in around)

    def targets(self, module: str) -> bool:
        """Whether the adapter adds to a linear map or embedding; for "all-linear", the caller selects the modules."""
        saved = (rf"(.*\.)?{re.escape(name)}(\..*)?" for name in self.modules_to_save)
        if any(re.fullmatch(name, module) for name in saved) or _names(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or _names(self.target_modules, module)
        return _names(self.target_modules, module) and (
            module in self.target_modules or not self.layers_to_transform or self._layer(module)
        )

    def _layer(self, module: str) -> bool:
        """Whether the module's layer is one of `layers_to_transform`."""
        patterns = self.layers_pattern or (r"[^.]*",)
        match = next((m for pattern in patterns if (m := re.match(rf".*\.{pattern}\.(\d+)\.", module))), None)
        return match is not None and int(match[1]) in self.layers_to_transform

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor of the product of a module's two matrices."""
        rank, alpha = self.rank(module), float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def is_adapter(folder: str | Path) -> bool:
    return os.path.isfile(os.path.join(folder, ADAPTER))


def adapter_values(folder: Path) -> dict[str, Any]:
    """Return the values of the folder's adapter_config.json.

    Raises: ModelNotFound: it cannot be read.
    """
    path = folder / ADAPTER
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is no adapter's config ({first_line(error)}): copy the folder again") from error
    return values


def base_name(folder: Path) -> str:
    """Return the name of the base in the folder's adapter_config.json.

    Raises: ModelNotFound: it cannot be read, or names none.
    """
    base = adapter_values(folder).get(BASE)
    if not isinstance(base, str) or not base.strip() or "\0" in base:
        raise ModelNotFound(
            f"{folder / ADAPTER} has the {BASE} {base!r}: write there the folder or hub id of the model that the"
            " adapter was trained on"
        )
    return base


def read_adapter(folder: Path, base: str) -> Adapter:
    """Read and check an adapter's config, and check that the folder has its tensors.

    Args:   base: name of the base, for messages.
    Raises: ModelNotFound: the folder is damaged. UnsupportedModel: the adapter cannot be merged exactly.
    """
    values, path = adapter_values(folder), folder / ADAPTER
    kind = values.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{path} has the peft_type {kind!r}, and only LORA can be merged here: {_HOW}")
    for name, words in _REFUSED.items():
        if not _is_unset(values.get(name)):
            raise UnsupportedModel(f"{path} sets {name}, by which the adapter {words}, and that is not merged: {_HOW}")
    if values.get("init_lora_weights") not in _PLAIN_STARTS:
        raise UnsupportedModel(
            f"{path} has init_lora_weights {values['init_lora_weights']!r}, which changed the base's weights before"
            " training: save the adapter again by peft with path_initial_model_for_weight_conversion"
        )
    if values.get("revision") not in (None, "", "main"):
        raise UnsupportedModel(
            f"{path} is for the revision {values['revision']!r} of its base: download that and write its folder there"
            f" as {BASE}, with the revision null"
        )
    field_names = _READ | _WITHOUT_EFFECT | {"init_lora_weights", "revision"}
    unknown = sorted(name for name, value in values.items() if name not in field_names and not _is_unset(value))
    if unknown:
        raise UnsupportedModel(
            f"{path} has the field {unknown[0]}, which is not known here and may change what is computed: set it to"
            " null there if it does not"
        )
    adapter = Adapter(folder=folder, base=base, **{name: _checked(name, values, path) for name in _CHECKS})
    refuse_unread_files(files_of(folder), folder)
    if not adapter.weights.is_file():
        raise ModelNotFound(f"{folder} lacks its adapter's tensors ({' or '.join(WEIGHTS)}): copy them as well")
    return adapter


def check_base(adapter: Adapter, folder: Path) -> None:
    """Refuse a quantised base, because nothing can be added to its codes.

    Raises: UnsupportedModel: it is quantised. ModelNotFound, UnsupportedModel: as `supported_type`.
    """
    scheme = supported_type(folder)[1]
    if scheme is not None:
        raise quantised_base(adapter.folder, adapter.base, scheme.words)


def quantised_base(folder: Path, base: str, words: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the base {base} of the adapter {folder} is quantised ({words}), and codes cannot take what an adapter adds:"
        f" write the unquantised model into {ADAPTER} as {BASE}"
    )


@contextmanager
def reading_adapter(adapter: Adapter) -> Iterator[None]:
    """Turn any exception while the adapter's tensors are read into a `ModelNotFound` that names their file."""
    try:
        yield
    except SwiftoptError:
        raise
    except Exception as error:  # Torch and safetensors raise exceptions of many types.
        raise ModelNotFound(
            f"the adapter's tensors {adapter.weights} cannot be read ({first_line(error)}): copy them again"
        ) from error


def _is_unset(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


def _names(patterns: str | Iterable[str], module: str) -> bool:
    """Whether a module matches a regular expression, or ends with one of several names."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


# --- checks of field values


def _text_or_texts(value: Any) -> Any:
    if isinstance(value, str):
        re.compile(value)
        return value
    return _texts(value)


def _texts(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or ()
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) and name for name in listed):
        raise ValueError("it must be a list of names")
    return tuple(listed)


def _patterns(value: Any) -> tuple[str, ...]:
    texts = _texts(value)
    for text in texts:
        re.compile(text)
    return texts


def _layers(value: Any) -> tuple[int, ...]:
    listed = [value] if isinstance(value, int) else value or []
    if not isinstance(listed, list) or not all(type(layer) is int and layer >= 0 for layer in listed):
        raise ValueError("it must be a layer's number or a list of them")
    return tuple(listed)


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("it must be a whole number from 1 up")
    return value


def _alpha(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("it must be a number")
    return float(value)


def _flag(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return bool(value)


def _bias(value: Any) -> str:
    if value not in ("none", "all", "lora_only"):
        raise ValueError("it must be none, all or lora_only")
    return str(value)


def _by_name(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("it must be an object with a number per pattern")
        for key in value:
            re.compile(key)
        return {key: check(number) for key, number in value.items()}

    return checked


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "r": _rank,
    "lora_alpha": _alpha,
    "target_modules": _text_or_texts,
    "rank_pattern": _by_name(_rank),
    "alpha_pattern": _by_name(_alpha),
    "use_rslora": _flag,
    "use_dora": _flag,
    "bias": _bias,
    "exclude_modules": _text_or_texts,
    "layers_to_transform": _layers,
    "layers_pattern": _patterns,
    "modules_to_save": _texts,
}
# peft's defaults for fields that its older versions did not write.
_DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}


def _checked(name: str, values: Mapping[str, Any], path: Path) -> Any:
    value = _DEFAULTS.get(name) if values.get(name) is None else values[name]
    try:
        return _CHECKS[name](value)
    except (ValueError, TypeError, re.error) as error:
        raise ModelNotFound(f"{path} has {name} {value!r:.100} ({first_line(error)}): copy the folder again") from error
