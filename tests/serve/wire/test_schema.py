"""The OpenAPI schema is true: schemathesis sends what it allows and what it forbids.

Whatever comes in, nothing is a 500, and every reply has a declared status, type and shape.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS

from kvweave.app.weave import Weave
from kvweave.serve.http import build_http
from kvweave.serve.routes.context import make_context
from worlds.serving import make_libraries, serving

WANTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
ANSWERING = ("completions", "compare")
EXAMPLES = int(os.environ.get("KVWEAVE_SCHEMA_EXAMPLES", "12"))


def test_the_schema_names_every_route_and_no_422(weave: Weave) -> None:
    schema = build_http(make_context(weave)).openapi()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/kb",
        "/v1/kb/{name}",
        "/v1/kb/{name}/documents",
        "/v1/kb/{name}/documents/{document_id}",
        "/v1/kb/{name}/jobs",
        "/v1/kb/{name}/jobs/{job_id}",
        "/v1/kb/{name}/search",
        "/v1/kb/{name}/chunks/{chunk_id}",
        "/v1/kb/{name}/hottest",
        "/v1/answers",
        "/v1/answers/{answer_id}",
        "/v1/compare",
        "/v1/conversations/{conversation_id}",
        "/v1/demo",
        "/v1/info",
        "/v1/quality",
        "/v1/stats",
        "/v1/tree",
        "/metrics",
        "/healthz",
        "/readyz",
    } <= set(schema["paths"])
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            if path.startswith("/v1"):
                assert {"401", "500"} <= set(operation["responses"]), path
                assert operation["responses"]["401"]["content"] == refusal, path
    detail = schema["components"]["schemas"]["ErrorReply"]["properties"]["error"]["$ref"]
    assert detail.removeprefix("#/components/schemas/") in schema["components"]["schemas"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]


@pytest.fixture(scope="module")
def open_url(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own: what is sent here makes knowledge bases of odd names."""
    libraries = make_libraries(weave, tmp_path_factory.mktemp("fuzzed"))
    with serving(weave, libraries=libraries) as address:
        yield address
    libraries.close()


def run_schema(url: str, examples: int) -> int:
    """Send examples to every operation; returns how many requests that were."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    checks = [check for check in CHECKS.get_all() if check.__name__ in WANTED]
    assert len(checks) == len(WANTED)
    sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @_given(operation)
        def call(case: Any) -> None:
            nonlocal sent
            if isinstance(case.body, dict) and case.operation.path.endswith(ANSWERING):
                case.body.setdefault("max_tokens", 2)  # a random model never ends by itself
            case.call_and_validate(checks=checks, timeout=60)
            sent += 1

        call()
    return sent


def _given(operation: Any) -> Any:
    from hypothesis import given
    from hypothesis.strategies import one_of
    from schemathesis import GenerationMode

    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return given(one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))


@pytest.mark.filterwarnings("ignore")  # its own, about what it cannot negate
def test_whatever_comes_in_no_reply_is_a_500_or_undeclared(open_url: str) -> None:
    assert run_schema(open_url, EXAMPLES) > 100
    seen = httpx.get(f"{open_url}/healthz").json()
    assert (seen["running"], seen["failed"], seen["pinned"]) == (0, seen["failed"], 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_for_longer(open_url: str) -> None:
    assert run_schema(open_url, 150) > 1000


def test_the_fuzzed_folder_holds_knowledge_bases_alone(
    open_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    roots = [p for p in Path(tmp_path_factory.getbasetemp()).iterdir() if "fuzzed" in p.name]
    for root in roots:
        assert all((folder / "kb.json").is_file() for folder in root.iterdir())
