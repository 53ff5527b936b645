"""A request laid out: what of it is exact, stored or missing, before anything is priced."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import DEVICE, HOST, ChunkRef, Match, Node
from kvweave.plan.plan import Span, SpanKind, Stored
from kvweave.reasons import Reason
from kvweave.types import ChunkId


class Layout(NamedTuple):
    """Preamble, history, chunks in their order, question; per chunk what could be used of it."""

    preamble: Span
    path: tuple[Span, ...]  # history and chunks matched in the tree, device part first
    behind: tuple[ChunkRef, ...]  # the others, history first
    stored: tuple[Sequence[Stored], ...]  # for each of those
    question_tokens: int
    total: int
    # the first chunk from the store, computed right behind the preamble as here; FUSED if rounded
    first: Span | None
    num_history: int  # parts of the history among `path` and `behind`
    exact_tokens: int  # of the exact path, preamble included
    is_new_in_front: bool = (
        False  # the first of `behind` is stored, but not as it would stand there
    )

    def computed_part(self, place: int, start: int, reason: Reason, exact_after: bool) -> Span:
        """One of `behind`, computed. What was said has its own reason: nothing stores it."""
        chunk_id, num_tokens = self.behind[place]
        in_history = self.is_in_history(place)
        if in_history and not self.stored[place]:
            reason = Reason.HISTORY
        elif place == 0 and self.is_new_in_front and reason is Reason.NOT_STORED:
            reason = Reason.FRONT
        kind = SpanKind.COMPUTED
        return Span(
            kind, start, num_tokens, chunk_id, reason, "", 0, "", "", in_history, exact_after
        )

    def is_in_history(self, place: int) -> bool:
        """Whether one of `behind` is a part of the history."""
        return place < self.num_history - len(self.path)

    def question(self, exact_after: bool) -> Span:
        start = self.total - self.question_tokens
        kind = SpanKind.COMPUTED
        return Span(kind, start, self.question_tokens, None, Reason.ALWAYS, exact_after=exact_after)

    def all_computed(self) -> tuple[Span, ...]:
        """Full prefill."""
        reason = Reason.FULL_IS_FASTER
        spans = [as_computed(self.preamble, Reason.ALWAYS)]
        spans.extend(as_computed(span, reason) for span in self.path)
        start = self.preamble.num_tokens + sum(span.num_tokens for span in self.path)
        for place, chunk in enumerate(self.behind):
            spans.append(self.computed_part(place, start, reason, True))
            start += chunk.num_tokens
        return (*spans, self.question(True))


def lay_out(
    root: Node,
    match: Match,
    chunks: Sequence[ChunkRef],
    stored: Mapping[ChunkId, Sequence[Stored]],
    question_tokens: int,
    can_load: Callable[[str], bool],
    num_history: int = 0,
) -> Layout:
    """Put together what the tree and the store said. A path ends where it cannot be loaded.

    The first `num_history` of `chunks` are parts of the history: chunks of earlier turns, which may
    be stored, and what was said. None of them is exact from the store, nor is what stands behind.
    """
    start = root.num_tokens
    exact = _exact_path(root, match, num_history, can_load)
    path = exact[1:]
    exact_tokens = sum(span.num_tokens for span in exact)
    missing = Reason.NOT_STORED
    preamble = Span(SpanKind.COMPUTED, 0, start, None, missing, exact_after=True)
    if exact:
        preamble, start = exact[0], exact_tokens
    behind = tuple(chunks[len(path) :])
    total = start + sum([chunk.num_tokens for chunk in behind]) + question_tokens
    found: list[Sequence[Stored]] = [stored.get(chunk.id, ()) for chunk in behind]
    first, is_new_in_front = None, False
    if behind and not path:
        in_front = [copy for copy in found[0] if not copy.never_first]
        is_new_in_front = len(found[0]) > 0 and not in_front
        found[0] = found[0] if in_front else ()
        if preamble.kind is SpanKind.EXACT and not num_history:
            first = _first(behind[0], start, in_front, can_load)
    return Layout(
        preamble,
        path,
        behind,
        tuple(found),
        question_tokens,
        total,
        first,
        num_history,
        exact_tokens,
        is_new_in_front,
    )


def _exact_path(
    root: Node, match: Match, num_history: int, can_load: Callable[[str], bool]
) -> tuple[Span, ...]:
    """Return preamble and matched nodes as spans, up to the first that cannot be loaded."""
    if match.num_tokens < root.num_tokens:
        return ()
    spans: list[Span] = []
    start = 0
    for node in (root, *match.nodes):  # the root is no chunk, though it may be one of the tree's
        name = node.chunk_id if spans and node.depth else None
        in_history = 0 < len(spans) <= num_history
        span = _exact(node, start, name, in_history, can_load)
        if span is None:
            break
        spans.append(span)
        start += node.num_tokens
    return tuple(spans)


def _first(
    chunk: ChunkRef, start: int, copies: Sequence[Stored], can_load: Callable[[str], bool]
) -> Span | None:
    """The chunk right behind the preamble from the store, if a copy was computed there."""
    for copy in copies:
        if copy.exact_when_first and can_load(copy.link):
            return Span(
                SpanKind.FUSED if copy.rounded else SpanKind.EXACT,
                start,
                chunk.num_tokens,
                chunk.id,
                Reason.FIRST_ROUNDED if copy.rounded else Reason.FIRST,
                copy.tier,
                copy.size_bytes,
                copy.variant,
                copy.codec,
                exact_after=not copy.rounded,
            )
    return None


def _exact(
    node: Node,
    start: int,
    name: ChunkId | None,
    in_history: bool,
    can_load: Callable[[str], bool],
) -> Span | None:
    """A node of the tree as a span; None when it lies where it cannot be loaded from."""
    tier, load_bytes = "", 0
    if DEVICE not in node.pages and (pages := node.pages.get(HOST)) is not None:
        tier, load_bytes = HOST.value, pages.size_bytes
        if not can_load(tier):
            return None
    size, kind, reason = node.num_tokens, SpanKind.EXACT, Reason.IN_TREE
    return Span(kind, start, size, name, reason, tier, load_bytes, "", "", in_history, True)


def as_computed(span: Span, reason: Reason) -> Span:
    """Return a span with its tokens computed. Behind an exact prefix that is exact too."""
    return span._replace(
        kind=SpanKind.COMPUTED,
        reason=reason,
        tier="",
        load_bytes=0,
        codec="",
        exact_after=True,
    )
