"""The documentation agrees with the code: pages match what they describe, commands parse, examples run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import click
import pytest
import walkthrough
from pages import (
    CLI,
    EXIT_CODES,
    RENEW,
    SERVING,
    cli_page,
    deviations,
    manual_page,
    models_page,
    named_command,
    serving_page,
)
from serving import serving, until_ready
from tiny_files import save

import swiftopt
from swiftopt.bench.decode import SCHEMA
from swiftopt.bench.tables import (
    BEGIN,
    END,
    NO_RESULTS,
    PAGE,
    README,
    charts,
    main,
    out_of_date,
    refresh,
    short_table,
    table,
)
from swiftopt.core.errors import InvalidInput, SwiftoptError
from swiftopt.core.requests import ServedModel
from swiftopt.decoding.methods import METHODS
from swiftopt.engines.peers import SCHEMA as PEERS_SCHEMA
from swiftopt.models.families import FAMILIES
from swiftopt.models.text_parts import MULTIMODAL
from swiftopt.papers import tables as papers
from swiftopt.papers.training.settings import HeadSettings, ProbeSettings, TrainingSettings
from swiftopt.server.app import create_app
from swiftopt.server.engines import Engines
from swiftopt.terminal.output import INTERRUPTED
from swiftopt.worker.queue import JobService

ROOT = Path(swiftopt.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# --- what a newcomer reads


def test_readme_is_read_at_a_glance() -> None:
    text = text_of("README.md")
    prose = re.sub(r"^(\|.*|```.*?^```)$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 80 and len(prose.split()) <= 350
    assert fences(README, "")[0].split("\n") == ["make demo", "make test", ""]
    assert not re.search(r"\b(until \d{4}-|since then|no longer|earlier versions?)", prose)


def test_walkthrough_runs_every_runnable_block() -> None:
    taken = list(walkthrough.steps())
    assert [step.text for step in taken[:2]] == ["make demo", "make test"] and set(walkthrough.SKIPPED) == {"make test"}
    pages = [ROOT / page for page in walkthrough.PAGES]
    assert [step.text for step in taken if step.language] == [
        block for page in pages for block in fences(page, "python")
    ]
    begun = {" ".join(step.text.split()[:2]) for step in taken}
    assert begun >= {"swiftopt serve", "swiftopt tune", "swiftopt generate", "swiftopt layers", "swiftopt compare"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 3", "exit code 3"),
        ("make demo", "61 lines"),
        ("sleep 9", "not done 1 s"),
        ("swiftopt serve --oops", "come up"),
    ],
)
def test_walkthrough_ends_at_the_command_that_fails(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Makefile").write_text("demo:\n\t@seq 61\n")
    monkeypatch.setattr(walkthrough, "LIMIT_S", 1.0)
    with ExitStack() as running, pytest.raises(SystemExit, match=reason):
        walkthrough.Walk(tmp_path, os.environ["PATH"], "8000", running).take(walkthrough.Step("a.md", "", text))


# --- the command line's page


def test_command_page_equals_the_generators_output() -> None:
    assert CLI.read_text(encoding="utf-8") == cli_page(), RENEW


def test_command_page_does_not_depend_on_terminal_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cli_page()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("SWIFTOPT_MAX_STEPS", "7")
    assert cli_page() == before


def test_command_page_lists_every_exit_code() -> None:
    def codes(error: type[SwiftoptError]) -> set[int]:
        return {error.exit_code}.union(*map(codes, error.__subclasses__()))

    assert codes(SwiftoptError) | {0, INTERRUPTED} == set(EXIT_CODES)


# --- what the pages say of the code


def command_lines() -> list[tuple[str, list[str]]]:
    """Return (page, words) of every `swiftopt …` line in a fence without a language."""
    blocks = [(path.name, block) for path in PAGES for block in fences(path, "")]
    lines = [(name, line) for name, block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [(name, shlex.split(line)[1:]) for name, line in lines if line.startswith("swiftopt ")]


@pytest.mark.parametrize(("where", "words"), command_lines(), ids=lambda value: str(value)[:60])
def test_command_in_the_docs_parses(where: str, words: list[str]) -> None:
    context, words = named_command(words)
    context.command.parse_args(context, words)


NAMED = re.compile(r"(?:`|<code>)swiftopt (?!serves )([a-z][^`<]*)(?:`|</code>)")
# What stands for the parts of a command that are known at run time only.
FILLED = {"kind": "heads", "command": "layers search", "verb": "cancel", "option": ""}


def literals(path: Path) -> Iterator[str]:
    """Return every string in a file's code, with its inserted values filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            filled = (FILLED.get(ast.unparse(part.value), "VALUE") for part in node.values if not is_text(part))
            yield "".join(str(part.value) if is_text(part) else next(filled) for part in node.values)
        elif is_text(node):
            yield str(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("backend.command"):
            words = (str(part.value) if is_text(part) else FILLED.get(ast.unparse(part), "VALUE") for part in node.args)
            yield f"`swiftopt {' '.join(words)}`"


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def named_commands() -> set[tuple[str, str]]:
    """Return (file, command line without `swiftopt`) of every command that messages, pages and the manual name."""
    texts = [(path, text_of(str(path.relative_to(ROOT)))) for path in [*PAGES, *ROOT.glob("server/**/*.html")]]
    packages = [path.parent for path in sorted(ROOT.glob("*/__init__.py")) if path.parent.name != "bench"]
    rooms = (path for package in packages for path in package.glob("**/*.py"))
    texts += [(path, text) for path in rooms for text in literals(path)]
    return {
        (path.name, words.replace("\n", " "))
        for path, text in texts
        for words in NAMED.findall(text)
        if "|" not in words
    }


@pytest.mark.parametrize(("where", "line"), sorted(named_commands()), ids=lambda value: str(value)[:60])
def test_commands_named_in_texts_exist_with_their_options(where: str, line: str) -> None:
    words = [word for word in shlex.split(line.replace("…", "")) if word not in ("…", "...")]
    context, words = named_command(words)
    parser = context.command.make_parser(context)
    try:
        parser.parse_args([*words])
    except click.BadOptionUsage:  # an option is named without its value
        parser.parse_args([*words, "VALUE"])


def test_messages_templates_and_docs_name_commands() -> None:
    places = {where for where, _ in named_commands()}
    assert {"operations.md", "jobs_part.html", "requests.py", "jobs.py"} <= places


def test_docs_have_commands_of_every_kind() -> None:
    assert {words[0] for _, words in command_lines()} >= {"tune", "generate", "layers", "bench"}


def test_test_named_in_the_docs_exists() -> None:
    named = {name for path in PAGES for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))}
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 10 and sorted(name for name in named if f"def {name}(" not in sources) == []


