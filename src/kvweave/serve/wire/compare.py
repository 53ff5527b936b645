"""POST /v1/compare: request. The reply is events."""

from typing import Annotated

from kvweave.serve.wire.base import (
    MOST_CHUNKS,
    NAME_PATTERN,
    Incoming,
    Text,
    schema_only,
)
from kvweave.serve.wire.chat import AnyDocument, AnyReuse, ChatMessage

FEWEST_WAYS, MOST_WAYS = 2, 3
MAX_TOKENS = 256  # unless it is said
MOST_TOKENS = 2048


class WayIn(Incoming):
    """One way to answer."""

    reuse: AnyReuse
    ratio: float | None = None  # in place of the one in `reuse`


class CompareRequest(Incoming):
    """The body of POST /v1/compare."""

    messages: Annotated[list[ChatMessage], schema_only(minItems=1)]
    model: Text | None = None  # as in a chat request; of all ways
    ways: Annotated[list[WayIn], schema_only(minItems=FEWEST_WAYS, maxItems=MOST_WAYS)]
    kb: Annotated[Text | None, schema_only(pattern=NAME_PATTERN)] = None
    documents: list[AnyDocument] | None = None
    k: Annotated[int | None, schema_only(minimum=1, maximum=MOST_CHUNKS)] = None
    max_tokens: Annotated[int, schema_only(minimum=1, maximum=MOST_TOKENS)] = MAX_TOKENS
