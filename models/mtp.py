"""Runs the multi-token-prediction layer of a checkpoint: a model of one layer, with the target's embedding and head.

Source: DeepSeek-V3 (arXiv:2412.19437) 2.2. DEVIATION: a layer's output is fed back to the same layer for more tokens
than one, after EAGLE (arXiv:2401.15077), as checkpoints have one layer only.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.errors import ModelNotFound
from ..core.layer_sets import LayerSet
from ..core.records import ModelInfo
from .buffer import KVBuffer
from .copies import saves_little
from .fingerprint import fingerprint_with
from .gguf_mtp import has_next_layer, next_layer
from .gguf_reader import GgufFile
from .mtp_names import LAYER, config_of_layer
from .quantised import QuantisedLinear
from .rows import Pass, PassKind, Rows
from .runtime import Runtime
from .saved import GGUF_WEIGHTS, linked_gguf, refuse_mismatched, refuse_missing, refuse_unread
from .stored_tensors import StoredTensors, stored_tensors
from .transfers import uploaded

BESIDE = ("embed_norm", "hidden_norm", "projection")  # Parts of the layer that a decoder layer does not have.
WHERE = "the multi-token-prediction layer of its config.json"
DRAFT_FORMAT = "int4"  # Format of the layer and of its head in adaptive drafts.
MTP_COSTS = "mtp"  # Name of the layer's costs in a profile; see `cost_name`.


def cost_name(name: str | None) -> str:
    """Return the name in `CostProfile.formats` of the layer's costs, with its weights in a format (None: as stored)."""
    return MTP_COSTS if name is None else f"{MTP_COSTS}-{name}"


def format_of_costs(cost_name: str) -> str | None:
    """Return the format of the layer's weights of which these are the costs."""
    return cost_name.removeprefix(MTP_COSTS).removeprefix("-") or None


class MtpRuntime(Runtime):
    """A multi-token-prediction layer as a runtime of one layer; its keys and values are in separate buffers.

    `parts` are the modules named in `BESIDE`. The embedding, the head and copies of the head are the target's.
    """

    def __init__(self, model: nn.Module, target: Runtime, parts: nn.ModuleDict) -> None:
        self.target, self.parts = target, parts
        samples = [(name, parameter.data) for name, parameter in parts.named_parameters()]
        samples += [(name, tensor) for name, tensor in model.state_dict().items() if name.startswith(LAYER)]
        identity = fingerprint_with(target.info.fingerprint, samples)
        n_parameters = sum(tensor.numel() for _, tensor in samples)
        super().__init__(model, target.tokenizer, ModelInfo(identity, target.info.architecture, 1, n_parameters))
        self._projections: dict[str, QuantisedLinear] = {}
        # Layer sets of passes in a format, made once.
        self._variants: dict[str | None, tuple[LayerSet, ...]] = {None: ()}

    def head_module(self, name: str | None) -> Any:
        return self._head if name is None else self.target.copies.head(name)

    def prepare(self, name: str | None) -> None:
        """Make the layer's and the head's copies in a format, so that none of it is made while something is timed."""
        if name is None:
            return
        self.copies.prepare(LayerSet(1, formats=(("attn", name), ("mlp", name))))
        self.head_module(name)
        projection = self.parts["projection"]
        if name not in self._projections and self.copies.is_packed(name) and not saves_little([projection], name):
            self._projections[name] = QuantisedLinear([projection], name, packed=True)

    @torch.inference_mode()
    def begun(self, token_ids: Sequence[int] | Tensor, states: Tensor, name: str | None = None) -> Tensor:
        """Return what the layer reads, (rows, hidden_size).

        Args: token_ids: that follow the rows' positions. states: (rows, hidden_size), of the positions: after the
              model's final norm or, where a token is drafted, after the layer's. name: format of the projection.
        """
        ids = token_ids if isinstance(token_ids, Tensor) else uploaded(token_ids, self.device)
        embedded = self.parts["embed_norm"](self._embed(ids))
        joined = torch.cat((embedded, self.parts["hidden_norm"](states)), dim=-1)
        if self.native is None:
            return cast(Tensor, self.parts["projection"](joined))
        return self.native.mapped(joined, self._projections.get(name or "", self.parts["projection"]))

    def pass_over(
        self,
        token_ids: Sequence[int] | Tensor,
        states: Tensor,
        buffer: KVBuffer,
        first_slot: int,
        name: str | None = None,
        kind: PassKind = "draft",
    ) -> tuple[Pass, list[Tensor]]:
        """Return the pass over a chain of rows, with the logits after the last one, and a list for the states.

        The pass adds the rows' states (rows, hidden_size) before the layer's last norm to the list. One "beside" a
        draft has no logits.
        """
        n_rows, out = len(token_ids), list[Tensor]()
        if name not in self._variants:
            self._variants[name] = (LayerSet(1).filled(cast(str, name)),)
        rows = Rows(token_ids, first_slot, variants=self._variants[name])
        rows_read = () if kind == "beside" else (n_rows - 1,)
        hidden = self.begun(token_ids, states, name)
        return Pass(self, rows, buffer, rows_read, {1: out}, hidden, (0, 1), kind), out


