"""How large the house is, and how easily one finds one's way: counts over `src/kvweave`.

    python bench/house.py

Nothing is judged here; tests/test_architecture.py holds the few numbers that have a limit.
"""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "kvweave"
COMPLEX = 15
FRAGMENT = re.compile(r"(Of|As|The same|Likewise|See|Itself|Those|So too)\b")
# past participles by ending, and the irregular ones that were seen
IRREGULAR = {
    "held", "told", "laid", "took", "kept", "found", "gone", "made", "heard", "read_again", "known",
    "taken", "given", "chosen", "left", "lost", "said", "sent", "seen", "shown", "written", "begun",
    "built", "drawn", "met", "paid", "put", "run", "set", "stood", "thrown", "worn", "came",
}  # fmt: skip
VERBS = {"need", "feed", "exceed", "embed", "read", "seed", "shed", "proceed", "run", "put", "set"}


def files() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SRC.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Modules of the package that each module imports, wherever in the file."""
    trees = {module_of(path): tree for path, tree in files()}
    found: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvweave"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    target = whole if whole in trees else node.module
                    if target in trees and target != name:
                        found[name].add(target)
    return found


def num_floors(folder: str, known: dict[str, set[str]]) -> int:
    """The longest chain of imports inside one folder."""
    inside = {name for name in known if name.startswith(f"kvweave.{folder}.")}
    height: dict[str, int] = {}

    def climb(name: str, above: tuple[str, ...]) -> int:
        if name not in height:
            below = [each for each in known[name] if each in inside and each not in above]
            height[name] = 1 + max((climb(each, (*above, name)) for each in below), default=0)
        return height[name]

    return max((climb(name, ()) for name in inside), default=0)


def two_way_pairs(known: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Folders that import each other both ways."""
    folder = {name: name.rpartition(".")[0] for name in known}
    folder |= {name: name for name in known if (SRC.parent / name.replace(".", "/")).is_dir()}
    ways: dict[str, set[str]] = defaultdict(set)
    for name, targets in known.items():
        ways[folder[name]] |= {folder[each] for each in targets} - {folder[name]}
    return sorted((a, b) for a in ways for b in ways[a] if a < b and a in ways.get(b, ()))


def functions() -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Every function, and whether it is a property."""
    for _, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(each) for each in node.decorator_list]
                yield node, any("property" in each or "setter" in each for each in marks)


def is_participle(name: str) -> bool:
    """Whether a function is called by a bare participle."""
    bare = name.strip("_")
    if bare in VERBS or "_" in bare:
        return False
    return bare in IRREGULAR or (bare.endswith("ed") and len(bare) > 3)


BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert)


def complexity(function: ast.AST) -> int:
    """Ways through a function and what it defines: branches, comprehensions with their conditions,
    and each further operand of `and` and `or`, as radon counts them."""
    ways = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            ways += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            ways += 1 + len(node.ifs)
        elif isinstance(node, ast.match_case):
            ways += 1
        else:
            ways += isinstance(node, BRANCHES)
    return ways


def words_per_sentence(path: Path) -> float:
    """Of running text: no tables, no code, no headings."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    lines = [each for each in text.splitlines() if not re.match(r"\s*(\||#|!\[|<|    )", each)]
    sentences = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*\d]+\.?\s", "\n".join(lines))
    counts = [len(each.split()) for each in sentences if len(each.split()) > 2]
    return sum(counts) / max(1, len(counts))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    known, paths = imports(), [path for path, _ in files()]
    every = list(functions())
    docs = [ast.get_docstring(node) or "" for node, _ in every]
    pairs = two_way_pairs(known)
    architecture = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"[\w/]+\.(?:py|md|h|c|js)\b", architecture))
    counts = {
        "lines of Python": sum(len(path.read_text().splitlines()) for path in paths),
        "files of Python": len(paths),
        "floors of engine/": num_floors("engine", known),
        "pairs of folders that import each other": len(pairs),
        f"functions of complexity {COMPLEX} or more": sum(
            complexity(node) >= COMPLEX for node, _ in every
        ),
        "functions named by a bare participle": sum(
            is_participle(node.name) for node, is_property in every if not is_property
        ),
        "methods called `of`": sum(node.name == "of" for node, _ in every),
        "docstrings that begin as a fragment": sum(bool(FRAGMENT.match(each)) for each in docs),
        "files that ARCHITECTURE.md names": len(named),
        "words per sentence, README": round(words_per_sentence(ROOT / "README.md"), 1),
        "words per sentence, ARCHITECTURE": round(words_per_sentence(ROOT / "ARCHITECTURE.md"), 1),
    }
    for what, number in counts.items():
        print(f"{number:>8}  {what}")
    print("\nfolders that import each other:")
    for a, b in pairs:
        print(f"  {a.removeprefix('kvweave.')} ↔ {b.removeprefix('kvweave.')}")


if __name__ == "__main__":
    main()
