"""What the OpenAPI schema says beside the models: refusals, event streams, uploads.

`tests/serve/wire/test_schema.py` has schemathesis hold the server to it.
"""

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from kvweave.serve.wire.base import ErrorReply
from kvweave.serve.wire.kb import TextIn

Responses = dict[int | str, dict[str, Any]]

WORDS = {
    400: "The request is unsound; the message names the field",
    401: "No API key, or a wrong one",
    404: "No such model, knowledge base or document",
    405: "Another method is served here",
    403: "The page that asks, or the name it asks by, is not of this server",
    408: "The body stopped coming",
    409: "It is in use, or another process writes it: nothing was changed",
    413: "The body is too large",
    415: "The body is of another type",
    429: "Too many requests; Retry-After says when to come back",
    499: "The client left",
    500: "A bug; the server's log says more",
    503: "The server is stopping, or its device is full",
    504: "The answer took too long",
    507: "The server's disk is full",
}


def refusals(*statuses: int) -> Responses:
    """By reference, to what `install_schema` adds. FastAPI makes a validator of every model that it
    is given: for a dozen refusals of each route that took two thirds of making a server."""

    def refusal(status: int) -> dict[str, Any]:
        schema = {"$ref": f"#/components/schemas/{ErrorReply.__name__}"}
        return {"content": {"application/json": {"schema": schema}}, "description": WORDS[status]}

    return {status: refusal(status) for status in sorted(statuses)}


ANSWER_ERRORS = refusals(400, 401, 403, 404, 405, 408, 413, 429, 500, 503, 504)
TASK_ERRORS = refusals(400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
KB_ERRORS = refusals(400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 500, 503, 507)

UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": TextIn.model_json_schema()},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                            "minItems": 1,
                        }
                    },
                    "required": ["file"],
                    "additionalProperties": False,
                }
            },
        },
    }
}


def or_events(words: str) -> dict[str, Any]:
    """A 200 that may also be server-sent events."""
    return {
        "description": words,
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }


def install_schema(http: FastAPI) -> None:
    """Say what is true: a request that does not validate is a 400 here, never a 422."""

    def schema() -> dict[str, Any]:
        if http.openapi_schema is None:
            made = get_openapi(
                title=http.title,
                version=http.version,
                summary=http.summary,
                routes=http.routes,
            )
            for operations in made["paths"].values():
                for operation in operations.values():
                    operation.get("responses", {}).pop("422", None)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            refusal = ErrorReply.model_json_schema(
                ref_template="#/components/schemas/{model}", mode="serialization"
            )
            schemas |= {**refusal.pop("$defs", {}), ErrorReply.__name__: refusal}
            http.openapi_schema = made
        return http.openapi_schema

    http.openapi = schema  # type: ignore[method-assign]  # as FastAPI documents it


STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em;border-radius:.2em}h2{margin-top:2.5rem}"
    "dt{margin-top:.5rem}pre{overflow:auto}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def install_schema_page(http: FastAPI) -> None:
    @http.get("/docs/api", include_in_schema=False)
    async def docs() -> HTMLResponse:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page_of(http.openapi()), headers=headers)


def page_of(schema: dict[str, Any]) -> str:
    """The schema as one page: every route with its parameters, body and replies."""
    models = schema.get("components", {}).get("schemas", {})
    parts = [
        f"<h1>{escape(schema['info']['title'])} {escape(schema['info']['version'])}</h1>",
        f"<p>{escape(schema['info'].get('summary', ''))}. For programs: "
        '<a href="/openapi.json">/openapi.json</a>.</p>',
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}</p><dl>")
            for each in operation.get("parameters", ()):
                where = f"{each['name']} ({each['in']})"
                parts.append(_line(where, each.get("description", "")))
            body = operation.get("requestBody", {}).get("content", {})
            for kind, content in body.items():
                parts.append(_line(f"body, {kind}", _fields(content.get("schema", {}), models)))
            for status, reply in operation.get("responses", {}).items():
                parts.append(_line(str(status), reply.get("description", "")))
            parts.append("</dl>")
    head = f"<meta charset=utf-8><title>kvweave API</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _line(name: str, words: str) -> str:
    return f"<dt><code>{escape(name)}</code></dt><dd>{escape(words)}</dd>"


def _fields(schema: dict[str, Any], models: dict[str, Any]) -> str:
    """The names of an object's fields."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return ", ".join(models.get(name, schema).get("properties", {}))
