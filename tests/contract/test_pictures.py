"""Pictures of commands: both formats with what was found, refused before any work where they cannot be written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_files import save

from swiftopt.bench.charts import draw_serving, draw_throughput
from swiftopt.bench.tables import RESULTS
from swiftopt.cli.main import run
from swiftopt.core.events import TaskFinished
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.types import Timings, Trial, Verdict
from swiftopt.terminal import charts, program
from swiftopt.terminal.charts import Pictures, draw_layer_sets, draw_tuning

PROMPTS = ["--model", "tiny", "--stream", "notes.jsonl"]
SHORT = ["--max-new-tokens", "12"]
TRAIN = [*PROMPTS, *SHORT, "--epochs", "1"]
TUNE = ["tune", *PROMPTS, "--max-new-tokens", "40", "--context-window", "8", "--max-steps", "20"]
SHIFT = ["--prompts", "3", "--context-window", "8", "--max-steps", "20", "--deterministic"]
RUNS: dict[str, tuple[list[str], list[str]]] = {  # a command that draws, and what its picture must say
    "tune": (TUNE, ["tiny / notes", "attention", "MLP", "best so far", "verdict"]),
    "compare": (["compare", *PROMPTS, *SHORT, "--methods", "jacobi"], ["tiny / notes", "jacobi", "plain", "1.00x"]),
    "bench decode": (["bench", "decode", *PROMPTS, *SHORT, "--methods", "plain,jacobi"], ["tiny", "jacobi", "1.00x"]),
    "bench ablate": (
        ["-m", "swiftopt.papers.ablate", "swift-window", *PROMPTS, *SHORT],
        ["tiny · ", "tok/s", "variant's base"],
    ),
    "bench throughput": (
        ["bench", "throughput", *PROMPTS, *SHORT, "--concurrency", "1,2", "--method", "jacobi"],
        ["tiny", "drafting", "plain batching", "requests at once"],
    ),
    "bench search": (
        ["-m", "swiftopt.bench.search", *PROMPTS, "--max-new-tokens", "30", "--window", "8", "--passes", "8"],
        ["tiny", "swift", "candidate passes"],
    ),
    "bench stream-shift": (
        ["-m", "swiftopt.bench.stream_shift", *PROMPTS, *SHORT, *SHIFT],
        ["tiny", "notes", "code", "adapting"],
    ),
    "heads train": (["heads", "train", *TRAIN], ["tiny / mixed · heads", "KL to the last layer"]),
    "probe train": (["probe", "train", *TRAIN], ["tiny / mixed · probe", "cross-entropy"]),
}
OTHERS = {  # drawn in the tests of the commands themselves, which need other programs
    "layers show": ["layers", "show", "tiny/notes"],
    "heads show": ["heads", "show", "tiny/notes"],
    "probe show": ["probe", "show", "tiny/notes"],
    "bench serve": ["bench", "serve", *PROMPTS],
    "bench peers": ["bench", "peers", *PROMPTS],
    "bench agents": ["bench", "agents", "--model", "tiny"],
}
EVERY = {**{name: args for name, (args, _) in RUNS.items()}, **OTHERS}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def home(tmp_path: Path, own_cache: Path, unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a database and a cache of its own."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(own_cache / "kernels")
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(args: list[str]) -> int:
    """Run a command of the program, or that of a module, as `python -m` does."""
    return program.run(import_module(args[1]).command, args[2:]) if args[0] == "-m" else run(args)


def words_of(svg: Path) -> str:
    """All text of a picture, and its width and height are what they should be."""
    root = ElementTree.parse(svg).getroot()
    assert root.attrib["width"] == "720pt"
    return "\n".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))


def check(png: Path, svg: Path, words: list[str]) -> str:
    """Both are pictures of the same size, and the words are in the second."""
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG") and int.from_bytes(head[16:20], "big") == 1500
    found = words_of(svg)
    assert [word for word in words if word not in found] == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_command_draws_both_formats_of_what_it_found(
    name: str, tiny: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "tiny").symlink_to(tiny)
    tasks = ["notes", "code"] if "shift" in name or "train" in name else ["notes"]
    lines = [json.dumps({"task": task, "prompt": f"w{i} w{i + 1} w{i}"}) for task in tasks for i in range(4)]
    (home / "notes.jsonl").write_text("\n".join(lines) + "\n")
    args, words = RUNS[name]
    code = started([*args, "--png", "x.png", "--svg", "x.svg", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert json.loads(out)["schema"].startswith("swiftopt.")
    assert "drawn to x.png\ndrawn to x.svg\n" in err
    check(home / "x.png", home / "x.svg", words)


@pytest.mark.parametrize("option", ["--png", "--svg"])
@pytest.mark.parametrize("name", EVERY)
def test_file_that_cannot_be_written_is_refused_before_any_work(
    name: str, option: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started([*EVERY[name], option, "no/folder/x"]) == 1  # there is neither model nor stream
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: cannot write no/folder/x: no such file or directory; choose another file")
    assert list(home.iterdir()) == [home / "cache"]


def test_files_are_left_as_they_are_until_there_is_a_picture(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "old.png").write_bytes(b"old")
    (home / "link.svg").symlink_to("new.svg")
    assert run([*EVERY["bench decode"], "--png", "old.png", "--svg", "link.svg"]) != 0  # there is no stream
    assert "notes.jsonl" in capsys.readouterr().err
    assert (home / "old.png").read_bytes() == b"old"
    assert (home / "link.svg").is_symlink() and not (home / "new.svg").exists()
    assert run([*EVERY["bench decode"], "--png", "x", "--svg", "x"]) == 2
    assert "--png and --svg both name x" in capsys.readouterr().err
    (home / "folder").mkdir()
    assert run([*EVERY["bench decode"], "--svg", "folder"]) == 1
    assert "cannot write folder: is a directory" in capsys.readouterr().err


def test_detached_job_draws_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TUNE, "--redis", "redis://127.0.0.1:1", "--detach", "--svg", "x.svg"]) == 2
    assert "remove --png and --svg" in capsys.readouterr().err
    assert not (home / "x.svg").exists()


def report_of(name: str) -> dict[str, Any]:
    (path,) = RESULTS.glob(f"*-{name}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["report"]
    return found


@pytest.mark.parametrize(
    ("draw", "name", "words"),
    [
        (charts.draw_ratios, "bc56a9b-epyc2-smollm2-all", ["1.82x · 72.9 tok/s", "layerskip", "hatched: lossy"]),
        (charts.draw_ratios, "83d4d46-epyc2-qwen-rivals", ["2.80x · 22.8 tok/s", "llama-cpp/draft", "other weights"]),
        (draw_serving, "067f1c8-epyc2-qwen-serve", ["98 requests of 64 tokens", "98 of 98 equal"]),
        (draw_throughput, "9c03b8d-epyc2-qwen-throughput", ["1.16x", "0.97x", "16"]),
    ],
    ids=["compare", "peers", "serve", "throughput"],
)
def test_picture_has_the_numbers_of_its_report_and_is_the_same_each_time(
    draw: Callable[..., None], name: str, words: list[str], tmp_path: Path
) -> None:
    report = {**report_of(name), "model": "/some/folder/a model of $5"}
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        draw(report, Pictures(tmp_path / folder / "x.png", tmp_path / folder / "x.svg"))
    found = check(tmp_path / "first" / "x.png", tmp_path / "first" / "x.svg", ["a model of $5", *words])
    assert "/some/folder" not in found
    for suffix in ("png", "svg"):
        first, second = ((tmp_path / folder / f"x.{suffix}").read_bytes() for folder in ("first", "second"))
        assert first == second


def test_several_tasks_are_drawn_with_the_formats_of_their_drafts(tmp_path: Path) -> None:
    part = LayerSet(12, frozenset({3}), frozenset(), (("attn", "int4-64"), ("attn:5", "stored"), ("mlp", "int8")))
    trials = [Trial(step, part, "random", 0.5, 1.0 + 0.1 * step, adopted=step == 2) for step in range(4)]
    settings = {"objective": "expected_speedup"}
    found = [(LayerSetRecord("folder/m", task, part, settings=settings), trials) for task in ("notes", "code")]
    draw_layer_sets([*found, (LayerSetRecord("folder/m", "bare", part), [])], Pictures(svg=tmp_path / "x.svg"))
    said = words_of(tmp_path / "x.svg").splitlines()
    assert said.count("best so far") == said.count("int4") == said.count("int8") == said.count("kept") == 1
    assert said.count("expected speedup") == 2 and "m" in said
    assert [line.split(" · ")[0] for line in said if "skipped 1 of" in line] == ["notes", "code", "bare"]


def test_axis_of_matchness_ends_at_one(tmp_path: Path) -> None:
    drafts = LayerSet(12, frozenset({3}))
    trials = [Trial(step, drafts, "random", 1.0, 1.0) for step in range(30)]
    record = LayerSetRecord("m", "notes", drafts, settings={"objective": "matchness"})
    draw_layer_sets([(record, trials)], Pictures(svg=tmp_path / "x.svg"))
    numbers = [float(number) for number in re.findall(r"^\d\.\d+$", words_of(tmp_path / "x.svg"), re.M)]
    assert len(numbers) > 1 and max(numbers) == 1


def test_tuning_shows_the_speed_along_its_stream_and_where_the_time_went(tmp_path: Path) -> None:
    trials = (Trial(0, LayerSet(12, frozenset({3})), "random", 0.5, 1.1),)
    record = LayerSetRecord("folder/m", "notes", LayerSet(12, frozenset({3})), version=2)
    seconds = Timings(1.0, 5.0, 13.0, 1.0)
    task = TaskFinished("notes", record, Verdict("use"), "", trials, seconds, 3, 90, 0.5, 4.0, 6.0, (3.0, 5.0, 6.0))
    draw_tuning([task], Pictures(tmp_path / "x.png", tmp_path / "x.svg"))
    words = ["m / notes · version 2", "plain decoding", "mean of 4 prompts", "draft 25.0 %", "verify 65.0 %"]
    check(tmp_path / "x.png", tmp_path / "x.svg", ["optimise 5.0 %", "skipped 1 of", *words])


def colours_of(artist: Any) -> set[str]:
    """The colours of a drawn line, bar, box or cloud of points, as #rrggbb."""
    from matplotlib.colors import to_hex

    found = artist.get_color() if hasattr(artist, "get_color") else artist.get_facecolor()
    return {to_hex(colour) for colour in ([found] if isinstance(found, str | tuple) else found)}


