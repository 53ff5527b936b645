"""Imports go one way, a name stands for one thing, and the core imports with little.

ARCHITECTURE.md draws what is held here. A new folder gets a line in ROOMS and one on that page.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "kvweave"

# what may lie loose in the root: files that everybody may import, and the two doors
GROUND = {
    *("errors", "types", "reasons", "metrics", "paths", "config", "config_keys", "child_process")
}
DOORS = {"__init__", "__main__"}
# room → what it may import, besides the ground floor and itself. A room is a folder of the package
# or, where its parts are held apart too, a folder in one; "app" alone is the loose files of app/
ROOMS: dict[str, set[str]] = {
    "text": set(),
    "demo": set(),
    # an operator imports its GPU kernel where a CUDA tensor arrives
    "kernels": {"kernels/gpu", "kernels/native"},
    "kernels/gpu": {"kernels"},
    "kernels/native": {"kernels"},
    "corpus": {"text", "kernels"},
    "model": {"kernels", "kernels/gpu", "kernels/native", "model/files"},
    "model/files": set(),
    "kv": {"kv/format", "kv/tiers"},
    "kv/format": {"kernels"},
    "kv/tiers": {"kv/format"},
    "kv/tree": {"kv"},
    "fuse": {"kernels", "kv", "kv/format"},
    "fuse/encode": {"text", "kernels", "kv", "kv/format", "fuse"},
    "fuse/selectors": {"kernels", "kv/format", "fuse", "fuse/encode"},
    "fuse/transfer": {"kernels", "kv/format", "fuse", "fuse/selectors"},
    "ingest": {"corpus"},
    "plan": {"kv/tree"},
    "calibrate": {
        *("text", "corpus", "kernels", "model", "model/files", "kv/format"),
        *("fuse", "fuse/encode", "fuse/selectors"),
    },
    "engine": {"kernels", "model", "kv", "kv/format", "kv/tree", "fuse", "fuse/transfer"},
    "app": {
        *("text", "corpus", "model/files", "fuse/selectors", "ingest", "plan", "calibrate"),
        *("engine", "app/library", "app/audit", "app/answer"),
    },
    "app/library": {
        *("text", "kernels", "corpus", "model", "model/files", "kv", "kv/format", "kv/tiers"),
        *("fuse", "fuse/encode", "ingest", "plan", "calibrate", "engine"),
    },
    "app/auto": {
        *("text", "kernels", "corpus", "model", "kv", "kv/format", "kv/tree", "fuse"),
        *("fuse/encode", "fuse/selectors", "fuse/transfer", "plan", "calibrate", "engine"),
        *("app/library", "app/audit"),
    },
    "app/audit": {"corpus", "calibrate", "plan", "engine", "app/library"},
    "app/answer": {
        *("text", "corpus", "model/files", "fuse", "fuse/selectors", "plan", "calibrate"),
        *("engine", "app/library", "app/auto", "app/audit"),
    },
    "app/libraries": {
        *("demo", "corpus", "kv/format", "kv/tree", "fuse/encode", "ingest", "plan"),
        *("calibrate", "app", "app/library", "app/auto", "app/audit", "app/answer"),
    },
    "serve/access": {"app/answer", "app/libraries"},
    "serve/wire": {"app", "app/answer", "app/libraries", "serve/access"},
    "serve/workers": {"app", "serve/access", "serve/observe"},
    "serve/observe": {"app", "app/answer", "app/libraries", "serve/access", "serve/wire"},
    "serve/uploads": {"app/libraries", "serve/access", "serve/wire", "serve/workers"},
    "serve/routes": {
        *("app", "app/answer", "app/libraries", "serve/access", "serve/wire", "serve/workers"),
        *("serve/observe", "serve/uploads"),
    },
    "serve/ui": {"serve/access"},
    "serve": {
        *("app", "app/libraries", "serve/access", "serve/wire", "serve/workers", "serve/observe"),
        *("serve/routes", "serve/ui"),
    },
    "gateway": {
        *("text", "corpus", "model/files", "kv", "kv/tiers", "kv/tree", "ingest", "plan"),
        *("engine", "app/library", "app/answer"),
    },
    "hosts/vllm": {
        *("text", "kernels", "corpus", "model", "model/files", "kv", "kv/format", "kv/tiers"),
        *("fuse", "fuse/encode", "fuse/selectors", "fuse/transfer", "plan", "calibrate"),
        *("app/library", "app/auto"),
    },
    "cli": {
        *("text", "demo", "corpus", "model/files", "kv/format", "kv/tiers", "fuse", "fuse/encode"),
        *("fuse/selectors", "ingest", "plan", "calibrate", "app", "app/library", "app/auto"),
        *("app/audit", "app/answer", "app/libraries", "serve", "serve/access"),
        *("serve/observe", "serve/routes", "gateway", "clients"),
        "kernels/native",  # whether there is a compiler
    },
    "clients": set(),
}
CORE = ["kernels", "model", "kv", "fuse", "engine"]
HEAVY = [
    *("fastapi", "uvicorn", "faiss", "sentence_transformers", "click", "rich", "redis", "boto3"),
    *("platformdirs", "huggingface_hub", "filelock", "jinja2", "pydantic", "starlette"),
]
MOST_PARAMETERS = 7  # of a function; more want an object that holds those which travel together
WIDE = {"app/weave.py:open"}  # keyword arguments that users type


def files() -> Iterator[Path]:
    return (path for path in sorted(SRC.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in files()}


def room_of(path: Path) -> str:
    """The room that a file stands in: the deepest folder that ROOMS knows, or its own name."""
    parts = path.relative_to(SRC).with_suffix("").parts
    if len(parts) == 1:
        return parts[0]
    return next((r for n in (2, 1) if (r := "/".join(parts[:-1][:n])) in ROOMS), parts[0])


def imports_of(path: Path) -> set[Path]:
    """Files of the package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            module = node.module or ""
            below = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            front_doors = {"kvweave"} if "kvweave.__version__" in below else set()
            found |= below or {module} | front_doors
    return {MODULES[name] for name in found & MODULES.keys()}


