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


def test_there_are_such_routes() -> None:
    found = [p for p in ROUTES if "tasks.run(" in p.read_text()]
    assert len(found) > 5
