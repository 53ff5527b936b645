"""What the OpenAPI schema says beside the models: refusals, event streams, uploads.

`tests/serve/wire/test_schema.py` has schemathesis hold the server to it.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

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
