"""Quantised copies of a model's sub-layers and head, which drafts run; the target itself is never changed.

Copies are cached on disk by model, format and kind of processor; reading them takes about a second per GB.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..core.errors import SettingsError, first_line
from ..core.layer_sets import KINDS, Kind, LayerSet, PartForm
from ..core.settings import FP8_ON_CPU, group_size
from .blocks import LINEAR, Block, LayerModules, has_experts
from .buffer import free_bytes
from .coded import SCRATCH, CodedLinear, weight_form, weights_at_once
from .copy_files import copy_file, read_copy, write_copy
from .expert_choice import with_fewer
from .huge_pages import PAGES
from .quantised import BITS, QuantisedLinear, cpu_multiplies_fp8, weight_of
from .quantised_checkpoints import is_by_library
from .quantised_experts import ExpertStack, quantised_mixture, replaced, shared_of, stacks_of
from .saved import OnStep, no_step

logger = logging.getLogger(__name__)

FP8_DEVICES = (8, 9)  # Lowest CUDA compute capability with fp8 products: 8.9 (Ada).
# Most bits of a copy per bit of the original. A third of a Q4_K_M file is in 6 bits; a draft with that third in int4
# still reads 0.89 of the bytes, which no acceptance rate pays for, and its copies take 1.3 GB.
MOST_BITS = 0.6
STORED_BITS = 16  # Fewest bits per weight of an unquantised model.

# Form of a real fingerprint from `models.fingerprint`; tests also use made-up ones.
HASH = re.compile(r"v\d+:[0-9a-f]{16}")
PROBED_ROWS = (1, 4)  # Row counts of the passes timed to choose between our kernel and torch's.

Key = tuple[Literal["attn", "mlp", "head"], int, str]  # Part, layer (0 for the head) and format of a copy.
Seconds = Callable[[Callable[[], object]], float]  # A function that times a task on the model's device.


class _Copy(NamedTuple):
    """A layer's modules with the linear maps of one sub-layer quantised, or the quantised head; and these maps."""

    modules: Any
    maps: Sequence[QuantisedLinear] = ()

    @property
    def n_bytes(self) -> int:
        return sum(quantised.n_bytes for quantised in self.maps)


