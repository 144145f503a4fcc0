"""The quantised copies of a model's sub-layers and head that drafts are made of; the target itself is never touched.

On disk a copy is kept per model, format and kind of processor, and read back in about a second per GB.
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
# Bits of a copy per bit of the part that it stands for, at most. Parts in 6 bits are a third of a Q4_K_M file: a draft
# with these in int4 reads 0.89 of its bytes, at which no acceptance pays, and its copies took 1.3 GB.
MOST_BITS = 0.6
STORED_BITS = 16  # Fewest bits per weight of an unquantised model.

# Form of a real fingerprint from `models.fingerprint`; tests also use made-up ones.
HASH = re.compile(r"v\d+:[0-9a-f]{16}")
PROBED_ROWS = (1, 4)  # Row counts of the passes timed to choose between our kernel and torch's.

Key = tuple[Literal["attn", "mlp", "head"], int, str]  # Part, layer (0 for the head) and format of a copy.
Seconds = Callable[[Callable[[], object]], float]  # A function that times a task on the model's device.


class _Copy(NamedTuple):
    """The modules of a layer with a sub-layer's linear maps quantised, or the quantised head; and those maps."""

    modules: Any
    maps: Sequence[QuantisedLinear] = ()

    @property
    def n_bytes(self) -> int:
        return sum(one.n_bytes for one in self.maps)


class QuantisedCopies:
    """The quantised copies that drafts of one model have used so far.

    Of a sub-layer, or a head, whose own weights have no more bits than a format, or are for a library alone, the copy
    is the sub-layer itself.

    Those of a model with a real fingerprint, a hash of its weights, are kept on disk for the next process.
    """

    def __init__(self, blocks: Sequence[Block], head: nn.Module, fingerprint: str) -> None:
        self._blocks, self.head_map = blocks, head
        self._fingerprint = fingerprint if HASH.fullmatch(fingerprint) else None
        self.packed: bool | Seconds = False  # Whether copies are laid out for our kernels; see `lay_out`.
        self._faster_packed: dict[str, bool] = {}  # Format -> whether our kernel was faster than torch's.
        self.kept: set[str] = set()  # Formats in use by running requests: their copies are never dropped.
        self._made: dict[Key, _Copy] = {}
        # Mixtures of which a token takes fewer experts, by layer and format, then by their number.
        self._fewer: dict[tuple[int, str | None], dict[int, LayerModules]] = {}

    @property
    def n_bytes(self) -> int:
        return sum(one.n_bytes for one in self._made.values())

    def bytes_of(self, layer_set: LayerSet) -> int:
        """Return the memory of the copies that a draft with that set runs, as far as they have been made."""
        return sum(self._made[key].n_bytes for key in _wanted(layer_set) if key in self._made)

    def parts(self, kind: Kind, layer: int, form: PartForm) -> LayerModules:
        """Return the modules of a layer whose sub-layer is run in a form; a copy is made at the first call."""
        block = self._blocks[layer]
        parts: LayerModules = block.parts if form.format is None else self._copy((kind, layer, form.format)).modules
        if form.experts is None or block.experts is None:
            return parts
        # Kept, because they are asked for in each pass; a copy that is dropped takes its own with it.
        fewer, key = self._fewer.setdefault((layer, form.format), {}), form.experts
        if key not in fewer:
            fewer[key] = replace(parts, mlp=with_fewer(parts.mlp, block.experts, key))
        return fewer[key]

    def head(self, name: str) -> nn.Module:
        return cast(nn.Module, self._copy(("head", 0, name)).modules)

    def lay_out(self, packed: bool | Seconds) -> None:
        """Choose whether new copies are laid out for our kernels; copies in another layout are dropped.

        Args: packed: for ours, for torch's (False), or for those that are faster in a format, by the seconds of either.
        """
        if packed != self.packed:
            self.packed = packed
            self._faster_packed.clear()
            self._made.clear()
            self._fewer.clear()

    def is_packed(self, name: str) -> bool:
        """Tell whether copies in a format are laid out for our kernels; if a timing decides, it runs at the first call.

        Raises: SettingsError: nothing computes with that format here.
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
        """Free all copies in a format unless it is `kept`; one that is used later is made, or read, again."""
        if name not in self.kept:
            self._made = {key: one for key, one in self._made.items() if key[2] != name}
            self._fewer = {key: fewer for key, fewer in self._fewer.items() if key[1] != name}

    @torch.inference_mode()
    def prepare(self, layer_set: LayerSet, on_step: OnStep = no_step) -> None:
        """Make all that a draft with that set runs, or read it, so that none of it is made while something is timed."""
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
        PAGES.add(part for key in keys for one in self._made[key].maps for part in (one.codes, one.scales))
        everything: list[Key] = [(part, layer, name) for layer in range(1 if part == "head" else len(self._blocks))]
        if path is not None and kept is None and all(key in self._made for key in everything):
            places = {_place(key, i): one for key in everything for i, one in enumerate(self._made[key].maps)}
            codes = {f"{at}codes": one.codes for at, one in places.items()}
            write_copy(path, codes | {f"{at}scales": one.scales for at, one in places.items()})

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
        """Tell whether the copy is the target's own part: rounding that again would save too little."""
        maps = self._maps(key)
        return not maps or saves_little(maps, key[2])

    def _maps(self, key: Key) -> list[nn.Module]:
        """Return the linear maps that the copy of a part has in fewer bits; [] where it has none."""
        part, layer, _ = key
        modules = self._modules(key)
        if part == "mlp" and modules.mlp is not None and has_experts(modules.mlp):
            # Only our C++ kernels read the codes of experts; elsewhere a copy keeps a mixture as it is.
            named = self._blocks[layer].experts
            stacks = stacks_of(modules.mlp, named) if self.packed is True and named is not None else []
            if not stacks or named is None:
                return []
            _, shared = shared_of(modules.mlp, named)
            return [*stacks, *(() if shared is None else _linears(shared))]
        if part == "head":
            return _linears(modules)
        of_part = [modules.mlp] if part == "mlp" else modules.maps()
        return [module for one in of_part if one is not None for module in _linears(one)]

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

        def one(modules: Sequence[nn.Module]) -> QuantisedLinear:
            maps.append(QuantisedLinear(modules, name, next(kept, None), self.is_packed(name)))
            return maps[-1]

        if part == "head":
            return _Copy(one([modules]), maps)
        if part == "attn":
            return _Copy(_mixers_by(modules, one), maps)
        if isinstance(self._maps(key)[0], ExpertStack):
            named = self._blocks[key[1]].experts
            assert named is not None
            return _Copy(replace(modules, mlp=quantised_mixture(modules.mlp, named, one)), maps)
        return _Copy(replace(modules, mlp=replaced([modules.mlp], one)), maps)

    def _device(self, key: Key) -> torch.device:
        return weight_form(self.head_map)[0] if key[0] == "head" else self._blocks[key[1]].device

    def _file(self, part: str, name: str) -> Path | None:
        device = self._blocks[0].device
        if self._fingerprint is None or any(block.device.type != device.type for block in self._blocks):
            return None
        dtype = weight_form(self.head_map)[1]
        if part != "head":  # Maps are joined on a GPU, so a copy made there is not one for other machines.
            numbers = {len(self._maps((cast(Kind, part), block.index, name))) for block in self._blocks}
            part = f"{part}:{'-'.join(map(str, sorted(numbers)))}"
        return copy_file(self._fingerprint, part, name, dtype, device, self.is_packed(name))


