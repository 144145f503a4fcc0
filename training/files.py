"""Heads and probes as safetensors: the bytes that the store keeps and `export` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.learned import LearnedKind, LearnedRecord
from ..models.learned import Heads, Probe
from ..models.runtime import Runtime

SCHEMA = "swiftopt.learned-weights/1"
HEADER_BYTES = 8  # length of the header of a safetensors file, little-endian


def heads_to_bytes(heads: Heads, record: LearnedRecord) -> bytes:
    """A file of the heads, a tensor `head.DEPTH` each, which says of itself what the record says."""
    tensors = {f"head.{depth}": heads.transforms[depth] for depth in heads.depths}
    return _to_bytes(record, tensors, {"full": heads.full})


def probe_to_bytes(probe: Probe, record: LearnedRecord) -> bytes:
    """A file of the probe, `direction` and `bias`, which says of itself what the record says."""
    tensors = {"direction": probe.direction, "bias": torch.tensor([probe.bias], dtype=torch.float64)}
    return _to_bytes(record, tensors, {})


def heads_from_bytes(data: bytes, runtime: Runtime) -> Heads:
    """The heads, in the runtime's dtype and on its device.

    Raises: InvalidInput: no such file, or heads of another model.
    """
    about, tensors = _from_bytes("heads", data, runtime)
    width, full = _width(runtime), bool(about.get("full"))
    shape = (runtime.vocab_size if full else width, width)
    found = {int(depth): _tensor(tensors, f"head.{depth}", shape) for depth in about["depths"]}
    return Heads({d: tensor.to(runtime.device, runtime.dtype) for d, tensor in found.items()}, full)


def probe_from_bytes(data: bytes, runtime: Runtime) -> Probe:
    """The probe, on the runtime's device.

    Raises: InvalidInput: no such file, or a probe of another model.
    """
    about, tensors = _from_bytes("probe", data, runtime)
    direction = _tensor(tensors, "direction", (_width(runtime),)).float().to(runtime.device)
    return Probe(int(about["depths"][0]), direction, float(_tensor(tensors, "bias", (1,))))


def _to_bytes(record: LearnedRecord, tensors: Mapping[str, Tensor], more: Mapping[str, Any]) -> bytes:
    words = {"kind": record.kind, "fingerprint": record.fingerprint, "model": record.model, "task": record.task}
    values = {"depths": list(record.depths), "settings": dict(record.settings), **more}
    metadata = {"schema": SCHEMA, **words, **{name: json.dumps(value) for name, value in values.items()}}
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)


def _from_bytes(kind: LearnedKind, data: bytes, runtime: Runtime) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        size = int.from_bytes(data[:HEADER_BYTES], "little")
        tensors = load(data)  # checks the header before it is read below
        metadata: dict[str, str] = json.loads(data[HEADER_BYTES : HEADER_BYTES + size]).get("__metadata__", {})
        about = {**metadata, "depths": json.loads(metadata["depths"]), "full": metadata.get("full") == "true"}
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"the {kind} cannot be read as safetensors of swiftopt: train or export them again"
        ) from error
    if (metadata.get("schema"), metadata.get("kind")) != (SCHEMA, kind):
        raise InvalidInput(f"this file holds {metadata.get('kind', 'nothing known')}, not {kind}: name another one")
    if metadata.get("fingerprint") != runtime.info.fingerprint:
        raise InvalidInput(
            f"the {kind} were trained on {metadata.get('model')} ({metadata.get('fingerprint')}), but this model is"
            f" {runtime.info.fingerprint}: run `swiftopt {kind} train` for it"
        )
    for depth in about["depths"]:
        if not 0 < depth < runtime.n_layers:
            raise InvalidInput(f"the {kind} sit after layer {depth}, but this model has {runtime.n_layers}: train anew")
    return about, tensors


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape:
        has = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
        raise InvalidInput(f"the tensor {name!r} {has}, but {shape} was expected: train or export it again")
    return found


def _width(runtime: Runtime) -> int:
    return int(runtime.config.get_text_config().hidden_size)
