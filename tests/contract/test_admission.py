"""Laws of submission: a job that cannot succeed is refused in the same sentence at each door, and nothing is stored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from families import tiny_model
from serving import serving
from tiny_files import CHAT_TEMPLATE, edit_config, save, save_adapter

from swiftopt.cli.main import run
from swiftopt.client import Client
from swiftopt.core.errors import SettingsError, SwiftoptError
from swiftopt.core.requests import LINES_FROM, TuneRequest
from swiftopt.core.settings import TuningSettings
from swiftopt.core.streams import read_stream
from swiftopt.core.types import Prompt, Sampling
from swiftopt.server.app import create_app
from swiftopt.store import Store
from swiftopt.tasks.admission import check_tuning
from swiftopt.worker.queue import JobService

FINE = "w3 w4 w5"
NOBODY = "redis://127.0.0.1:1"  # jobs that are admitted wait in the database


@dataclass(frozen=True)
class Case:
    """What is wrong with a job, and what is said of it; `status` of HTTP goes with the exit code.

    `model` is a file in the model's folder, or a name of its own.
    """

    words: str
    status: int = 422
    model: str = "{folder}"
    line: dict[str, Any] = field(default_factory=lambda: {"prompt": FINE})
    damage: Callable[[Path], object] = lambda folder: None
    request: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)


def _other_file(folder: Path) -> None:
    (folder / "m.gguf").write_bytes(b"GGML and more")


CASES = {
    "completions no longer than the window": Case("leaves nothing to decode", request={"max_new_tokens": 4}),
    "a window as long as completions": Case("leaves nothing to decode", settings={"context_window": 40}),
    "lines with short completions": Case("max_new_tokens 3 leaves nothing", line={"prompt": FINE, "max_new_tokens": 3}),
    "completions over the context": Case("context length is 256", request={"max_new_tokens": 256}),
    "a prompt over the context": Case("the prompt has 300 and 40 new tokens", line={"prompt": "w3 " * 300}),
    "a chat over the context": Case("context length is 256", line={"turns": ["w3 " * 300, "w4"]}),
    "messages over the context": Case(
        "context length is 256", line={"messages": [{"role": "user", "content": "w3 " * 300}]}
    ),
    "a chat without a template": Case(
        "'1' is a chat, but", line={"turns": [FINE]}, damage=lambda folder: (folder / "chat_template.jinja").unlink()
    ),
    "no tokenizer": Case(
        "has no tokenizer", 404, damage=lambda folder: [path.unlink() for path in folder.glob("tokenizer*")] and None
    ),
    "no weights": Case("holds no weights", 404, damage=lambda folder: (folder / "model.safetensors").unlink()),
    "a config that is no JSON": Case("no model's config", 404, damage=lambda f: (f / "config.json").write_text("{")),
    "a family without support": Case("model type 'rwkv'", damage=lambda f: edit_config(f, model_type="rwkv")),
    "no such alias": Case("nearest: smollm2-135m", 404, model="smollm2-135"),
    "no such folder": Case("there is no folder /no/such/model", 404, model="/no/such/model"),
    "another file": Case("is no GGUF file", 404, "{folder}/m.gguf", damage=_other_file),
    "a token of no vocabulary": Case("this model has tokens 0 to 96", bias={97: 1.0}),
    "graphs on a CPU": Case("speed graphs is for cuda", request={"speed": "graphs", "device": "cpu"}),
    "float16 by our kernels": Case("no float16", request={"speed": "exact", "device": "cpu", "dtype": "float16"}),
    "fp8 by our kernels": Case(
        "do not support fp8", request={"speed": "exact", "device": "cpu"}, settings={"draft_format": "fp8"}
    ),
}


class Site(NamedTuple):
    """A folder with a model and a stream, and the job that a case makes of them."""

    home: Path
    request: TuneRequest
    options: list[str]

    def refusal(self) -> str:
        """What `check_tuning` says of the job."""
        with pytest.raises(SwiftoptError) as refused:
            check_tuning(self.request, read_stream(self.request.stream))
        return str(refused.value)


class Door(NamedTuple):
    """A server, as a client and as an app within this process, and its database."""

    store: Store
    url: str


@pytest.fixture(scope="module")
def door(schema_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    file = shutil.copy(schema_file, tmp_path_factory.mktemp("door") / "jobs.db")
    with Store.open(file) as store, serving(create_app(store, JobService(store, None))) as url:
        yield Door(store, url)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def site(case: Case, door: Door, tmp_path: Path, unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", door.store.url)
    folder = save(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    case.damage(folder)
    stream = tmp_path / "notes.jsonl"
    stream.write_text(json.dumps(case.line) + "\n")
    own = {"max_new_tokens": 40, **case.request}
    settings, sampling = TuningSettings(**case.settings), Sampling(logit_bias=tuple(case.bias.items()))
    request = TuneRequest(case.model.format(folder=folder), str(stream), settings=settings, sampling=sampling, **own)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**own, **case.settings}.items()]
    options += [f"--logit-bias={token}={bias}" for token, bias in case.bias.items()]
    return Site(tmp_path, request, ["--model", request.model, "--stream", str(stream), *options])


def test_each_door_refuses_in_the_same_sentence_when_a_job_cannot_succeed(
    case: Case, site: Site, door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    words = site.refusal()
    assert case.words in words and "\n" not in words
    code = {422: 2, 404: 3}[case.status]
    for place in (["--local"], ["--redis", NOBODY]):
        capsys.readouterr()
        assert run(["tune", *site.options, *place]) == code
        assert capsys.readouterr() == ("", f"error: {words}\n")
    body = {key: value for key, value in site.request.to_json().items() if key not in LINES_FROM}
    answer = httpx2.post(f"{door.url}/v1/jobs", json={**body, "stream": {"prompts": [case.line]}})
    assert (answer.status_code, answer.json()["detail"]) == (case.status, words)
    with Client(door.url) as client, pytest.raises(SwiftoptError) as refused:
        client.submit(site.request, read_stream(site.request.stream))
    assert (str(refused.value), refused.value.exit_code) == (words, code)
    assert door.store.jobs.latest() == []


def test_check_loads_no_torch_when_it_reads_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    program = f"""
import sys
from swiftopt.core.requests import TuneRequest
from swiftopt.core.types import Prompt
from swiftopt.tasks.admission import check_tuning
check_tuning(TuneRequest({str(folder)!r}, "s"), [Prompt("1", "t", "w3 " * 100)])
sys.exit("torch" in sys.modules or "tokenizers" not in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_path_that_is_not_here_is_admitted_when_workers_may_be_elsewhere() -> None:
    prompts = [Prompt("1", "notes", FINE)]
    check_tuning(TuneRequest("/no/such/model", "s"), prompts, runs_elsewhere=True)
    with pytest.raises(SwiftoptError, match="speed graphs is for cuda"):
        check_tuning(TuneRequest("/no/such/model", "s", speed="graphs", device="cpu"), prompts, runs_elsewhere=True)
    with pytest.raises(SwiftoptError, match="nearest: smollm2-135m"):
        check_tuning(TuneRequest("smollm2-135", "s"), prompts, runs_elsewhere=True)


def test_paths_of_models_and_of_adapters_bases_lie_under_the_folders_for_models(
    door: Door, tmp_path: Path, unconfigured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, outside = tmp_path / "models", save(tmp_path / "outside")
    save(models / "base")
    (models / "link").symlink_to(outside)
    inside = [str(models / "base"), str(save_adapter(models / "fine", "../base", tiny_model("llama"), "q_proj"))]
    out = save_adapter(models / "out", "../../outside", tiny_model("llama"), "q_proj")
    adapter = save_adapter(tmp_path / "adapter", models / "base", tiny_model("llama"), "q_proj")
    request, prompts = TuneRequest(str(out), "s", max_new_tokens=40), [Prompt("1", "t", FINE)]
    check_tuning(request, prompts, queued=True)
    monkeypatch.setenv("SWIFTOPT_MODEL_FOLDERS", f"/no/such/folder:{models}")
    for name in (*inside, "smollm2-135m"):
        check_tuning(replace(request, model=name), prompts, queued=True)
    check_tuning(request, prompts)  # one that no request brought
    said = {
        str(outside): f"the model {outside} is outside the folders for models",
        str(models / "link"): f"the model {models / 'link'} is outside",
        f"{models}/../outside": "is outside",
        str(adapter): f"the model {adapter} is outside",
        str(out): f"the base ../../outside of the adapter {out} is outside",
        "/no/such/model": "the model /no/such/model is outside",
    }
    for name, words in said.items():
        answer = httpx2.post(f"{door.url}/v1/jobs", json={"model": name, "stream": {"prompts": [{"prompt": FINE}]}})
        assert answer.status_code == 422 and words in answer.json()["detail"]
        with pytest.raises(SettingsError, match=words.replace(".", r"\.")):
            check_tuning(replace(request, model=name), prompts, runs_elsewhere=True, queued=True)
    assert door.store.jobs.latest() == []


def test_prompts_of_an_adapter_are_checked_by_its_own_tokenizer(tmp_path: Path) -> None:
    save(tmp_path / "base", chat_template=CHAT_TEMPLATE)
    adapter = save_adapter(tmp_path / "adapter", "../base", tiny_model("llama"), "q_proj")
    request, chat = TuneRequest(str(adapter), "s", max_new_tokens=40), [Prompt("1", "t", turns=(FINE,))]
    check_tuning(request, chat)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "base" / name, adapter / name)
    with pytest.raises(SwiftoptError, match="'1' is a chat, but"):
        check_tuning(request, chat)
