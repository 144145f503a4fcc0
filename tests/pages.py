"""The pages that are made of the program; tests compare them with it.

    python tests/pages.py

writes docs/cli.md from what `--help` prints, docs/openapi.json from the server's routes, and docs/api.md from both that
document and its own beginning, which is written by hand. The table of departures in docs/how-it-works.md is made of the
`DEVIATION:` comments of the code, that of types of models in docs/models.md of models/families.py, those of thoughts
and calls in docs/serving.md of core/answer_forms.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from swiftopt.cli.main import LONG_NAMES, PREFIX, TOML_FILE, ProgramSettings, swiftopt
from swiftopt.core.answer_forms import FORMS, AnswerForm
from swiftopt.models.families import model_types
from swiftopt.server.openapi import bare_app
from swiftopt.terminal.commands import ALL_OPTIONS
from swiftopt.terminal.output import INTERRUPTED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CLI, API, SNAPSHOT, MANUAL = DOCS / "cli.md", DOCS / "api.md", DOCS / "openapi.json", DOCS / "how-it-works.md"
MODELS, SERVING = DOCS / "models.md", DOCS / "serving.md"
MADE = r"(<!-- {0} -->\n).*?(\n<!-- /{0} -->)"  # A part of a page that is written by hand elsewhere.
# What a docstring goes on with behind the words on a departure.
ENDINGS = ("Args:", "Returns:", "Raises:", "Source:", "Yields:", '"""')
RENEW = "if the change is meant, run: python tests/pages.py"
WIDTH = 80  # columns, whatever the terminal has

EXIT_CODES = {
    0: "done",
    1: "something failed: the database or an output file cannot be used, or a check of `doctor`",
    2: "the input cannot be used: an option, a stream's line, a layer set, a model's architecture",
    3: "not found: a model, a file, a stored layer set",
    4: "a job that was followed has failed",
    5: "a job that was followed was cancelled",
    6: "Redis or the server does not answer, or refuses the key",
    7: "the job is not in a state for that, or an idempotency key was used for something else",
    INTERRUPTED: "Ctrl-C; what was finished until then is kept, and a job in a queue goes on",
}

INTRODUCTION = """\
# Command line

This page is written by `python tests/pages.py`; a test compares the two, so change the help texts instead. It lists
all options. Where a command has many, `--help` lists the common ones and `--help-all` all of them.

Results go to stdout; progress, remarks and errors go to stderr. `--json` makes the result one JSON object with a
`schema` key (`generate --stream`: one object per prompt, each on its own line). An error is one sentence.\
"""

CONFIGURATION = f"""\
An option on the command line wins over its environment variable, that over `{TOML_FILE}` in the working
folder, that over the default. An unknown key in the file is an error. The key of a server is read from
`SWIFTOPT_API_KEY` alone, so that no listing of processes and no file shows it.\
"""


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yield (command line, help text) of a command and of all below it, in the order in which help lists them."""
    settings = {**command.context_settings, "terminal_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    context.meta[ALL_OPTIONS] = True
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None:
                yield from commands(found, below, context)


def cli_page() -> str:
    """Return docs/cli.md."""
    codes = [f"| {code} | {words} |" for code, words in EXIT_CODES.items()]
    configured = [
        f"| `{LONG_NAMES.get(key, PREFIX + key.upper())}` | `{key}` | `--{key.replace('_', '-')}` |"
        for key in ProgramSettings.model_fields
    ]
    parts = [
        INTRODUCTION,
        "\n".join(["## Exit codes", "", "| code | meaning |", "|---|---|", *codes]),
        "## Configuration",
        CONFIGURATION,
        "\n".join([f"| variable | key in `{TOML_FILE}` | option |", "|---|---|---|", *configured]),
        *(f"## {path}\n\n```text\n{text}\n```" for path, text in commands(swiftopt, "swiftopt")),
    ]
    return "\n\n".join(parts) + "\n"


def api_page(found: dict[str, Any]) -> str:
    """Return the document as a page of Markdown, after the introduction that is written by hand."""
    parts = [API.read_text(encoding="utf-8").partition("\n\n## ")[0]]
    for path, operations in found["paths"].items():
        for method, described in operations.items():
            parts.append(_operation(method.upper(), path, described))
    parts.append("## Request bodies")
    for name in ("JobSubmission", "StreamSource", "Sampling", "TuningSettings", "LookupQuery"):
        parts.append(_fields(name, found["components"]["schemas"][name]))
    return "\n\n".join(parts) + "\n"


def _operation(method: str, path: str, described: dict[str, Any]) -> str:
    lines = [f"## {method} {path}", "", described["description"], ""]
    for parameter in described.get("parameters", []):
        words = parameter.get("description", "") or parameter["schema"].get("title", "")
        lines.append(f"- `{parameter['name']}` ({parameter['in']}): {words}")
    for kind, content in described.get("requestBody", {}).get("content", {}).items():
        lines.append(f"- body `{kind}`: {_name(content['schema'])}")
    for status, response in described["responses"].items():
        kinds = [f"`{kind}` {_name(content['schema'])}" for kind, content in response.get("content", {}).items()]
        if not status.endswith("XX"):
            lines.append(f"- {status}: {', '.join(kinds) or response['description']}")
    return "\n".join(lines)


def _name(schema: dict[str, Any]) -> str:
    if "oneOf" in schema:
        return " or ".join(map(_name, schema["oneOf"]))
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _fields(name: str, schema: dict[str, Any]) -> str:
    rows = [f"### {name}", "", schema.get("description", ""), "", "| field | type | default |", "|---|---|---|"]
    for field, values in schema["properties"].items():
        default = "required" if field in schema.get("required", []) else json.dumps(values.get("default"))
        rows.append(f"| `{field}` | {_type(values)} | {default} |")
    return "\n".join(rows)


def _type(values: dict[str, Any]) -> str:
    if "anyOf" in values:
        return " or ".join(_type(part) for part in values["anyOf"])
    if "enum" in values:
        return ", ".join(f"`{word}`" for word in values["enum"])
    return str(values.get("type") or _name(values))


def deviations() -> Iterator[tuple[str, str]]:
    """Yield (file, sentences) of each `DEVIATION:` comment of the package."""
    folders = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
    for file in [file for folder in folders for file in sorted(folder.rglob("*.py"))]:
        lines = file.read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            if "DEVIATION:" not in line:
                continue
            words, is_comment = [line.partition("DEVIATION:")[2]], line.lstrip().startswith("#")
            for later in lines[at + 1 :]:
                text = later.strip()
                if not text or text.startswith(ENDINGS) or text.startswith("#") != is_comment:
                    break
                words.append(text.lstrip("# "))
            said = " ".join(" ".join(words).split()).partition('"""')[0].strip()
            yield str(file.relative_to(ROOT)), said


