"""One dial from exact to fastest, in plain words, for those who do not know strategies by name."""

from typing import Any, NamedTuple


class DialPosition(NamedTuple):
    """One position: what to ask for, and what it means."""

    name: str
    reuse: str | dict[str, Any]  # as the field of a chat request
    words: str
    needs_chunks: bool  # goes with a knowledge base or documents alone


FAST_RATIO = 0.15
DIAL = (
    DialPosition(
        "exact",
        "prefix",
        "Every answer is what full prefill would give. Only passages that stood in the very same "
        "place before are not computed again.",
        needs_chunks=False,
    ),
    DialPosition(
        "auto",
        "auto",
        "The fastest way that was measured to change answers next to nothing for this model, and "
        "exact where none was.",
        needs_chunks=False,
    ),
    DialPosition(
        "fast",
        {"strategy": "weave", "ratio": FAST_RATIO},
        "Stored passages are reused and the 15 % of their tokens that the question looks at most "
        "are recomputed, whatever was measured. Answers may differ a little.",
        needs_chunks=True,
    ),
    DialPosition(
        "fastest",
        "reuse",
        "Stored passages are reused as they are. The first word comes soonest; answers that draw "
        "on several passages may be worse.",
        needs_chunks=True,
    ),
)
