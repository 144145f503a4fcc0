"""The reader of GGUF files: its values, and damaged or malicious files."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from swiftopt.core.errors import ModelNotFound, SwiftoptError, UnsupportedModel
from swiftopt.models.gguf_reader import TYPES, GgufFile, Texts

N_MUTATIONS = 10_000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with settings and tensors of several types."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("llama.attention.causal", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ü"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    for kind in ("F32", "F16", "Q8_0", "Q4_0"):
        own = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"weight.{kind}", gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_settings_and_tensors_are_those_of_the_library(small: Path) -> None:
    file, reader = GgufFile(small), gguf.GGUFReader(str(small))
    settings = {name: list(own) if isinstance(own, Texts) else own for name, own in file.settings.items()}
    assert settings == {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.architecture == "llama" and file.own_settings()["block_count"] == 2
    for tensor in reader.tensors:
        own = file.tensors[tensor.name]
        assert (own.type_name, own.shape) == (tensor.tensor_type.name, tuple(map(int, tensor.shape))[::-1])
        assert own.data.tobytes() == tensor.data.tobytes()
        file.release(own)
        assert own.data.tobytes() == tensor.data.tobytes()


def test_types_have_the_sizes_of_the_library() -> None:
    for kind, (name, block, n_bytes) in TYPES.items():
        own = gguf.GGMLQuantizationType(kind)
        assert (own.name, gguf.GGML_QUANT_SIZES[own]) == (name, (block, n_bytes))


def changed(content: bytes, at: int, form: str, value: int) -> bytes:
    return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


def of_tensor(content: bytes, name: str) -> int:
    """Return the offset of a tensor's number of dimensions."""
    return content.index(name.encode()) + len(name)


HARMFUL: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another version": (lambda c: changed(c, 4, "<I", 1), "is of version 1"),
    "big-endian": (lambda c: changed(c, 4, ">I", 3), "is of version"),
    "2^63 tensors": (lambda c: changed(c, 8, "<Q", 1 << 63), "is|has|ends"),
    "2^63 settings": (lambda c: changed(c, 16, "<Q", 1 << 63), "has|ends"),
    "a key of 2^63 bytes": (lambda c: changed(c, 24, "<Q", 1 << 63), "ends in its header"),
    "too many dimensions": (lambda c: changed(c, of_tensor(c, "weight.Q8_0"), "<I", 9), "has 9 dimensions"),
    "dimensions that overflow": (
        lambda c: changed(changed(c, (at := of_tensor(c, "weight.Q8_0")) + 4, "<Q", 1 << 62), at + 12, "<Q", 1 << 62),
        "is cut short, or names a wrong place",
    ),
    "no whole blocks": (lambda c: changed(c, of_tensor(c, "weight.Q8_0") + 4, "<Q", 33), "no whole blocks of 32"),
    "no values": (lambda c: changed(c, of_tensor(c, "weight.Q8_0") + 4, "<Q", 0), "has no values"),
    "an offset behind the end": (
        lambda c: changed(c, of_tensor(c, "weight.Q8_0") + 24, "<Q", 1 << 40),
        "is cut short, or names a wrong place for weight.Q8_0",
    ),
    "two tensors in one place": (lambda c: changed(c, of_tensor(c, "weight.Q8_0") + 24, "<Q", 0), "in one place"),
    "cut": (lambda c: c[:-70], "is cut short"),
    "cut in its header": (lambda c: c[:200], "ends in its header"),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_a_harmful_file_is_refused_in_one_sentence(what: str, small: Path, tmp_path: Path) -> None:
    change, words = HARMFUL[what]
    path = tmp_path / "harmful.gguf"
    path.write_bytes(change(small.read_bytes()))
    with pytest.raises(ModelNotFound, match=words) as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_type_that_is_not_known_is_named(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    path = tmp_path / "unknown.gguf"
    path.write_bytes(changed(content, of_tensor(content, "weight.Q8_0") + 20, "<I", 35))
    with pytest.raises(UnsupportedModel, match=r"the tensor weight\.Q8_0 of type 35"):
        GgufFile(path)


def test_a_part_that_is_missing_is_named(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(small.read_bytes())
    with pytest.raises(ModelNotFound, match=r"model-00002-of-00002\.gguf is missing"):
        GgufFile(path)


def test_mutated_headers_are_read_or_refused(small: Path, tmp_path: Path) -> None:
    """A random header gives a file or an error of one sentence, and no read beyond the end."""
    content, rng, path = small.read_bytes(), random.Random(0), tmp_path / "mutated.gguf"
    n_header = len(content) - sum(tensor.data.nbytes for tensor in GgufFile(small).tensors.values())
    outcomes = {"read": 0, "refused": 0}
    for _ in range(N_MUTATIONS):
        mutated = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            mutated[rng.randrange(4, n_header)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        if rng.random() < 0.1:
            del mutated[rng.randrange(len(mutated)) :]
        path.write_bytes(mutated)
        try:
            file = GgufFile(path)
            assert sum(int(tensor.data.sum()) for tensor in file.tensors.values()) >= 0
            outcomes["read"] += 1
        except SwiftoptError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


def test_a_file_that_is_cut_or_written_to_while_it_is_read_gets_a_sentence(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    for change in (content[:-4096], content[:-1] + b"\xff"):
        path = tmp_path / "changing.gguf"
        path.write_bytes(content)
        os.utime(path, (0, 0))
        file = GgufFile(path)
        file.refuse_changed()
        path.write_bytes(change)
        with pytest.raises(ModelNotFound, match="was changed while it was read: load it again"):
            file.refuse_changed()


def test_a_file_that_is_replaced_or_removed_stays_as_it_was_mapped(small: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    path.write_bytes(small.read_bytes())
    other.write_bytes(b"GGUF")
    file = GgufFile(path)
    before = file.tensors["weight.F32"].data.tobytes()
    other.replace(path)
    file.refuse_changed()
    path.unlink()
    file.refuse_changed()
    assert file.tensors["weight.F32"].data.tobytes() == before
