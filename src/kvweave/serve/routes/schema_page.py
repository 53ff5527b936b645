"""GET /docs: the API for people, made of the schema. No script, and nothing from elsewhere."""

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em;border-radius:.2em}h2{margin-top:2.5rem}"
    "dt{margin-top:.5rem}pre{overflow:auto}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def install_schema_page(http: FastAPI) -> None:
    @http.get("/docs", include_in_schema=False)
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
