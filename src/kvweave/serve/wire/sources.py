"""The chunks that an answer was made from, in plain JSON."""

from typing import Literal

from kvweave.app.weave import AnswerSource
from kvweave.serve.wire.base import Outgoing


class SourceOut(Outgoing):
    """One of the chunks that an answer was made from."""

    cited_as: int  # from 1, best first
    # in the knowledge base; null: the request brought it. Not `document`: sources of Open WebUI have
    # a list of texts there, and its page breaks at anything else
    document_id: str | None
    title: str
    chunk: str  # id
    score: float | None  # of the search; null: the request brought it
    span: tuple[int, int] | None  # its tokens in the prompt, [start, end); null: not known
    tier: str | None  # where its KV came from; null: it was computed, or an upstream knows
    # of a reused one some may be recomputed; null: through a gateway, an upstream knows
    fate: Literal["exact", "reused", "computed"] | None


def sources_out(sources: tuple[AnswerSource, ...]) -> list[SourceOut]:
    return [SourceOut.model_validate(source.as_json()) for source in sources]
