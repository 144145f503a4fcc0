"""Captures of CUDA graphs, on simulated devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from swiftopt.models import graphs

DEVICES = [torch.device("cuda", i) for i in range(2)]


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert other.device == self.device


class Cuda:
    """Stands in for `torch.cuda`; as in torch 2.13, `graph` leaves its stream current if it fails."""

    def __init__(self) -> None:
        self.now = DEVICES[0]
        self.streams = {device: Stream(device) for device in DEVICES}
        self.first: Stream | None = None  # torch's own for captures
        self.capturing: tuple[Stream, CUDAGraph] | None = None

    def launch(self, device: torch.device) -> None:
        """Run a kernel, or capture it if its stream is capturing."""
        if self.capturing is not None and self.capturing[0] is self.streams[device]:
            self.capturing[1].kernels.append(device)

    def current_stream(self, device: torch.device) -> Stream:
        return self.streams[device]

    def set(self, stream: Stream) -> None:
        self.now, self.streams[stream.device] = stream.device, stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.now = self.now, device
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = [self.streams[stream.device], self.streams[self.now]]
        self.set(stream)
        try:
            yield
        finally:
            for each in before:
                self.set(each)

    @contextmanager
    def graph(self, graph: CUDAGraph, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
        self.first = self.first or Stream(self.now)
        used = stream or self.first
        before = self.streams[self.now]
        self.set(used)
        self.capturing = used, graph
        try:
            yield
        except Exception as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            self.capturing = None
        self.set(before)


class CUDAGraph:
    def __init__(self) -> None:
        self.kernels: list[torch.device] = []
        GRAPHS.append(self)


GRAPHS: list[CUDAGraph] = []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    for name in ("device", "stream", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(graphs, "_aside", cache(graphs._aside.__wrapped__))
    GRAPHS.clear()
    return made


def test_passes_of_models_on_two_devices_are_each_captured_on_a_stream_there(cuda: Cuda) -> None:
    seen: list[Stream] = []

    def task(device: torch.device) -> None:
        seen.append(cuda.streams[device])
        cuda.launch(device)

    for device in DEVICES * 2:
        graphs.captured(lambda device=device: task(device), device)
    assert [graph.kernels for graph in GRAPHS] == [[device] for device in DEVICES * 2]
    assert len(set(seen)) == len(DEVICES), "libraries keep scratch memory for each stream"


def test_streams_are_as_before_where_a_capture_fails(cuda: Cuda) -> None:
    before = dict(cuda.streams)

    def task() -> None:
        if cuda.capturing is not None:
            raise ValueError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"):
        graphs.captured(task, DEVICES[1])
    assert cuda.streams == before and cuda.now == DEVICES[0]
