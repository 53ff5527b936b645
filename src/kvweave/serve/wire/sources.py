"""The chunks that an answer was made from, in plain JSON."""

from typing import Any, Literal

from kvweave.app.weave import AnswerSource
from kvweave.serve.wire.base import Outgoing


class SourceOut(Outgoing):
    """One of the chunks that an answer was made from."""

    cited_as: int  # from 1, best first
    document: str | None  # its id in the knowledge base; null: the request brought it. Not streamed
    document_id: str | None  # the same
    title: str
    chunk: str  # id
    score: float | None  # of the search; null: the request brought it
    span: tuple[int, int] | None  # its tokens in the prompt, [start, end); null: not known
    tier: str | None  # where its KV came from; null: it was computed, or an upstream knows
    # of a reused one some may be recomputed; null: through a gateway, an upstream knows
    fate: Literal["exact", "reused", "computed"] | None


def sources_out(sources: tuple[AnswerSource, ...]) -> list[SourceOut]:
    return [
        SourceOut.model_validate({**source.as_json(), "document_id": source.document})
        for source in sources
    ]


def streamed_sources(sources: tuple[AnswerSource, ...]) -> list[dict[str, Any]]:
    """As `sources_out`, for the last event of a stream. Without `document`: the page of Open WebUI,
    which streams, has a list of texts of that name in its own sources, and breaks at a string."""
    return [source.model_dump(exclude={"document"}) for source in sources_out(sources)]
