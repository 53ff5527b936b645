"""Every bench script still imports and says what its options are.

Nothing else runs most of them: a name that moves in src/ would break one unseen, until its figures
were wanted again. All of them are asked in one process of their own, so that torch is imported once
and what a bench sets up stays there.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BENCH = REPO / "bench"
FILES = sorted(str(path.relative_to(BENCH)) for path in BENCH.rglob("*.py"))
SCRIPTS = [name for name in FILES if "__main__" in (BENCH / name).read_text()]
ASKED = [
    *(f"{name} --help" for name in SCRIPTS),
    "ttft/run.py --device cuda --help",  # a script of its own behind the same name
    *(name for name in FILES if name not in SCRIPTS),
]
# Prints for each file of bench/, with or without options, what went wrong and what it said. Each is
# run as if by `python FILE`, with nothing that an earlier one imported from bench/ or put on the
# path; one without options is only imported.
ASK_ALL = """
import contextlib, importlib, io, json, os, runpy, sys, traceback
bench, path = sys.argv[1], sys.path[1:]
for asked in sys.argv[2:]:
    file, *options = asked.split()
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(bench):
            del sys.modules[name]
    sys.argv = [os.path.join(bench, file), *options]
    sys.path[:] = [os.path.dirname(sys.argv[0]) if options else bench, *path]
    trouble, said = "", io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            if options:
                runpy.run_path(sys.argv[0], run_name="__main__")
                trouble = "went on behind --help"
            else:
                importlib.import_module(file.removesuffix(".py").replace(os.sep, "."))
    except SystemExit as end:
        if end.code or "usage:" not in said.getvalue():
            trouble = f"exit code {end.code}, said {said.getvalue()!r}"
    except Exception:  # whatever it is: the test of this one goes red with it
        trouble = traceback.format_exc()
    print(json.dumps([asked, [trouble, said.getvalue()]]))
"""


@cache
def replies() -> dict[str, list[str]]:
    """What went wrong with each of ASKED, "" being nothing, and what it said."""
    ran = subprocess.run(
        [sys.executable, "-c", ASK_ALL, str(BENCH), *ASKED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO / "src")},
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.mark.parametrize("asked", ASKED)
def test_a_bench_imports_and_a_script_tells_its_options(asked: str) -> None:
    trouble, _ = replies()[asked]
    assert trouble == ""


def shown_calls() -> Iterator[tuple[str, str, list[str]]]:
    """Every call of a bench with options that a page shows: page, script, options."""
    for page in [*sorted((REPO / "docs").glob("*.md")), REPO / "README.md", BENCH / "README.md"]:
        for call in re.findall(r"(?<![\w/])bench/([\w/]+\.py(?: [^`\n|#]+)?)", page.read_text()):
            script, *words = call.split()
            options = [word.partition("=")[0] for word in words if re.match("--[a-z]", word)]
            yield page.name, script, options


def test_benches_take_the_options_that_pages_show() -> None:
    wrong, checked = [], 0
    for page, script, options in shown_calls():
        if script.startswith("NAME"):  # any
            continue
        assert (BENCH / script).is_file(), f"{page} shows {script}"
        asked = f"{script} --device cuda --help"
        if "--device" not in options or asked not in ASKED:
            asked = f"{script} --help"
        for option in options:
            checked += 1
            if not re.search(rf"{option}\b", replies()[asked][1]):
                wrong.append(f"{page}: bench/{script} has no {option}")
    assert checked > 40
    assert wrong == []


@pytest.mark.parametrize("name", [name for name in SCRIPTS if os.sep in name])
def test_a_script_in_a_folder_looks_for_modules_in_bench_instead(name: str) -> None:
    """Before it imports anything: torch would take ttft/cuda.py for a package of that name."""
    tree = ast.parse((BENCH / name).read_text())
    foreign = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else node.names)
        if str(getattr(module, "name", module)).split(".")[0] not in sys.stdlib_module_names
    ]
    swaps = [node.lineno for node in tree.body if "sys.path[0] = " in ast.unparse(node)]
    assert len(swaps) == 1
    assert swaps[0] < min(foreign, default=swaps[0] + 1)


@pytest.mark.parametrize("name", FILES)
def test_what_a_bench_takes_from_kvweave_is_there(name: str) -> None:
    """Imports inside functions too, which only a run (or a GPU with Triton) would reach."""
    lost = [
        f"{node.module}.{each.name}, line {node.lineno}"
        for node in ast.walk(ast.parse((BENCH / name).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvweave"
        for each in node.names
        if each.name not in names_in(node.module or "")
    ]
    assert not lost


@cache
def names_in(module: str) -> set[str]:
    """What can be imported from a module of ours: read, not run."""
    folder = REPO / "src" / Path(*module.split("."))
    file = folder.with_suffix(".py")  # a folder of the same name beside it holds data
    if not file.is_file():
        file = folder / "__init__.py"
    names = {each.stem for each in folder.glob("*") if (each / "__init__.py").is_file()}
    names |= {each.stem for each in folder.glob("*.py")}
    if not file.is_file():
        return names
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names
