"""Models of the hub, from a server in a thread with the parts that a client needs."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from families import tiny_model
from tiny_files import save, save_adapter

from swiftopt.cli.main import run
from swiftopt.core.errors import HubUnreachable, ModelNotFound, OutputError, UnsupportedModel
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.loading import load
from swiftopt.models.sources import ALIASES


class Hub(ThreadingHTTPServer):
    """The parts of the hub that a client needs for one repository, `ours/tiny`; `gated` withholds its files."""

    daemon_threads = True
    commit = "a" * 40

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.gated = False
        self.served: list[str] = []


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.served.append(path)
        name = path.rsplit("/", 1)[-1]
        if "/ours/tiny" not in path:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/ours/tiny/tree/"):
            self._answer(200, self._json([self._entry(name) for name in hub.files]))
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._answer(200, self._json({"id": "ours/tiny", "sha": hub.commit, "siblings": siblings}))
        elif hub.gated:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name in hub.files:
            self._answer(200, hub.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": hub.commit})
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.server.files[name]), "oid": "b" * 40}

    @staticmethod
    def _json(value: Any) -> bytes:
        return json.dumps(value).encode()

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing to stderr."""


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Set the values that the hub's client has read from its environment at import."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(save(tmp_path / "origin"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "hub-cache")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_model_is_fetched_once_and_then_needs_no_network(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.files["pytorch_model.bin"] = hub.files["README.md"] = b"not wanted"
    first = load("ours/tiny", speed="eager")
    n_served = len(hub.served)
    assert not any("pytorch_model" in path or "README" in path for path in hub.served)
    second = load("ours/tiny", device="cpu", speed="eager")
    assert len(hub.served) == n_served
    assert first.info == second.info
    assert first.info.fingerprint == fingerprint(tmp_path / "origin")
    assert first.tokenizer("w3")["input_ids"] == [3]
    assert capfd.readouterr() == ("", "")


def test_models_that_are_on_this_machine_are_marked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alias = replace(ALIASES["gpt2"], hub_id="ours/tiny")
    monkeypatch.setitem(ALIASES, "gpt2", alias)
    (tmp_path / "hub-cache" / "models--EleutherAI--pythia-70m").mkdir(parents=True)  # a download that was cut

    def shown() -> dict[str, dict[str, str] | None]:
        assert run(["models", "--json", "--db", str(tmp_path / "a.db")]) == 0
        return {found["alias"]: found["here"] for found in json.loads(capsys.readouterr().out)["aliases"]}

    before = shown()
    assert before["gpt2"] is None and before["pythia-70m"] is None
    load("gpt2", speed="eager")
    here = shown()["gpt2"]
    assert here is not None and here["kind"] == "cached" and (Path(here["path"]) / "config.json").is_file()


def test_hub_model_of_an_unsupported_family_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps({"model_type": "rwkv"}).encode()
    with pytest.raises(UnsupportedModel, match="rwkv"):
        load("ours/tiny", speed="eager")
    assert not any(path.endswith(".safetensors") for path in hub.served)


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"adapter_config.json": b"{}"}, UnsupportedModel, "ours/tiny holds an adapter .*: download it"),
        ({"adapter_config.json": b"{}", "config.json": None}, UnsupportedModel, "ours/tiny holds an adapter"),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, ModelNotFound, "ours/tiny has no tokenizer"),
        ({"config.json": None, "tiny-Q8_0.gguf": b""}, ModelNotFound, "download one, such as tiny-Q8_0.gguf, and name"),
        ({"config.json": None}, ModelNotFound, "holds no config.json: name the repository of a model"),
    ],
)
def test_hub_repository_that_is_not_one_model_is_refused_before_its_weights_are_fetched(
    files: dict[str, bytes | None], error: type[Exception], words: str, hub: Hub
) -> None:
    kept = {name: content for name, content in {**hub.files, **files}.items() if content is not None}
    hub.files = kept
    with pytest.raises(error, match=words):
        load("ours/tiny", speed="eager")
    assert not any(path.endswith(".safetensors") for path in hub.served)


def test_the_base_of_an_adapter_is_fetched(hub: Hub, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", "ours/tiny", tiny_model("llama"), "q_proj")
    first = load(str(adapter), speed="eager")
    assert first.info != load("ours/tiny", speed="eager").info and first.tokenizer("w3")["input_ids"] == [3]
    hub.served.clear()
    assert load(str(adapter), speed="eager").info == first.info and not hub.served


def test_the_base_of_an_adapter_is_not_fetched_where_it_is_quantised(hub: Hub, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", "ours/tiny", tiny_model("llama"), "q_proj")
    config = json.loads(hub.files["config.json"])
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    hub.files["config.json"] = json.dumps(config | quantised).encode()
    with pytest.raises(UnsupportedModel, match=r"the base ours/tiny of .* is quantised"):
        load(str(adapter), speed="eager")
    assert not any(path.endswith(".safetensors") for path in hub.served)


def test_an_adapter_in_the_hubs_cache_is_not_left_out(hub: Hub, tmp_path: Path) -> None:
    load("ours/tiny", speed="eager")
    (next((tmp_path / "hub-cache").glob("*/snapshots/*")) / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"ours/tiny holds an adapter .*: download it"):
        load("ours/tiny", speed="eager")


def test_hub_refusals_are_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"the hub has no model theirs/qwen3-8bb.*qwen3-8b"):
        load("theirs/qwen3-8bb")
    hub.gated = True
    with pytest.raises(ModelNotFound, match="is gated: accept its terms"):
        load("ours/tiny", speed="eager")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE forbids"):
        load("ours/tiny", speed="eager")


def test_full_disk_under_the_hubs_cache_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OutputError, match=r"ours/tiny cannot be kept in .* \(No space left on device\): make room"):
        load("ours/tiny", speed="eager")


def test_hub_out_of_reach_is_said_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)  # the discard port, where nobody answers
    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    with pytest.raises(HubUnreachable, match=r"the hub cannot be used .*check the network") as caught:
        load("codellama-7b")
    assert sum(paused) < 5, "seconds between tries"
    assert "\n" not in str(caught.value)
