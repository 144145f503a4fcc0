"""Weights in huge pages: which memory is moved, and that its bytes stay the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from swiftopt.models import huge_pages
from swiftopt.models.huge_pages import PageMover, weights_in

SIZE = 8 << 20  # Bytes of a tensor; huge pages are of 2 MiB on most machines.


def in_huge_pages(tensor: torch.Tensor) -> int:
    """Return the bytes in huge pages of the mapping that contains the start of a tensor."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (place := line.split()[0]) and not place.endswith(":"):
            start, end = (int(part, 16) for part in place.split("-"))
            here = start <= tensor.data_ptr() + tensor.nbytes // 2 < end
        elif here and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.fixture
def tensor() -> torch.Tensor:
    if not PageMover()._size:
        pytest.skip("this system has no huge pages")
    tensor = torch.arange(SIZE, dtype=torch.int32).bitwise_and_(255).to(torch.uint8)
    mover = PageMover()
    mover.add([trial := torch.ones(SIZE, dtype=torch.uint8)])
    mover.finish()
    if not in_huge_pages(trial):
        pytest.skip("this system collapses no pages")
    return tensor


def test_a_tensor_is_moved_and_keeps_its_bytes(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    mover = PageMover()
    mover.add([tensor[: SIZE // 2], tensor[SIZE // 2 :]])  # Halves of one piece of memory: its middle is moved, too.
    mover.finish()
    assert in_huge_pages(tensor) >= SIZE // 2
    assert torch.equal(tensor, before)


def test_a_thread_moves_weights_in_the_end(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "WAIT_S", 0.0)
    mover = PageMover()
    mover.add([tensor])
    until = time.monotonic() + 60
    while not in_huge_pages(tensor) and time.monotonic() < until:
        time.sleep(0.01)
    assert in_huge_pages(tensor)


def mapped_file(path: Path, shared: bool) -> torch.Tensor:
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return torch.from_file(str(path), shared=shared, size=SIZE, dtype=torch.uint8)


def test_a_mapped_file_is_copied_in_its_place(tensor: torch.Tensor, tmp_path: Path) -> None:
    mapped = mapped_file(path := tmp_path / "weights", shared=False)
    place, mover = mapped.data_ptr(), PageMover()
    half = mapped[: SIZE // 2]
    mover.add([half, mapped[SIZE // 2 :]])  # Nobody has the other half any more: it is left where it is.
    mover.finish()
    assert in_huge_pages(half) and not in_huge_pages(mapped[SIZE // 2 :])
    mover.add([mapped])
    mover.finish()
    assert in_huge_pages(mapped) and mapped.data_ptr() == place
    assert torch.equal(mapped, tensor)
    path.write_bytes(bytes(SIZE))
    page = mover._size
    inner = slice(-place % page, SIZE - (place + SIZE) % page)
    assert torch.equal(mapped[inner], tensor[inner])


@pytest.mark.parametrize("shared, free", [(False, SIZE // 8), (True, 1 << 60)], ids=["little memory", "shared"])
def test_a_mapped_file_stays(
    shared: bool, free: int, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "free_memory", lambda: free)
    mapped, mover = mapped_file(tmp_path / "weights", shared), PageMover()
    mover.add([mapped])
    mover.finish()
    assert not in_huge_pages(mapped)


def test_freed_memory_is_passed_over(tensor: torch.Tensor) -> None:
    mover = PageMover()
    mover.add([freed := torch.ones(8 * SIZE, dtype=torch.uint8)])
    mover.add([tensor])
    del freed
    mover.finish()
    assert in_huge_pages(tensor)


def test_a_system_that_says_never_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    mover = PageMover()
    mover.add([torch.ones(SIZE, dtype=torch.uint8)])
    assert not mover._pieces and mover._thread is None


def test_all_weights_of_a_model_are_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert {part.data_ptr() for part in weights_in(model)} == {part.data_ptr() for part in model.state_dict().values()}