def manual_page(text: str) -> str:
    """Return docs/how-it-works.md with its table of departures renewed."""
    rows = [f"| `{file}` | {said[0].upper()}{said[1:]} |".replace("<", "&lt;") for file, said in deviations()]
    table = "\n".join(["| where | what differs, and why |", "|---|---|", *rows])
    return _renewed("deviations", table, text)


def models_page(text: str) -> str:
    """Return docs/models.md with its table of types renewed."""
    rows = [
        f"| `{row.type}` | {row.models} | {'; '.join(row.differences)} | {row.gguf or ''} | {row.weights} |"
        for row in model_types()
    ]
    head = ["| model type | models | differs from Llama | GGUF | proof |", "|---|---|---|---|---|"]
    return _renewed("types", "\n".join([*head, *rows]), text)


def _renewed(name: str, part: str, text: str) -> str:
    return re.sub(MADE.format(name), lambda found: found[1] + part + found[2], text, flags=re.DOTALL)


def serving_page(text: str) -> str:
    """Return docs/serving.md with its tables of thoughts and calls renewed."""
    thoughts = [f"| {form.models} | {_thought_of(form)} |" for form in FORMS.values() if form.thinks]
    calls = [f"| {form.models} | {_call_of(form)} | {form.body} |" for form in FORMS.values() if form.calls]
    lines = ["| models | a thought is |", "|---|---|", *thoughts, "", "| models | a call is | body |", "|---|---|---|"]
    return _renewed("answers", "\n".join([*lines, *calls]), text)


def _thought_of(form: AnswerForm) -> str:
    words = f"{_code(form.thinks[0])} … {_code(form.thought_ends[0])}"
    return f"{words}; left out: {', '.join(map(_code, form.hidden))}" if form.hidden else words


def _call_of(form: AnswerForm) -> str:
    if form.items:
        begin = "" if form.calls[0].startswith("{name}") else form.calls[0]
        return _code(begin + form.items[0] + form.calls_end)
    return f"{_code(form.calls[0])} …" + (f" {_code(form.calls_end)}" if form.calls_end else "")


def _code(text: str) -> str:
    return "`" + text.replace("\n", "\u21b5").replace("|", "\\|").replace("```", "\u02cb\u02cb\u02cb") + "`"


if __name__ == "__main__":
    document = bare_app().openapi()
    SNAPSHOT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    API.write_text(api_page(document), encoding="utf-8")
    CLI.write_text(cli_page(), encoding="utf-8")
    MODELS.write_text(models_page(MODELS.read_text(encoding="utf-8")), encoding="utf-8")
    MANUAL.write_text(manual_page(MANUAL.read_text(encoding="utf-8")), encoding="utf-8")
    SERVING.write_text(serving_page(SERVING.read_text(encoding="utf-8")), encoding="utf-8")