class QuantisedCopies:
    """The quantised copies that drafts of one model have used so far.

    If quantising a sub-layer or head would save too little, or only a library can read its weights, the copy is the
    original itself. Copies are cached on disk if the model has a real fingerprint, a hash of its weights.
    """

    def __init__(self, blocks: Sequence[Block], head: nn.Module, fingerprint: str) -> None:
        self._blocks, self.head_map = blocks, head
        self._fingerprint = fingerprint if HASH.fullmatch(fingerprint) else None
        self.packed: bool | Seconds = False  # Whether copies are laid out for our kernels; see `lay_out`.
        self._faster_packed: dict[str, bool] = {}  # Format -> whether our kernel was faster than torch's.
        self.kept: set[str] = set()  # Formats in use by running requests: their copies are never dropped.
        self._made: dict[Key, _Copy] = {}
        # Layers in which a token takes fewer experts: by layer and format, then by the number of experts.
        self._fewer: dict[tuple[int, str | None], dict[int, LayerModules]] = {}

    @property
    def n_bytes(self) -> int:
        return sum(copy.n_bytes for copy in self._made.values())

    def bytes_of(self, layer_set: LayerSet) -> int:
        """Return the bytes of the copies that a draft with this set runs, as far as they have been made."""
        return sum(self._made[key].n_bytes for key in _wanted(layer_set) if key in self._made)

    def parts(self, kind: Kind, layer: int, form: PartForm) -> LayerModules:
        """Return a layer's modules with one sub-layer in a form; its copy is made at the first call."""
        block = self._blocks[layer]
        parts: LayerModules = block.parts if form.format is None else self._copy((kind, layer, form.format)).modules
        if form.experts is None or block.experts is None:
            return parts
        # Cached, because each pass needs them; `drop` also drops those made from a copy.
        fewer, n_experts = self._fewer.setdefault((layer, form.format), {}), form.experts
        if n_experts not in fewer:
            fewer[n_experts] = replace(parts, mlp=with_fewer(parts.mlp, block.experts, n_experts))
        return fewer[n_experts]

    def head(self, name: str) -> nn.Module:
        return cast(nn.Module, self._copy(("head", 0, name)).modules)

    def lay_out(self, packed: bool | Seconds) -> None:
        """Choose the kernels that copies are laid out for; existing copies in another layout are dropped.

        Args: packed: True: ours. False: torch's. A timer: those that are faster, by format.
        """
        if packed != self.packed:
            self.packed = packed
            self._faster_packed.clear()
            self._made.clear()
            self._fewer.clear()

    def is_packed(self, name: str) -> bool:
        """Tell whether copies in a format are laid out for our kernels; a timer that decides runs at the first call.

        Raises: SettingsError: no kernel here computes in this format.
        """
        if isinstance(self.packed, bool):
            return self.packed
        if name not in self._faster_packed:
            self._check_runs(name, self._blocks[0].device)
            try:
                self._faster_packed[name] = self._is_faster_packed(name, self.packed)
            except Exception as error:  # Our kernel failed, for example to compile: fall back to torch's.
                logger.warning("our kernel for drafts in %s is not used here: %s", name, first_line(error))
                self._faster_packed[name] = False
        return self._faster_packed[name]

    @torch.inference_mode()
    def _is_faster_packed(self, name: str, seconds: Seconds) -> bool:
        """Return whether our kernel is faster than torch's on a layer's largest map."""
        module = max((*self._maps(("mlp", 0, name)), *self._maps(("attn", 0, name))), key=_size)
        weight, spent = weight_of(module), list[float]()
        for packed in (False, True):
            copy = QuantisedLinear([module], name, packed=packed)
            rows = [torch.zeros((n, copy.n_in), dtype=weight.dtype, device=weight.device) for n in PROBED_ROWS]
            spent.append(sum(seconds(partial(copy, rows_probed)) for rows_probed in rows))
        return spent[1] < spent[0]

    def drop(self, name: str) -> None:
        """Free all copies in a format unless it is `kept`; a copy that is used later is read or made again."""
        if name not in self.kept:
            self._made = {key: copy for key, copy in self._made.items() if key[2] != name}
            self._fewer = {key: fewer for key, fewer in self._fewer.items() if key[1] != name}

    @torch.inference_mode()
    def prepare(self, layer_set: LayerSet, on_step: OnStep = no_step) -> None:
        """Read or make all copies that a draft with this set runs, so that none is made while passes are timed."""
        missing: dict[tuple[str, str], list[Key]] = {}
        for key in _wanted(layer_set):
            if key not in self._made:
                missing.setdefault((key[0], key[2]), []).append(key)
        for keys in missing.values():
            self._prepare(keys, on_step)

    def _prepare(self, keys: Sequence[Key], on_step: OnStep) -> None:
        part, _, name = keys[0]
        path, devices = self._file(part, name), {self._device(key) for key in keys}
        # If the model is spread over several devices, read the copy on the CPU and move its parts from there.
        device_read = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        kept = None if path is None else read_copy(path, device_read, self.is_packed(name))
        for device in devices if kept is None else ():
            self._check_room([key for key in keys if self._device(key) == device], device)
        for number, key in enumerate(keys):
            if kept is None and part != "head" and number % 4 == 0 and not self._is_own(key):
                on_step(f"quantising, {part} {number + 1} of {len(keys)} as {name}")
            self._made[key] = self._make(key, _pairs(kept or {}, key, self._device(key)))
        PAGES.add(tensor for key in keys for map_ in self._made[key].maps for tensor in (map_.codes, map_.scales))
        all_keys: list[Key] = [(part, layer, name) for layer in range(1 if part == "head" else len(self._blocks))]
        if path is not None and kept is None and all(key in self._made for key in all_keys):
            maps = {_prefix(key, i): map_ for key in all_keys for i, map_ in enumerate(self._made[key].maps)}
            codes = {f"{prefix}codes": map_.codes for prefix, map_ in maps.items()}
            write_copy(path, codes | {f"{prefix}scales": map_.scales for prefix, map_ in maps.items()})

    def _check_room(self, keys: Sequence[Key], device: torch.device) -> None:
        """Raises: SettingsError: the copies to be made do not fit into the device's memory."""
        name = keys[0][2]
        bits = BITS[name] + 32 / (group_size(name, 128) or 128)  # A group's scale and zero add 32 bits.
        sizes = [_size(module) for key in keys if not self._is_own(key) for module in self._maps(key)]
        scratch = SCRATCH * min(max(sizes, default=0), weights_at_once(device))
        needed = bits / 8 * sum(sizes) + scratch
        free = free_bytes(device)
        if needed > free:
            raise SettingsError(
                f"a draft's {keys[0][0]} weights in {name} need {needed / 1e9:.1f} GB more than the model, but {device}"
                f" has {free / 1e9:.1f} GB free: use --draft-format stored, or a smaller model"
            )

    def _check_runs(self, name: str, device: torch.device) -> None:
        """Raises: SettingsError: no kernel on this device supports the format."""
        if name == "fp8" and device.type == "cpu" and self.packed is True:
            raise SettingsError(FP8_ON_CPU)
        if name == "fp8" and device.type == "cpu" and not cpu_multiplies_fp8():
            version = torch.__version__
            raise SettingsError(f"torch {version} does not multiply fp8 row by row on a CPU: draft in int8 or int4")
        if name == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_DEVICES:
            raise SettingsError(f"{device} does not multiply fp8, as Ada and Hopper do: draft in int8 or int4")

    def _modules(self, key: Key) -> Any:
        return self.head_map if key[0] == "head" else self._blocks[key[1]].parts

    def _is_own(self, key: Key) -> bool:
        """Tell whether the copy is the original part itself, because quantising it would save too little."""
        maps = self._maps(key)
        return not maps or saves_little(maps, key[2])

    def _maps(self, key: Key) -> list[nn.Module]:
        """Return the linear maps of a part that its copy has in fewer bits; [] if there are none."""
        part, layer, _ = key
        modules = self._modules(key)
        if part == "mlp" and modules.mlp is not None and has_experts(modules.mlp):
            # Only our C++ kernels read the codes of experts; for others a copy keeps the mixture as it is.
            named = self._blocks[layer].experts
            stacks = stacks_of(modules.mlp, named) if self.packed is True and named is not None else []
            if not stacks or named is None:
                return []
            _, shared = shared_of(modules.mlp, named)
            return [*stacks, *(() if shared is None else _linears(shared))]
        if part == "head":
            return _linears(modules)
        roots = [modules.mlp] if part == "mlp" else modules.maps()
        return [module for root in roots if root is not None for module in _linears(root)]

    def _copy(self, key: Key) -> _Copy:
        if key not in self._made:
            self._made[key] = self._make(key, iter(()))
        return self._made[key]

    @torch.inference_mode()
    def _make(self, key: Key, kept: Iterator[tuple[Tensor, Tensor]]) -> _Copy:
        part, _, name = key
        self._check_runs(name, self._device(key))
        modules = self._modules(key)
        if self._is_own(key):
            return _Copy(modules)
        maps: list[QuantisedLinear] = []

        def quantised(modules: Sequence[nn.Module]) -> QuantisedLinear:
            maps.append(QuantisedLinear(modules, name, next(kept, None), self.is_packed(name)))
            return maps[-1]

        if part == "head":
            return _Copy(quantised([modules]), maps)
        if part == "attn":
            return _Copy(_with_mixer_maps(modules, quantised), maps)
        if isinstance(self._maps(key)[0], ExpertStack):
            named = self._blocks[key[1]].experts
            assert named is not None
            return _Copy(replace(modules, mlp=quantised_mixture(modules.mlp, named, quantised)), maps)
        return _Copy(replace(modules, mlp=replaced([modules.mlp], quantised)), maps)

    def _device(self, key: Key) -> torch.device:
        return weight_form(self.head_map)[0] if key[0] == "head" else self._blocks[key[1]].device

    def _file(self, part: str, name: str) -> Path | None:
        device = self._blocks[0].device
        if self._fingerprint is None or any(block.device.type != device.type for block in self._blocks):
            return None
        dtype = weight_form(self.head_map)[1]
        if part != "head":  # A GPU joins maps of one input, so the number of maps tells layouts of copies apart.
            numbers = {len(self._maps((cast(Kind, part), block.index, name))) for block in self._blocks}
            part = f"{part}:{'-'.join(map(str, sorted(numbers)))}"
        return copy_file(self._fingerprint, part, name, dtype, device, self.is_packed(name))