def has_mtp(folder: Path, file: GgufFile | None = None, n_layers: int = 0) -> bool:
    """Tell whether a folder's files hold a multi-token-prediction layer of which all parts are known.

    Args: file: the GGUF file that the folder is for, of a model with `n_layers` layers.
    """
    if file is not None:
        return has_next_layer(file, n_layers)
    try:
        with stored_tensors(folder, of_mtp=True) as tensors:
            names = tensors.slices()
    except ModelNotFound:
        return False
    needed = (*(f"{part}.weight" for part in BESIDE), "model.norm.weight")
    return all(name in names for name in needed) and any(name.startswith(LAYER) for name in names)


def read_mtp(folder: Path, target: Runtime) -> MtpRuntime:
    """Read the multi-token-prediction layer from a folder that has one (`has_mtp`).

    Raises: ModelNotFound: tensors are missing, too many, or of other shapes than the target's config says.
    """
    if (folder / GGUF_WEIGHTS).exists():
        coded = target.native is not None and target.dtype == torch.bfloat16
        place = str(target.blocks[-1].device)
        made = next_layer(
            GgufFile(linked_gguf(folder)), target.config, target.family, target.dtype, coded, target.hf_model
        )
        model, parts = (part.to(place) for part in made)
        return MtpRuntime(model, target, parts)
    with stored_tensors(folder, of_mtp=True) as tensors:
        return _made(tensors, folder, target)


def _made(tensors: StoredTensors, folder: Path, target: Runtime) -> MtpRuntime:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family, slices = target.family, tensors.slices()
    assert family.mtp is not None
    config = config_of_layer(target.config, family.mtp, slices)
    shared = {name: target.hf_model.get_submodule(name) for name in (family.embed, family.head)}
    state = {name: part for name, part in slices.items() if name.partition(".")[0] not in BESIDE}
    state |= {f"{name}.weight": cast(Tensor, module.weight).data for name, module in shared.items()}
    device = target.blocks[-1].device
    model, loading_info = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=target.dtype,
        device_map={"": str(device)},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    refuse_mismatched(loading_info["mismatched_keys"], folder, WHERE)
    refuse_missing(loading_info["missing_keys"], folder)
    refuse_unread(loading_info["unexpected_keys"], folder)
    for name, module in shared.items():
        model.set_submodule(name, module)
    model = model.eval().requires_grad_(False)
    return MtpRuntime(model, target, _parts_beside(tensors, model.get_submodule(family.norm), folder, target))


def _parts_beside(tensors: StoredTensors, norm: nn.Module, folder: Path, target: Runtime) -> nn.ModuleDict:
    """Return the two norms and the projection; the norms are of the kind of the layer's last one.

    Raises: ModelNotFound: they are of other sizes than the model.
    """
    device, size = target.blocks[-1].device, int(target.config.hidden_size)
    projection = nn.Linear(2 * size, size, bias=False, device="meta")
    parts = nn.ModuleDict({"embed_norm": deepcopy(norm), "hidden_norm": deepcopy(norm), "projection": projection})
    for name, part in parts.items():
        stored, expected = tensors.read(f"{name}.weight"), cast(Tensor, part.weight).shape
        if stored.shape != expected:
            refuse_mismatched([(name, stored.shape, expected)], folder, WHERE)
        part.weight = nn.Parameter(stored.to(device, target.dtype), requires_grad=False)
    return parts.eval()
