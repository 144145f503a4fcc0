"""The structure of the code: imports point down, floors import no wing, and the front doors start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from wings import ROOT, WINGS, is_here

import swiftopt
from swiftopt.core.wings import load, wings

RANK = {
    "core": 0,
    "models": 1,
    "decoding": 2,
    "optimizer": 3,
    "store": 3,
    "client": 4,
    "tasks": 4,
    "terminal": 4,
    "worker": 5,
    "server": 6,
    "cli": 6,
}
# Wings import floors; their developers' scripts also the wings before them.
RANK |= {wing: rank for rank, wing in enumerate(WINGS, start=7) if is_here(wing)}
ALLOWED = {("cli", "server")}  # The serve command is the one front door to the server.


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all syntax nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> list[tuple[str, int]]:
    """Return (package, line) of every import of this project in a file, even inside functions."""
    depth = len(path.relative_to(ROOT).parts)
    found = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
            found.append((node.module.split(".")[0], node.lineno))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swiftopt."):
            found.append((str(node.module).split(".")[1], node.lineno))
        elif isinstance(node, ast.Import):
            found += [(a.name.split(".")[1], node.lineno) for a in node.names if a.name.startswith("swiftopt.")]
    return found


def sources(*packages: str) -> list[Path]:
    return [path for package in packages or RANK for path in sorted((ROOT / package).rglob("*.py"))]


def test_imports_point_down() -> None:
    upward = []
    for path in sources():
        here = path.relative_to(ROOT).parts[0]
        for there, line in imported(path):
            peers = RANK.get(there) == RANK[here] and there != here
            if there in RANK and (RANK[there] > RANK[here] or peers) and (here, there) not in ALLOWED:
                upward.append(f"{path.relative_to(ROOT)}:{line} {here} -> {there}")
    assert upward == []
    assert any(imported(path) for path in sources())


def test_no_floor_imports_a_wing() -> None:
    floors = [room for room in RANK if room not in WINGS]
    imports = [(str(path), line) for path in sources(*floors) for there, line in imported(path) if there in WINGS]
    assert len(floors) == 11 and imports == []


def test_cli_and_bench_do_not_import_each_other() -> None:
    """Neither may import the other, because the bench can be left out and does not need the commands."""
    imports = {(here, there) for here in ("cli", "bench") for path in sources(here) for there, _ in imported(path)}
    assert imports.isdisjoint({("cli", "bench"), ("bench", "cli")}) and ("cli", "terminal") in imports


def test_what_wings_name_is_there() -> None:
    for wing in wings():
        for command in wing.commands:
            assert load(command.reference).name == command.name
        rest = [wing.presets, *wing.options.values(), *wing.tunings]
        rest += [name for part in wing.parts.values() for name in (part.maker, part.reader)]
        assert None not in [load(reference) for reference in rest if reference]
        assert not wing.methods or list((ROOT / wing.methods.replace(".", "/")).glob("*.py"))


def test_wheel_has_no_script_of_developers() -> None:
    """`setup.py` names the modules that it leaves out, which are run with `python -m` from a checkout."""
    left_out = (ROOT / "setup.py").read_text(encoding="utf-8")
    scripts = {path for wing in WINGS for path in (ROOT / wing).rglob("*.py") if "__main__" in path.read_text("utf-8")}
    scripts -= {ROOT / "engines" / "program.py"}  # It runs in the environments of other engines.
    assert [str(path) for path in scripts if f'"{path.stem}"' not in left_out] == []


def test_only_front_doors_print() -> None:
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("cli", "bench", "papers")
        for node in nodes(path)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert printing == []


@pytest.mark.parametrize(
    "code",
    [
        "import swiftopt",
        "import swiftopt.store",
        "import swiftopt.cli.main",
        "import swiftopt.decoding.methods",
        "swiftopt.Store",
    ],
)
def test_front_doors_start_without_torch(code: str) -> None:
    program = f"import sys, swiftopt\n{code}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_public_name_can_be_imported() -> None:
    for name in swiftopt.__all__:
        assert getattr(swiftopt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        swiftopt.nothing  # noqa: B018


def imports_of(path: Path) -> set[Path]:
    """Return the project's files that a file imports, even only for type checkers."""
    found = set()
    for node in nodes(path):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for target in (folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)):
            if target.is_file():
                found.add(target)
        if folder.is_dir() and any(not (folder / f"{alias.name}.py").is_file() for alias in node.names):
            found.add(folder / "__init__.py")
    return found - {path}


def test_no_file_needs_itself_through_others() -> None:
    needs = {path: {each for each in imports_of(path) if each.name != "__init__.py"} for path in sources()}
    circles = []
    for start in needs:
        seen, todo = set(), list(needs[start])
        while todo:
            path = todo.pop()
            if path not in seen:
                seen.add(path)
                todo += needs.get(path, ())
        if start in seen:
            circles.append(str(start.relative_to(ROOT)))
    assert circles == []
    assert sum(map(len, needs.values())) > len(needs)


def test_no_class_name_means_two_things() -> None:
    """Private names may repeat in other files."""
    found: dict[str, list[str]] = {}
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