def saves_little(maps: Sequence[nn.Module], name: str) -> bool:
    """Tell whether copies of linear maps in a format would be hardly smaller than the widest of the maps."""
    if any(is_by_library(module) for module in maps):
        return True
    widest = max(module.bits if isinstance(module, CodedLinear) else STORED_BITS for module in maps)
    return BITS[name] > MOST_BITS * widest


def _with_mixer_maps(modules: LayerModules, make: Callable[[Sequence[nn.Module]], QuantisedLinear]) -> LayerModules:
    """Copy a layer's modules, with the maps of its token mixers made by `make(maps of one input)`."""
    changed: dict[str, Any] = {}
    if modules.out is not None:
        changed |= {
            "qkv": (make(modules.qkv),),
            # The map from the latent of keys and values is read head by head, so it stays as it is stored.
            "latents": tuple(
                make([map_]) if i == 0 and map_ is not None else map_ for i, map_ in enumerate(modules.latents)
            ),
            "out": make([modules.out]),
        }
    if modules.beside is not None:
        changed["beside"] = _with_mixer_maps(modules.beside, make)
    return replace(modules, **changed)


def _linears(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, LINEAR)]


def _size(module: nn.Module) -> int:
    if isinstance(module, CodedLinear):
        return module.n_out * module.n_in
    if isinstance(module, ExpertStack):
        return module.n_weights
    return cast(Tensor, module.weight).numel()


def _wanted(layer_set: LayerSet) -> Iterator[Key]:
    for layer in range(layer_set.n_layers):
        for kind in KINDS:
            if not layer_set.skips(kind, layer) and (name := layer_set.format_of(kind, layer)) is not None:
                yield kind, layer, name
    if (name := layer_set.format_of("head")) is not None:
        yield "head", 0, name


def _prefix(key: Key, number: int) -> str:
    """Return the prefix of the names of a map's tensors in a file; `number`: the map's index in its part."""
    return "" if key[0] == "head" else f"{key[1]}.{number}."


def _pairs(kept: Mapping[str, Tensor], key: Key, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for number in count():
        prefix = _prefix(key, number)
        if f"{prefix}codes" not in kept:
            return
        yield kept[f"{prefix}codes"].to(device), kept[f"{prefix}scales"].to(device)
