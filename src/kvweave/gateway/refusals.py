"""What an upstream says where it does not answer, as one line that names it and the way out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvweave.gateway.connections import UpstreamFailed

HOST_NOT_ALLOWED = "host_not_allowed"  # a `kvweave serve` without keys: see serve/origins.py


class ToldError(NamedTuple):
    """An error in OpenAI's shape."""

    message: str
    param: str | None = None  # the request's field at fault
    code: str | None = None  # for programs


def error_of(document: Any) -> ToldError | None:
    """The error in the JSON document of a reply; None: it has another shape."""
    error = document.get("error") if isinstance(document, Mapping) else None
    if not isinstance(error, Mapping) or not isinstance(error.get("message"), str):
        return None
    param, code = error.get("param"), error.get("code")
    return ToldError(
        error["message"],
        None if param is None else str(param),
        None if code is None else str(code),
    )


def refused(upstream: str, status: int, document: Any) -> UpstreamFailed:
    """A reply with an error status, as a failure of this upstream."""
    told = error_of(document) or ToldError(f"it answered with status {status}")
    words = f"{upstream}: {told.message}"
    if told.code == HOST_NOT_ALLOWED:
        words = (
            f"{upstream} does not go by the name in this address; set server.allowed_hosts there, "
            "give it API keys, or use its IP address here"
        )
    elif status == 401:
        words = f"{upstream} refuses the gateway's key; set gateway.key_file ({told.message})"
    return UpstreamFailed(words, status)
