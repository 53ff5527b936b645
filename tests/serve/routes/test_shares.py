"""Whatever a route has done on the task threads counts as its client's: none has all of them."""

import ast
from pathlib import Path

import pytest

import kvweave.serve.routes

ROUTES = sorted(Path(kvweave.serve.routes.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", ROUTES, ids=lambda path: path.name)
def test_work_of_a_route_is_its_clients(path: Path) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).endswith(("tasks.run", "writing.run"))
    ]
    without = [
        f"line {call.lineno}"
        for call in calls
        if "client" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not without


def test_routes_have_work_done_by_their_context_alone() -> None:
    """`Context.run` and `Context.write` say whose the work is: no route goes past them."""
    texts = {path.name: path.read_text() for path in ROUTES}
    assert [name for name, text in texts.items() if "tasks.run(" in text] == ["context.py"]
    assert sum("context.run(" in text for text in texts.values()) > 3
