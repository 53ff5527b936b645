"""Imports go one way, and the core imports with torch, numpy and tokenizers alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "kvweave"

# folder → what it may import from kvweave, besides the ground floor and itself
GROUND = {"types", "errors", "metrics", "paths", "config"}
ALLOWED: dict[str, set[str]] = {
    "text": set(),
    "kernels": set(),
    "model": {"kernels"},
    "kv": {"kernels"},
    "fuse": {"kernels", "kv", "text"},
    "calibrate": {"fuse", "kernels", "kv", "text"},
    "corpus": {"text"},
    "ingest": {"corpus", "kv", "text"},
    "plan": {"corpus", "kv", "fuse"},
    "engine": {"kernels", "model", "kv", "fuse"},
    "app": {
        "text",
        "kernels",
        "model",
        "kv",
        "fuse",
        "calibrate",
        "corpus",
        "ingest",
        "plan",
        "engine",
    },
    "serve": {"app"},
    "cli": {
        "text",
        "app",
        "calibrate",
        "serve",
        "model",
        "corpus",
        "kv",
        "fuse",
        "ingest",
        "plan",
    },
}
CORE = ["kernels", "model", "kv", "fuse", "engine"]
HEAVY = ["fastapi", "uvicorn", "faiss", "sentence_transformers", "click", "rich", "redis", "boto3"]


def kvweave_imports(path: Path) -> set[str]:
    """Folders (or top-level files) of kvweave that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            names = [node.module or ""]
            if node.module == "kvweave":
                names = [f"kvweave.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("kvweave.")}
    return found


@pytest.mark.parametrize("folder", sorted(p.name for p in SRC.iterdir() if p.is_dir()))
def test_a_folder_imports_only_what_stands_below_it(folder: str) -> None:
    if folder == "__pycache__":
        return
    assert folder in ALLOWED, f"{folder} is not on the map: add it here and in ARCHITECTURE.md"
    for path in sorted((SRC / folder).rglob("*.py")):
        extra = kvweave_imports(path) - GROUND - ALLOWED[folder] - {folder, "__version__"}
        assert not extra, f"{path.relative_to(SRC)} imports {sorted(extra)}"


@pytest.mark.parametrize("folder", ["plan", "kv/tree", "kv/policies"])
def test_deciding_needs_no_torch(folder: str) -> None:
    """A gateway without a GPU plans too; a tensor in the books would be one too many."""
    modules = [
        ".".join(("kvweave", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in sorted((SRC / folder).rglob("*.py"))
    ]
    script = "import sys\nsys.modules['torch'] = None\n" + "".join(
        f"import {module}\n" for module in modules
    )
    env = {"PYTHONPATH": str(SRC.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)


def test_the_core_imports_without_servers_indexes_or_clients() -> None:
    modules = [
        ".".join(("kvweave", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for folder in CORE
        for path in sorted((SRC / folder).rglob("*.py"))
        if not path.is_relative_to(SRC / "kernels" / "gpu")  # needs Triton; imported where used
    ]
    blocked = f"import sys\nfor name in {HEAVY}: sys.modules[name] = None\n"
    imports = "".join(f"import {module}\n" for module in modules)
    subprocess.run([sys.executable, "-c", blocked + imports], check=True)