def test_link_in_the_docs_leads_to_a_file() -> None:
    broken = []
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_file_named_in_the_docs_exists() -> None:
    named = {
        name for path in PAGES for name in re.findall(r"`([a-z_]+/[\w./]+\.py)`", path.read_text(encoding="utf-8"))
    }
    assert named and sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_manual_quotes_every_deviation() -> None:
    told = text_of("docs/how-it-works.md")
    assert len(list(deviations())) > 20
    assert [(file, said) for file, said in deviations() if not said.endswith((".", ")")) or len(said) < 40] == []
    assert manual_page(told) == told, RENEW


def test_tables_of_thoughts_and_calls_equal_the_parsers_forms() -> None:
    told = SERVING.read_text(encoding="utf-8")
    assert "| models | a call is | body |" in told and serving_page(told) == told, RENEW


def test_models_page_has_a_row_per_supported_type() -> None:
    told = text_of("docs/models.md")
    rows = re.findall(r"^\| `(\w+)` \|", told.partition("## Architectures")[2].partition("\n## ")[0], re.MULTILINE)
    assert rows == sorted({*FAMILIES, *MULTIMODAL})
    assert models_page(told) == told, RENEW
    assert f"which {len(rows)} model types load" in text_of("README.md")


def test_manual_explains_every_word_of_the_types() -> None:
    words = re.findall(r"^\|[^|]+\| `(\w+)`", text_of("core/types.py"), re.MULTILINE)
    assert len(words) == 13 and [word for word in words if f"| `{word}` |" not in text_of("docs/how-it-works.md")] == []


def test_architecture_page_lists_every_package() -> None:
    rooms = text_of("docs/architecture.md").partition("## The rooms")[2].partition("\n## ")[0]
    known = [
        name for line in re.findall(r"^\| ([^|]+) \|", rooms, re.MULTILINE) for name in re.findall(r"`(\w+)/`", line)
    ]
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    assert sorted(known) == sorted([*packages, "deploy", "docker", "examples", "docs", "tests"])


# --- the manual as a site