def rooms_below(path: Path) -> set[str]:
    """Rooms that a file imports from, besides its own."""
    return {room_of(o) for o in imports_of(path) if o.parent != SRC} - {room_of(path)}


def test_the_root_holds_a_handful_of_files() -> None:
    loose = {path.stem for path in SRC.glob("*.py")}
    assert loose == GROUND | DOORS, "a new file goes into a room"


def test_every_folder_is_on_the_map() -> None:
    folders = {path.relative_to(SRC).parts[0] for path in files() if path.parent != SRC}
    assert folders == {room.split("/")[0] for room in ROOMS}
    page = (SRC.parents[1] / "ARCHITECTURE.md").read_text()
    for room in ROOMS:
        assert f"`{room}/`" in page, f"ARCHITECTURE.md says nothing of {room}/"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_stands_below_it(room: str) -> None:
    inside = [path for path in files() if room_of(path) == room]
    assert inside, "an empty room"
    for path in inside:
        extra = rooms_below(path) - ROOMS[room]
        assert not extra, f"{path.relative_to(SRC)} imports {sorted(extra)}"
    unused = ROOMS[room].difference(*map(rooms_below, inside))
    assert not unused, f"{room}/ no longer imports {sorted(unused)}"


@pytest.mark.parametrize("file", sorted(GROUND))
def test_the_ground_floor_imports_no_room(file: str) -> None:
    assert {other.stem for other in imports_of(SRC / f"{file}.py")} <= GROUND


def floors() -> dict[str, int]:
    """The height of each folder and loose file: one more than the highest it imports."""
    below: dict[str, set[str]] = defaultdict(set)
    for path in files():
        me = path.relative_to(SRC).with_suffix("").parts[0]
        below[me] |= {o.relative_to(SRC).with_suffix("").parts[0] for o in imports_of(path)} - {me}
    height: dict[str, int] = {}

    def climb(box: str, path: tuple[str, ...]) -> int:
        assert box not in path, f"a circle: {' → '.join((*path, box))}"
        if box not in height:
            height[box] = 1 + max((climb(o, (*path, box)) for o in below[box]), default=0)
        return height[box]

    for box in list(below):
        climb(box, ())
    return height


def test_the_house_has_few_floors_and_no_circle() -> None:
    assert max(floors().values()) <= 10


def test_no_two_files_import_each_other() -> None:
    """Counting what is imported inside functions, too."""
    done: set[Path] = set()

    def walk(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, " → ".join(p.name for p in (*above, path))
        if path not in done:
            for other in imports_of(path):
                if other.name != "__init__.py":  # a front door imports what lies behind it
                    walk(other, (*above, path))
            done.add(path)

    for path in files():
        walk(path, ())


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(SRC)), node


def test_a_class_name_stands_for_one_thing() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for where, node in classes():
        found[node.name].append(where)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_no_class_is_cut_into_base_classes() -> None:
    """A base class with a single subclass is a cut: let one object hold the other."""
    known = {node.name for _, node in classes()}
    below: dict[str, set[str]] = defaultdict(set)
    for _, node in classes():
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and name.id in known:
                below[name.id].add(node.name)
    assert {base: subs for base, subs in below.items() if len(subs) == 1} == {}


def test_parameters_that_travel_together_are_one_object() -> None:
    wide = set()
    for path in files():
        if path.is_relative_to(SRC / "kernels"):
            continue  # a kernel's tensors are its parameters
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
                count = len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
                if count > MOST_PARAMETERS:
                    wide.add(f"{path.relative_to(SRC)}:{node.name}")
    assert wide == WIDE


def import_all(modules: list[str], blocked: list[str]) -> None:
    """In a fresh interpreter in which what is blocked cannot be imported."""
    script = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    script += "".join(f"import {module}\n" for module in modules)
    env = {"PYTHONPATH": str(SRC.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)


@pytest.mark.parametrize("part", ["plan", "kv/tree", "kv/policies.py", "config.py"])
def test_deciding_needs_no_torch(part: str) -> None:
    """A gateway without a GPU plans too; a tensor in the books would be one too many."""
    inside = [path for path in files() if path.is_relative_to(SRC / part)]
    assert inside
    import_all([name_of(path) for path in inside], ["torch"])


def test_the_core_imports_without_servers_indexes_or_clients() -> None:
    inside = [path for path in files() if path.relative_to(SRC).parts[0] in CORE]
    gpu = SRC / "kernels" / "gpu"  # needs Triton; imported where used
    import_all([name_of(p) for p in inside if not p.is_relative_to(gpu)], HEAVY)
