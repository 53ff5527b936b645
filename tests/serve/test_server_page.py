"""docs/server.md is true: its commands run, its tables are complete."""

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.serve.http import build_http
from kvweave.serve.routes.context import make_context
from worlds.serving import KbServer

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "server.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
(SHOWN,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_of_the_page_runs_in_order(kb_server: KbServer) -> None:
    assert len(COMMANDS) == 8
    replies = []
    for command in COMMANDS:
        ran = subprocess.run(
            ["bash", "-ec", f"URL={kb_server.url}\n{command}"], capture_output=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr.decode()
        replies.append(ran.stdout.decode())
    assert json.loads(replies[0])["added"] == 1
    assert json.loads(replies[1])["added"] == 1
    assert json.loads(replies[2])["data"][0]["title"] == "Zorbs"
    answer = json.loads(replies[3])
    assert answer["explain"]["chunks"]
    assert answer["usage"]["completion_tokens"] == 8
    told, shown = json.loads(replies[4]), json.loads(SHOWN)
    assert told["kv"].keys() == shown["kv"].keys()
    assert told.keys() == shown.keys()
    assert told["kv"]["chunks_total"] >= 2, "both documents are there"
    assert replies[5].rstrip().endswith("data: [DONE]")
    assert json.loads(replies[6])["object"] == "ingest.job"
    assert replies[7].count('"quality"') == 3
    assert replies[7].rstrip().endswith("data: [DONE]")


def test_every_route_is_on_the_page(weave: Weave) -> None:
    for path, operations in build_http(make_context(weave)).openapi()["paths"].items():
        shown = re.sub(r"{\w+_id}", "{id}", path)
        for method in operations:
            assert f"`{method.upper()} {shown}`" in PAGE, f"{method} {path}"


def test_every_path_that_a_page_asks_by_curl_is_a_route(weave: Weave) -> None:
    routes = build_http(make_context(weave)).openapi()["paths"]
    known = [re.sub(r"{\w+}", "[^/]+", path) for path in routes]
    asked = {
        (page.name, path)
        for page in [*(REPO / "docs").glob("*.md"), REPO / "README.md"]
        for path in re.findall(
            r"\bcurl (?:-\S+ |'[^']*' |\w+=\S+ )*(?:http://[\w.:]+|\$URL)(/[\w/.-]*)",
            page.read_text(),
        )
    }
    assert len(asked) > 6
    for page, path in asked:
        assert any(re.fullmatch(route, path) for route in known), f"{page}: {path}"


def test_every_metric_of_the_server_is_on_the_page(kb_server: KbServer) -> None:
    page = httpx.get(f"{kb_server.url}/metrics").text
    names = re.findall(r"^# TYPE kvweave_(\w+) \w+$", page, re.MULTILINE)
    assert len(names) > 10
    for name in names:
        own = not name.startswith(("kv_", "engine_")) and not name.endswith("_created")
        assert not own or name in PAGE, name


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503, 504, 507]
)
def test_every_refusal_is_on_the_page(status: int) -> None:
    assert f"\n| {status} | " in PAGE