def saves_little(maps: Sequence[nn.Module], name: str) -> bool:
    """Tell whether copies of linear maps in a format would be hardly smaller: the widest may have few bits itself."""
    if any(is_by_library(module) for module in maps):
        return True
    return BITS[name] > MOST_BITS * max(one.bits if isinstance(one, CodedLinear) else STORED_BITS for one in maps)


def _mixers_by(modules: LayerModules, make: Callable[[Sequence[nn.Module]], QuantisedLinear]) -> LayerModules:
    """Copy a layer's modules, with maps of what mixes tokens made by `make(maps of one input)`."""
    changed: dict[str, Any] = {}
    if modules.out is not None:
        changed |= {
            "qkv": (make(modules.qkv),),
            # The other latent's map is read head by head, as it is stored.
            "latents": tuple(
                make([one]) if number == 0 and one is not None else one for number, one in enumerate(modules.latents)
            ),
            "out": make([modules.out]),
        }
    if modules.beside is not None:
        changed["beside"] = _mixers_by(modules.beside, make)
    return replace(modules, **changed)


def _linears(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if isinstance(one, LINEAR)]


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


def _place(key: Key, number: int) -> str:
    """Return the name prefix of a map's tensors in a file; `number`: the map's index in its part."""
    return "" if key[0] == "head" else f"{key[1]}.{number}."


def _pairs(kept: Mapping[str, Tensor], key: Key, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for number in count():
        at = _place(key, number)
        if f"{at}codes" not in kept:
            return
        yield kept[f"{at}codes"].to(device), kept[f"{at}scales"].to(device)