@pytest.mark.parametrize("names", [["notes"], ["code", "notes", "summary"]])
def test_every_colour_of_a_tuning_has_one_meaning_which_the_legend_tells(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = (("attn", "int4-64"), ("attn:5", "fp8"), ("attn:6", "stored"), ("mlp", "int8"))
    drafts = LayerSet(12, frozenset({3}), frozenset(), formats)
    trials = tuple(Trial(step, drafts, "random", 0.5, 1.0, adopted=step == 2) for step in range(9))
    tasks = [
        TaskFinished(
            name,
            LayerSetRecord("m", name, drafts),
            Verdict("use"),
            "",
            trials,
            Timings(1.0 + number, 5.0, 13.0, 1.0),
            *(6, 90, 0.5, 4.0, 6.0, (3.0, 5.0, 6.0, 5.5, 5.0, 6.5)),
        )
        for number, name in enumerate(names)
    ]
    drawn: list[Any] = []
    draw_legend = charts.legend
    monkeypatch.setattr(charts, "legend", lambda *axes: (drawn.extend(axes), draw_legend(*axes)))
    draw_tuning(tasks, Pictures(tmp_path / "x.png"))
    (legend,) = drawn[0].figure.legends
    labels = [text.get_text() for text in legend.texts]
    told = dict(zip(labels, map(colours_of, legend.legend_handles), strict=True))
    assert sorted(labels) == sorted(
        [
            *("left out", "int4", "fp8", "kept", "int8", "a trial", "best so far", "adopted"),
            *("tok/s of a prompt", "mean of 4 prompts", "plain decoding", "optimise", "draft", "verify", "other"),
        ]
    )
    assert told.pop("tok/s of a prompt") == told["mean of 4 prompts"], "points and their mean are one thing"
    colours = [colour for found in told.values() for colour in found]
    assert len(colours) == len(set(colours)) == len(told)
    artists = [artist for axes in drawn for artist in (*axes.lines, *axes.patches, *axes.collections)]
    assert {colour for artist in artists for colour in colours_of(artist)} == set(colours)
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= drawn[0].figure.bbox.x1 and box.y0 >= 0
    lowest = min(axes.get_tightbbox().y0 for axes in drawn)
    assert box.y1 <= lowest + 1, "it covers no panel"


def test_names_that_a_font_or_a_file_lacks_make_no_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    record = LayerSetRecord("a\x07b", "\u4f1a\u8a71 <b>& \u05e9\u05dc\u05d5\u05dd", LayerSet(4))
    draw_layer_sets([(record, [])], Pictures(tmp_path / "x.png", tmp_path / "x.svg"))
    check(tmp_path / "x.png", tmp_path / "x.svg", [f"a\ufffdb / {record.task}"])
    assert capsys.readouterr().err == f"drawn to {tmp_path}/x.png\ndrawn to {tmp_path}/x.svg\n" and not recwarn.list


def test_report_without_any_ratio_is_still_a_picture(tmp_path: Path) -> None:
    row = {"method": "jacobi", "ratio": None, "ratio_interval": None, "tok_s": None}
    report = {"model": "m", "base": "plain", "prompts": 1, "max_new_tokens": 3, "results": [row]}
    charts.draw_ratios(report, Pictures(svg=tmp_path / "x.svg"))
    assert "ratio to plain, with its 95 % interval" in words_of(tmp_path / "x.svg")


def test_map_has_the_numbers_of_experts_in_its_cells(tmp_path: Path) -> None:
    few = LayerSet(5, frozenset({2}), frozenset({3}), experts=(("mlp", 17), ("mlp:1", 16)))
    for layer_set, n_cells in ((few, 4), (LayerSet(5), 0)):
        draw_layer_sets([(LayerSetRecord("folder/m", "t", layer_set), [])], Pictures(svg=tmp_path / "x.svg"))
        text = (tmp_path / "x.svg").read_text()
        assert len(re.findall(">1[67]<", text)) == n_cells and ("experts" in text) == bool(n_cells)
