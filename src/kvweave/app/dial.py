"""One dial from exact to fastest, in plain words, for those who do not know strategies by name."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvweave.app.answer.question import AUTO
from kvweave.app.hosts import ModelHost
from kvweave.errors import ConfigError, RequestError
from kvweave.fuse.selectors.strategies import OFFERED, default_ratio

REUSES = ("full", AUTO, *(name for name in OFFERED if name != "full"))


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
        "Answers as full prefill gives them, up to rounding. Only passages that stood in the very "
        "same place before are not computed again.",
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


class OfferedWay(NamedTuple):
    """A `reuse`, and whether a model is ready for it."""

    name: str
    ratio: float  # where none is given; 0: it takes none
    why: str  # it cannot be asked for; "": it can


def offered_ways(weave: ModelHost, model: str) -> list[OfferedWay]:
    """What people may choose from to compare with one of `weave`'s models, full prefill first, and
    what they may not."""

    def find_refusal(name: str) -> str:
        try:
            weave.check_strategy(name, model=model)
        except (ConfigError, RequestError) as error:  # or the model's last upstream just left
            return str(error)
        return ""

    return [OfferedWay(name, default_ratio(name), find_refusal(name)) for name in REUSES]


def offered_dial(ways: Sequence[OfferedWay]) -> list[DialPosition]:
    """The positions that can be asked for."""
    names = {way.name for way in ways if not way.why}
    return [each for each in DIAL if _strategy(each) in names]


def _strategy(position: DialPosition) -> str:
    reuse = position.reuse
    return reuse if isinstance(reuse, str) else str(reuse["strategy"])