def test_pages_are_read_in_one_order() -> None:
    site = re.findall(r"- ([\w-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert site == ["README.md", *re.findall(r"^\| \[([\w-]+\.md)\]", text_of("docs/README.md"), re.MULTILINE)]
    assert sorted(site) == sorted(path.name for path in ROOT.glob("docs/*.md"))


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the site's tools are missing: run make docs")
def test_site_is_built_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) == len(list(ROOT.glob("docs/*.md"))) + 1  # and the page of what was not found
    loads = r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)"""
    assert {name: found for name, text in pages.items() if (found := re.findall(loads, text))} == {}
    styles = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.css"))
    assert re.findall(r"""(?:url\(|@import )["']?(?:https?:)?//[^)"']+""", styles) == []


# --- the page of the methods


def method_sections() -> dict[str, str]:
    """Return the text of each method's section by name, in the page's order."""
    found = re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## |\Z)", text_of("docs/methods.md"), re.MULTILINE | re.DOTALL)
    assert len(found) == len(dict(found))
    return dict(found)


def quoted_defaults(section: str, what: str = "setting") -> dict[str, Any]:
    """Return the default of each setting from the table `setting | default | meaning`."""
    table = section.partition(f"| {what} | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    return {name: None if default == "none" else json.loads(default) for name, default in rows}


def test_methods_page_has_a_section_and_a_row_per_method() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| lossy|^\| `([\w-]+)` \| lossless", text_of("docs/methods.md"), re.MULTILINE)
    assert list(method_sections()) == list(METHODS) == [lossy or lossless for lossy, lossless in rows]


@pytest.mark.parametrize("name", METHODS)
def test_methods_page_states_promise_needs_and_source_of_each(name: str) -> None:
    info, section = METHODS[name], method_sections()[name]
    (row,) = re.findall(rf"^\| `{name}` \| (\w+) \| ([^|]+) \|", text_of("docs/methods.md"), re.MULTILINE)
    assert row[0] == ("lossy" if info.lossy else "lossless")
    assert section.lstrip().startswith("**Lossy.**") == info.lossy
    assert ("Guarantee: lossy" in section, "Guarantee: lossless" in section) == (info.lossy, not info.lossy)
    words = {"layer_set": "a layer set", "heads": "heads", "probe": "a probe", "costs": "measured costs"}
    needs = ["a smaller model or a layer set"] if info.drafts_with_model else [words[need] for need in info.needs]
    assert row[1].partition(" (")[0] == (needs or ["nothing"])[0]
    assert info.source in section or not info.source.startswith("arXiv")


@pytest.mark.parametrize("name", METHODS)
def test_methods_page_quotes_the_defaults_of_the_code(name: str) -> None:
    quoted, defaults = quoted_defaults(method_sections()[name]), METHODS[name].settings().to_json()
    assert quoted == {key: defaults.get(key, "no such setting") for key in quoted}
    # SWIFT's section leaves out what only its search reads, and the probe's refers to AdaSPEED's.
    assert sorted(quoted) == sorted(defaults) or name in ("swift", "adaspeed-probe")


@pytest.mark.parametrize(("name", "settings"), [("adadecode", HeadSettings()), ("adaspeed-probe", ProbeSettings())])
def test_methods_page_quotes_the_defaults_of_training(name: str, settings: TrainingSettings) -> None:
    quoted, defaults = quoted_defaults(method_sections()[name], "training setting"), settings.to_json()
    assert quoted and quoted == {key: defaults.get(key, "no such setting") for key in quoted}


# --- Python examples


def examples() -> list[Any]:
    found = [(path.name, block) for path in PAGES for block in fences(path, "python")]
    return [pytest.param(block, id=f"{name}-{number}") for number, (name, block) in enumerate(found)]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that stands in for SmolLM2 in the examples, with a layer set stored for it."""
    folder = save(tmp_path_factory.mktemp("tiny"))
    record = swiftopt.LayerSetRecord(str(folder), "code", swiftopt.LayerSet(4, frozenset({1}), frozenset({2})))
    with swiftopt.Store.open() as store:
        store.add_layer_set(record)
    return folder


@pytest.fixture(scope="module")
def server_url(tiny_folder: Path) -> Iterator[str]:
    """A server over the same database that decodes with the tiny model."""
    model = ServedModel(str(tiny_folder), str(tiny_folder), dtype="float32", tune=False)
    with swiftopt.Store.open() as store:
        app = create_app(store, JobService(store, None), engines=Engines([model], most_waiting=8))
        with serving(app) as url:
            until_ready(url)
            yield url


@pytest.mark.parametrize("example", examples())
def test_python_example_runs(
    example: str, tiny_folder: Path, server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = example.replace(HUB_ID, str(tiny_folder)).replace("smollm2-135m", str(tiny_folder))
    code = code.replace("http://127.0.0.1:8000", server_url)
    assert code != example and len(ast.parse(example).body) <= 10
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out.strip()


# --- the table of results


def result(**changes: Any) -> dict[str, Any]:
    """Return a result file's object with a faster and a slower method; the figures are made up."""

    def method(name: str, ratio: float, **more: Any) -> dict[str, Any]:
        figures = {"tok_s": 10 * ratio, "ratio": ratio, "ratio_interval": [ratio - 0.1, ratio + 0.1]}
        counts = {"acceptance_rate": None, "mean_generated_length": None, "identical": 3, "of": 4}
        return {"method": name, **figures, **counts, "optimise_seconds": 0.0, **more}

    swift = method("swift", 0.8, acceptance_rate=0.91, mean_generated_length=2.5)
    report = {
        **{"schema": SCHEMA, "model": "tiny", "device": "cpu|x", "dtype": "float32", "base": "plain"},
        **{"max_new_tokens": 16, "prompts": 4, "results": [method("plain", 1.0), swift, method("hf-lookup", 1.3)]},
    }
    command = "swiftopt bench decode --model tiny --stream a/notes.jsonl --limit 4"
    made = {"date": "2026-01-02", "commit": "abc1234", "command": command, "note": "Busy.", "report": report}
    return {**made, **changes}


def put(folder: Path, name: str, value: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("page", "made"),
    [(PAGE, table), (README, short_table), (papers.PAGE, papers.table)],
    ids=["results", "readme", "papers"],
)
def test_table_agrees_with_the_result_files(page: Path, made: Callable[[], str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert refresh(text, made()) == text, "run: python -m swiftopt.bench.tables --write, or bench.papers --write"


@pytest.mark.parametrize("entry", papers.PAPERS, ids=lambda entry: entry.key)
def test_commands_of_repeated_tables_parse(entry: papers.Repeated) -> None:
    assert (ROOT / entry.example).exists()
    if entry.program == "swiftopt":
        check_words(papers.command_of(entry, "smollm2-135m", None, 6))
    if entry.first:
        check_words([*entry.first.split(), "--model", "smollm2-135m", "--stream", entry.example])


def test_parts_of_a_papers_method_are_made_on_lines_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a stream's path is the caller's, not one in the repository
    Path("stream.jsonl").write_text("a\nb\nc\n", encoding="utf-8")
    assert papers.training_lines(Path("stream.jsonl"), 2) == ["c\n"]
    assert papers.training_lines(Path("stream.jsonl"), 3) == ["a\n", "b\n", "c\n"]  # a short stream has no others


def check_words(words: list[str]) -> None:
    context, words = named_command(words)
    context.command.make_context(context.info_name, words, context.parent)  # a usage error would be raised


def test_charts_of_readme_and_manual_match_the_result_files() -> None:
    found = charts()
    assert [chart.path.name for chart in found] == ["served.svg", "agents.svg", "rivals.svg"]
    assert [chart.path for chart in found if not chart.is_current] == [], "run: python -m swiftopt.bench.tables --write"
    assert all(f"](docs/{name}.svg)" in text_of("README.md") for name in ("served", "agents"))
    assert "](rivals.svg)" in text_of("docs/performance.md")
    served, agents, rivals = (chart.path.read_text(encoding="utf-8") for chart in found)
    assert f">{found[0].report['prompts']} requests" in served.replace("· ", ">") and ">plain decoding<" in served
    assert (
        all(f">{row['way']}<" in agents for row in found[1].report["summary"]) and ">seconds of a turn, mean<" in agents
    )
    assert all(f">{row['row']}<" in rivals for row in found[2].report["results"])


def test_chart_is_out_of_date_when_its_data_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chart = next(chart for chart in charts() if chart.path.name == "rivals.svg")
    mine = replace(chart, path=tmp_path / "rivals.svg")
    assert not mine.is_current
    mine.write()
    assert mine.is_current
    assert not replace(mine, report={**mine.report, "prompts": 7}).is_current
    monkeypatch.setattr("swiftopt.bench.tables.RIVALS_CHART", tmp_path / "absent.svg")
    assert out_of_date() == [tmp_path / "absent.svg"]
    assert main(["--check"]) == 1


def test_table_shows_every_row_even_slower_ones(tmp_path: Path) -> None:
    lines = table(put(tmp_path, "2026-01-02-abc1234-cpu.json", result())).splitlines()
    where = "cpu\\|x, float32 | [abc1234](results/2026-01-02-abc1234-cpu.json) |"
    assert lines[2] == f"| tiny | notes, 4 prompts, 16 tokens | plain | 10.0 | 1 (base) | – | – | 3/4 | {where}"
    assert "| swift | 8.0 | 0.80x [0.70-0.90] | 0.91 | 2.50 | 3/4 |" in lines[3]
    assert "| hf-lookup | 13.0 | 1.30x [1.20-1.40] | – | – | 3/4 |" in lines[4]
    assert lines[6] == f"- 2026-01-02-abc1234-cpu: commit abc1234, 2026-01-02, `{result()['command']}`. Busy."
    assert len(lines) == 7


def test_short_table_has_the_rows_that_a_headline_names(tmp_path: Path) -> None:
    row = {"row": "swiftopt/plain", "tok_s": 8.9, "decode_tok_s": None, "ratio": 1.1, "ratio_interval": [1.0, 1.2]}
    row |= {"peak_bytes": 3.7e9, "same_weights": True, "equal_to": None, "weights": "BF16"}
    rows = [row, {**row, "row": "swiftopt/best", "tok_s": 22.8}, {**row, "row": "other/plain"}]
    report = {"schema": PEERS_SCHEMA, "model": "tiny", "device": "EPYC", "prompts": 6, "max_new_tokens": 128}
    report |= {"base": "other/plain", "results": rows}
    put(tmp_path, "2026-01-01-fff0000-cpu.json", result(commit="fff0000"))
    named = ["swiftopt/plain", "swiftopt/best"]
    put(tmp_path, "2026-01-02-abc1234-cpu.json", result(headline=named, report=report))
    above, _, header, _, *lines = short_table(tmp_path).splitlines()
    assert above == "tiny, 6 prompts, 128 tokens, EPYC ([abc1234](bench/results/2026-01-02-abc1234-cpu.json)):"
    assert header.startswith("|  | tok/s | decoding alone | ratio [95 %] |")
    assert [line[:49] for line in lines] == [
        "| swiftopt/best | 22.8 | – | 1.10x [1.00-1.20] | ",
        "| swiftopt/plain | 8.9 | – | 1.10x [1.00-1.20] | ",
    ]
    assert short_table(tmp_path / "absent") == NO_RESULTS


def test_table_shows_the_commands_task_and_a_running_search(tmp_path: Path) -> None:
    searching = result(command="swiftopt bench decode --stream a.jsonl --task code --model tiny", note="")
    searching["report"]["results"][1]["optimise_seconds"] = 2.5
    shown = table(put(tmp_path, "x.json", searching))
    assert "| code, 4 prompts, 16 tokens | swift, searching |" in shown and shown.endswith("--model tiny`.")


def test_table_names_the_settings_of_a_method(tmp_path: Path) -> None:
    told = "swiftopt compare --stream a.jsonl --set swift.stop_threshold=0.5 --set other.x=1"
    shown = table(put(tmp_path, "x.json", result(command=told)))
    assert "| swift, stop_threshold=0.5 | 8.0 |" in shown and "| hf-lookup | 13.0 |" in shown


def test_table_names_the_file_of_a_given_layer_set(tmp_path: Path) -> None:
    shown = table(
        put(tmp_path, "x.json", result(command="swiftopt bench decode --stream a.jsonl --layer-set b/c.json"))
    )
    assert "| a, 4 prompts, 16 tokens, the set of c.json | swift |" in shown


def test_table_without_files_says_that_nothing_is_published(tmp_path: Path) -> None:
    assert table(tmp_path) == table(tmp_path / "absent") == NO_RESULTS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ([1], "it lacks"),
        ({"date": "2026-01-02"}, r"it lacks \['commit', 'command', 'note', 'report'\]"),
        (result(report={"schema": "other/1"}), "schema 'other/1'"),
        (result(report=3), "schema None"),
    ],
    ids=["broken", "list", "short", "other-schema", "number"],
)
def test_file_that_is_not_a_result_is_named(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=rf"odd\.json.*{words}"):
        table(put(tmp_path, "odd.json", content))


def test_refresh_replaces_only_the_text_between_the_markers() -> None:
    once = refresh(f"head\n{BEGIN}\nold\n{END}\ntail\n", "new")
    assert once == f"head\n{BEGIN}\nnew\n{END}\ntail\n" and refresh(once, "new") == once


@pytest.mark.parametrize("text", ["", BEGIN, END, END + BEGIN, BEGIN + BEGIN + END, BEGIN + END + END])
def test_refresh_refuses_a_page_without_markers(text: str) -> None:
    with pytest.raises(InvalidInput, match="once each"):
        refresh(text, "new")


def test_table_is_printed_by_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and capsys.readouterr().out == table() + "\n"
