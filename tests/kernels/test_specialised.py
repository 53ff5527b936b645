"""What Triton compiles into a kernel: nothing that comes with a request.

By default Triton compiles another kernel when an integer is 1, or begins or ceases to be a multiple
of 16, and whoever asks waits for it. Read from the source: Triton need not be there.
"""

import ast
import re
from pathlib import Path

import pytest

import kvweave.kernels

FOLDER = Path(kvweave.kernels.__file__).parent / "gpu"
# the same for every request of a model on a machine: strides, heads, the scale of the softmax; or
# always a multiple of the block; or pointers by another name
FIXED = re.compile(
    r".*_(row|head|page|layer|ptr|cos|sin)|heads|eps|scale|per_split|num_walkers|kd|vd"
)


def kernels() -> dict[str, ast.FunctionDef]:
    """Those that are launched, by name."""
    sources = [path.read_text() for path in sorted(FOLDER.glob("*.py"))]
    found: dict[str, ast.FunctionDef] = {}
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and "jit" in map(_name, node.decorator_list):
                found[node.name] = node
    launched = {name for s in sources for name in re.findall(r"^ +(\w+)\[", s, re.MULTILINE)}
    return {name: node for name, node in found.items() if name in launched}


def _name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else ""


def _free(node: ast.FunctionDef) -> set[str]:
    """Arguments that are said to be free."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            for keyword in decorator.keywords:
                if keyword.arg == "do_not_specialize":
                    return set(ast.literal_eval(keyword.value))
    return set()


def test_all_kernels_are_looked_at() -> None:
    assert len(kernels()) >= 20


@pytest.mark.parametrize("name", sorted(kernels()))
def test_numbers_of_a_request_are_not_compiled_in(name: str) -> None:
    node = kernels()[name]
    given = [arg.arg for arg in node.args.args if arg.annotation is None]
    free = _free(node)
    assert free <= set(given), "of its arguments"
    bound = [arg for arg in given if arg not in free and not FIXED.fullmatch(arg)]
    assert not bound, f"{name} would be compiled anew for some values of {bound}"
